"""`agentkv eval auto`: budgets that set themselves, against one budget for all.

Both trade memory for quality, so neither figure alone says which is better: the KL of the automatic budget is compared
with that of the fixed ones at equal KV tokens, and its KV tokens with theirs at equal KL. Between two fixed budgets the
logarithm of the KL is taken to be linear in the tokens; a fixed budget no better than a smaller one is not used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentkv_serve.bench.report import machine
from agentkv_serve.evaluation import plots, quality
from agentkv_serve.evaluation.arms import Budget
from agentkv_serve.evaluation.statistics import by_task, resampled

Floats = npt.NDArray[np.float64]
_LEAST_KL = 1e-9


@dataclass(frozen=True, slots=True)
class Point:
    """A budget's mean KV tokens and KL of every task."""

    name: str
    tokens: Floats
    kl: Floats


def points(records: Sequence[dict[str, Any]], policy: str, budgets: Sequence[str]) -> dict[str, Point]:
    """The budgets' points, over the trajectories that have all of them.

    Raises:
        ValueError: no trajectory has all of them.
    """
    arms = {budget: f"{policy}@{budget}" for budget in budgets}
    used = [r for r in records if all((r["arms"].get(arm) or {}).get("scores") for arm in arms.values())]
    if not used:
        raise ValueError("no trajectory is longer than what the budgets are measured from, or they are not all done")
    tasks = [record["task"] for record in used]

    def means(arm: str, name: str) -> Floats:
        return np.array(list(by_task(tasks, [r["arms"][arm]["scores"][name] for r in used]).values()))

    return {budget: Point(budget, means(arm, "kv_tokens"), means(arm, "kl")) for budget, arm in arms.items()}


def against(auto: Point, fixed: Sequence[Point]) -> dict[str, Any]:
    """Tokens that the fixed budgets need for the same KL, their KL with the same tokens, and what auto saves of either.

    Intervals: 95%, over 10,000 draws of tasks. None where the fixed budgets do not reach that far.
    """
    whole = np.arange(len(auto.kl))[None]
    compared = _compare(auto, fixed, whole)
    found: dict[str, Any] = {name: _none_if_unknown(values[0]) for name, values in compared.items()}
    drawn = _compare(auto, fixed, resampled(len(auto.kl)))
    for name in ("tokens_change", "kl_change"):
        known = drawn[name][~np.isnan(drawn[name])]
        # Of draws in which the fixed budgets reach so far; too few say nothing.
        bounds = np.percentile(known, [2.5, 97.5]) if 2 * len(known) > len(drawn[name]) else None
        found[f"{name}_95"] = None if bounds is None else [round(float(bound), 4) for bound in bounds]
    return found


def _compare(auto: Point, fixed: Sequence[Point], draws: npt.NDArray[np.int64]) -> dict[str, Floats]:
    """Per draw of tasks `[D, T]`: the comparison of the means, `[D]` each."""
    tokens, kl = auto.tokens[draws].mean(1), auto.kl[draws].mean(1)
    curve_tokens = np.stack([point.tokens[draws].mean(1) for point in fixed], 1)
    curve_kl = np.stack([point.kl[draws].mean(1) for point in fixed], 1)
    their_tokens, their_kl = np.empty(len(draws)), np.empty(len(draws))
    for row in range(len(draws)):
        x, y = _envelope(curve_tokens[row], curve_kl[row])
        their_kl[row] = np.exp(np.interp(tokens[row], x, y, left=np.nan, right=np.nan))
        log_kl = np.log(max(kl[row], _LEAST_KL))
        their_tokens[row] = np.interp(-log_kl, -y, x, left=np.nan, right=np.nan)
    return {
        "kv_tokens": tokens,
        "kl": kl,
        "fixed_tokens_at_equal_kl": their_tokens,
        "tokens_change": tokens / their_tokens - 1,
        "fixed_kl_at_equal_tokens": their_kl,
        "kl_change": kl / their_kl - 1,
    }


