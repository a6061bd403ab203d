"""From per-trajectory records to the tables of a quality report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentkv_serve.evaluation.scores import PHASES
from agentkv_serve.evaluation.statistics import by_task, compare, compare_shares, interval

REFERENCE = "agentkv"
Record = dict[str, Any]


def summarise(records: Sequence[Record], policies: Sequence[str], budgets: Sequence[str]) -> dict[str, Any]:
    """Per budget: every policy's means over tasks, and its paired comparison with `agentkv`.

    Only trajectories on which all named arms were scored count, so that every number of a budget is over the same ones.
    """
    tables = {}
    for budget in budgets:
        arms = {name: f"{name}@{budget}" for name in policies}
        arms = {name: arm for name, arm in arms.items() if any(_scores(r, arm) for r in records)}
        used = [record for record in records if arms and all(_scores(record, arm) for arm in arms.values())]
        if not used:
            continue
        scores = {name: [_scores(record, arm) or {} for record in used] for name, arm in arms.items()}
        tasks = [record["task"] for record in used]
        tables[budget] = {
            "trajectories": len(used),
            "tasks": len(set(tasks)),
            "tokens": sum(score["n"] for score in next(iter(scores.values()))),
            "copies": sum(score["n_copy"] for score in next(iter(scores.values()))),
            "policies": {name: _means(tasks, values) for name, values in scores.items()},
            "paired": {
                name: _paired(tasks, values, scores[REFERENCE])
                for name, values in scores.items()
                if REFERENCE in scores and name != REFERENCE
            },
        }
    return tables


def pairs(records: Sequence[Record], first: str, second: str) -> dict[str, Any] | None:
    """Paired comparison of two arms by their full names, over the trajectories that have both."""
    used = [record for record in records if _scores(record, first) and _scores(record, second)]
    if not used:
        return None
    ours, theirs = ([_scores(record, arm) or {} for record in used] for arm in (first, second))
    return _paired([record["task"] for record in used], ours, theirs)


def _scores(record: Record, arm: str) -> dict[str, Any] | None:
    entry = record["arms"].get(arm)
    return None if entry is None else entry["scores"]


def _means(tasks: Sequence[str], scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ["kl", "top1", "nll_delta", "sharp_miss", "kv_tokens", "peak_tokens", "copy_nll_delta"]
    names += [f"{name}_{phase}" for phase in PHASES for name in ("kl", "top1", "sharp_miss")]
    result: dict[str, Any] = {name: _task_mean(tasks, [score.get(name) for score in scores]) for name in names}
    result["kl_95"] = interval(np.array(list(by_task(tasks, [score["kl"] for score in scores]).values())))
    copies = sum(score["n_copy"] for score in scores)
    result["copy_acc"] = _share(sum(score["copy_right"] for score in scores), copies)
    result["copy_acc_full"] = _share(sum(score["copy_right_full"] for score in scores), copies)
    for group in ("coverage", "retained"):
        keys = sorted({key for score in scores for key in score[group]})
        result[group] = {key: _task_mean(tasks, [score[group].get(key) for score in scores]) for key in keys}
    return result


def _task_mean(tasks: Sequence[str], values: Sequence[float | None]) -> float | None:
    known = [(task, value) for task, value in zip(tasks, values, strict=True) if value is not None]
    if not known:
        return None
    means = by_task([task for task, _ in known], [value for _, value in known])
    return round(float(np.mean(list(means.values()))), 6)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _paired(tasks: Sequence[str], ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def arrays(name: str) -> tuple[Any, Any]:
        both = (by_task(tasks, [score[name] for score in side]) for side in (ours, theirs))
        return tuple(np.array(list(values.values()), dtype=np.float64) for values in both)  # type: ignore[return-value]

    counts, _ = arrays("n_copy")
    return {
        "kl": compare(*arrays("kl")),
        "copy_acc": compare_shares(*arrays("copy_right"), counts),
        "kv_tokens": compare(*arrays("kv_tokens")),
    }