def _envelope(tokens: Floats, kl: Floats) -> tuple[Floats, Floats]:
    """Tokens and log KL of the budgets that are better than every smaller one, in order of tokens."""
    order = np.argsort(tokens, kind="stable")
    x, y = tokens[order], np.log(np.maximum(kl[order], _LEAST_KL))
    better = np.concatenate([[True], y[1:] < np.minimum.accumulate(y)[:-1]])
    return x[better], y[better]


def hindsight(fixed: Sequence[Point], tokens: float) -> float | None:
    """The least mean KL with so many mean tokens if every task had the one budget that its own curve asks for.

    All tasks are then at the same slope of their curves, so where these are convex, no rule that gives a task one
    budget does better. None beyond what the budgets reach.
    """
    shares = np.linspace(0, 1, 201)
    curves = []
    for task in range(len(fixed[0].kl)):
        x, y = _envelope(np.array([p.tokens[task] for p in fixed]), np.array([p.kl[task] for p in fixed]))
        at = x[0] + shares * (x[-1] - x[0])
        curves.append((at, np.exp(np.interp(at, x, y))))
    held, kl = (np.stack(side) for side in zip(*curves, strict=True))  # [tasks, 201]
    prices = np.geomspace(1e-8, 1, 801)
    chosen = np.stack([(kl + price * held).argmin(1) for price in prices[::-1]])  # [prices, tasks], ever more tokens
    tasks = np.arange(len(held))
    means = held[tasks, chosen].mean(1), kl[tasks, chosen].mean(1)
    return _none_if_unknown(np.exp(np.interp(tokens, means[0], np.log(means[1]), left=np.nan, right=np.nan)))


def _none_if_unknown(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 6)


def run(settings: quality.Settings, folder: Path, out: Path) -> dict[str, Any]:
    """Evaluates one policy at automatic and at fixed budgets; writes the summary, its page and the plot.

    Raises:
        ValueError: not one policy, or no budget of either kind.
    """
    autos = [budget for budget in settings.budgets if budget.auto]
    families = {
        "tokens": [budget for budget in settings.budgets if not budget.auto and budget.share is None],
        "shares": [budget for budget in settings.budgets if not budget.auto and budget.share is not None],
    }
    families = {name: budgets for name, budgets in families.items() if budgets}
    if len(settings.entrants) != 1 or not autos or not families:
        raise ValueError("give one policy, and automatic and fixed budgets")
    records = quality.run(settings, folder)
    policy = settings.entrants[0].name
    every = points(records, policy, [budget.text for budget in settings.budgets])
    result = {
        "model": settings.model.name,
        "policy": policy,
        "protocol": {**settings.protocol(), "least": settings.least, "split": settings.split or "both"},
        "commits": sorted({arm["commit"] for record in records for arm in record["arms"].values()}),
        "machine": machine(),
        "trajectories": len(records),
        "tasks": len(next(iter(every.values())).kl),
        "fixed": {
            name: {budget.text: _means(every[budget.text]) for budget in budgets} for name, budgets in families.items()
        },
        "auto": {
            budget.text: {
                **_means(every[budget.text]),
                "against": {
                    name: against(every[budget.text], [every[fixed.text] for fixed in budgets])
                    for name, budgets in families.items()
                },
                "hindsight_kl_at_equal_tokens": hindsight(
                    [every[fixed.text] for fixed in next(iter(families.values()))],
                    float(every[budget.text].tokens.mean()),
                ),
            }
            for budget in autos
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(page(result, out.with_suffix(".png").name))
    plot(result, out.with_suffix(".png"))
    return result


def _means(point: Point) -> dict[str, float]:
    return {
        "kv_tokens": round(float(point.tokens.mean()), 1),
        "kv_tokens_min": round(float(point.tokens.min()), 1),
        "kv_tokens_max": round(float(point.tokens.max()), 1),
        "kl": round(float(point.kl.mean()), 6),
    }


KINDS = {"tokens": "one number of tokens for all", "shares": "one share of each run's whole length"}


def page(result: dict[str, Any], drawn: str) -> str:
    """The Markdown page of a comparison."""
    protocol = result["protocol"]
    lines = [
        f"# Automatic budgets: {result['policy']}, {result['model']}",
        "",
        f"Replay of {result['trajectories']} recorded agent runs of {result['tasks']} tasks ({protocol['split']} "
        f"half), cut to {protocol['length']} tokens. All budgets count from where "
        f"{protocol.get('measured_from', 'each of them')} is first exceeded. Means over tasks; KV tokens per layer and "
        "KV head; KL to full KV in nats.",
        "",
        f"Code: {', '.join(result['commits'])}.",
        "",
        "| budget | KV tokens (of the task with fewest, most) | KL |",
        "| --- | ---: | ---: |",
    ]
    rows = [(text, row) for family in result["fixed"].values() for text, row in family.items()]
    lines += [_row(text, row) for text, row in [*rows, *result["auto"].items()]]
    for name in result["fixed"]:
        lines += ["", f"Against {KINDS[name]}:", ""]
        lines += ["| auto | its tokens, theirs at equal KL | change [95%] | its KL, theirs at equal tokens |"]
        lines[-1] += " change [95%] |"
        lines += ["| --- | ---: | ---: | ---: | ---: |"]
        for text, row in result["auto"].items():
            found = row["against"][name]
            tokens = f"{found['kv_tokens']:.0f}, {_number(found['fixed_tokens_at_equal_kl'], '.0f')}"
            kl = f"{found['kl']:.3f}, {_number(found['fixed_kl_at_equal_tokens'], '.3f')}"
            lines.append(f"| {text} | {tokens} | {_change(found, 'tokens')} | {kl} | {_change(found, 'kl')} |")
    limits = [f"{text} {_number(row['hindsight_kl_at_equal_tokens'], '.3f')}" for text, row in result["auto"].items()]
    lines += ["", f"KL at equal tokens if every task had the budget that its own curve asks for: {', '.join(limits)}."]
    return "\n".join([*lines, "", f"![KL over KV tokens]({drawn})"]) + "\n"


def _row(text: str, row: dict[str, float]) -> str:
    tokens = f"{row['kv_tokens']:.0f} ({row['kv_tokens_min']:.0f}, {row['kv_tokens_max']:.0f})"
    return f"| {text} | {tokens} | {row['kl']:.3f} |"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _change(found: dict[str, Any], name: str) -> str:
    change, bounds = found[f"{name}_change"], found[f"{name}_change_95"]
    if change is None:
        return "–"
    return f"{change:+.0%}" + ("" if bounds is None else f" [{bounds[0]:+.0%}, {bounds[1]:+.0%}]")


def plot(result: dict[str, Any], file: Path) -> None:
    """KL over KV tokens: a curve per kind of fixed budget, and one of the automatic ones."""
    drawn, axes = plots.figure(1, 1, (6.5, 4.5))
    curves = {KINDS[name]: family for name, family in result["fixed"].items()} | {"auto": result["auto"]}
    for name, family in curves.items():
        ordered = sorted((row["kv_tokens"], max(row["kl"], _LEAST_KL)) for row in family.values())
        axes[0, 0].plot(*zip(*ordered, strict=True), marker="o", markersize=4, linewidth=1.2, label=name)
    axes[0, 0].set(yscale="log", xlabel="KV tokens per layer and KV head, mean", ylabel="KL to full KV, nats")
    axes[0, 0].legend(fontsize=8)
    plots.save(drawn, file)


def budgets_of(auto: str, fixed: str) -> tuple[Budget, ...]:
    """The budgets of two comma-separated lists; of `auto`, what is not written as `auto…` is a price.

    Raises:
        ValueError: a budget that cannot be read.
    """
    autos = [part if part.startswith("auto") else f"auto:{part}" for part in map(str.strip, auto.split(","))]
    return tuple(Budget.parse(part) for part in [*map(str.strip, fixed.split(",")), *autos])
