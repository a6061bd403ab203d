"""What a quality run publishes: quality.json, a Markdown page, plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentkv_serve.bench.report import machine
from agentkv_serve.evaluation import plots
from agentkv_serve.evaluation.quality import Settings
from agentkv_serve.evaluation.summary import REFERENCE, pairs, summarise

COLUMNS = {
    "kl": "KL",
    "kl_think": "think",
    "kl_act": "act",
    "kl_say": "visible text",
    "copy_acc": "copy accuracy",
    "copy_nll_delta": "ΔNLL copy",
    "sharp_miss": "sharp-miss",
    "top1": "top-1",
    "kv_tokens": "KV tokens",
}


def publish(settings: Settings, records: Sequence[dict[str, Any]], out: Path, draw: bool) -> dict[str, Any]:
    """Writes the summary to `out`, the page and the plots beside it; returns the summary."""
    policies = [entrant.name for entrant in settings.entrants]
    budgets = [budget.text for budget in settings.budgets]
    tables = summarise(records, policies, budgets)
    main = budgets[len(budgets) // 2]
    result = {
        "model": settings.model.name,
        "protocol": {**settings.protocol(), "least": settings.least, "split": settings.split or "both"},
        "commits": sorted({arm["commit"] for record in records for arm in record["arms"].values()}),
        "machine": machine(),
        "budget": main,
        "policies": tables.get(main, {}).get("policies", {}),
        "paired": tables.get(main, {}).get("paired", {}),
        "settings": {e.name: repr(e.policy) for e in settings.entrants if not e.policy.needs_statistics},
        "budgets": tables,
        "plus": _duels(records, "agentkv_plus", ("agentkv", "agentkv_paper"), policies, budgets),
        "order": _duels(records, "agentkv", ("recent", "rkv", "triattention"), policies, budgets),
        "per_trajectory": [_short(record) for record in records],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(page(result, out.stem if draw else None))
    if draw and tables:
        plots.quality(tables, out.with_name(f"{out.stem}-budgets.png"), out.with_name(f"{out.stem}-phases.png"))
    return result


def page(result: dict[str, Any], drawn: str | None) -> str:
    """The Markdown page of a summary."""
    protocol = result["protocol"]
    lines = [
        f"# Quality against full KV: {result['model']}",
        "",
        f"Teacher-forced replay of {len(result['per_trajectory'])} recorded agent runs ({protocol['split']} half of "
        f"the tasks), cut to {protocol['length']} tokens, prefill chunks of {protocol['chunk']}, {protocol['dtype']}. "
        "Every policy attends its own compressed cache. Measured over the generated tokens after the first "
        "compression; means over tasks; KL in nats.",
        "",
        f"Code: {', '.join(result['commits'])}. Machine: {result['machine']['cpu']}, {result['machine']['cores']} "
        f"cores, torch {result['machine'].get('torch')}.",
    ]
    for budget, table in result["budgets"].items():
        lines += ["", f"## Budget {budget}", ""]
        full = next(iter(table["policies"].values()))["copy_acc_full"]
        lines.append(
            f"{table['trajectories']} trajectories of {table['tasks']} tasks, {table['tokens']} generated tokens, "
            f"{table['copies']} long-range copies (full KV gets {_shown(full)} of them right)."
        )
        lines += ["", *_main_table(table), "", *_coverage_table(table)]
    titles = {"plus": "agentkv_plus, paired over tasks", "order": "The published order: agentkv, paired over tasks"}
    for key, title in titles.items():
        if result[key]:
            lines += ["", f"## {title}", "", *_duel_table(result[key])]
    lines += ["", "What the figures say, and why: [evaluation.md](../evaluation.md#state-of-the-figures)."]
    if drawn:
        lines += ["", f"![KL and copy accuracy by budget]({drawn}-budgets.png)", "", f"![by phase]({drawn}-phases.png)"]
    return "\n".join(lines) + "\n"


def _main_table(table: dict[str, Any]) -> list[str]:
    names = [*COLUMNS.values(), f"KL against {REFERENCE} [95%]", "better in"]
    lines = [f"| policy | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    for name, values in sorted(table["policies"].items(), key=lambda item: item[1]["kl"]):
        paired = table["paired"].get(name)
        cells = [_shown(values[column], 0 if column == "kv_tokens" else 3) for column in COLUMNS]
        cells += ["", ""] if paired is None else [_change(paired["kl"]), _wins(paired["kl"])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _coverage_table(table: dict[str, Any]) -> list[str]:
    keys = ("others", "think", "act", "tool")
    asked = ("think", "act", "say")
    lines = [
        "Utility coverage: share of the uncompressed row's attention mass on earlier keys of a phase that kept keys "
        "hold; the same by the phase of the query.",
        "",
        f"| policy | {' | '.join(keys)} | asked by {' | asked by '.join(asked)} |",
        "| --- |" + " ---: |" * (len(keys) + len(asked)),
    ]
    for name, values in sorted(table["policies"].items(), key=lambda item: item[1]["kl"]):
        cells = [_shown(values["coverage"].get(key)) for key in keys]
        cells += [_shown(values["retained"].get(key)) for key in asked]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _duels(
    records: Sequence[dict[str, Any]], name: str, rivals: Sequence[str], policies: Sequence[str], budgets: Sequence[str]
) -> dict[str, Any]:
    """One policy against each of its rivals at every budget."""
    present = [rival for rival in rivals if rival in policies]
    if name not in policies or not present:
        return {}
    return {
        budget: {rival: pairs(records, f"{name}@{budget}", f"{rival}@{budget}") for rival in present}
        for budget in budgets
    }


def _duel_table(duels: dict[str, Any]) -> list[str]:
    lines = ["| budget | against | KL [95%] | better in | copy accuracy [95%] |", "| --- | --- | ---: | ---: | ---: |"]
    for budget, rivals in duels.items():
        for name, paired in rivals.items():
            if paired is not None:
                copy = paired["copy_acc"]
                gain = f"{copy['difference']:+.3f} {copy['difference_95']}" if copy["tasks"] else "no copies"
                lines.append(f"| {budget} | {name} | {_change(paired['kl'])} | {_wins(paired['kl'])} | {gain} |")
    return lines


def _short(record: dict[str, Any]) -> dict[str, Any]:
    keys = ("n", "kl", "kl_think", "kl_act", "kl_say", "n_copy", "copy_right", "sharp_miss", "top1", "kv_tokens")
    arms = {
        name: {key: arm["scores"].get(key) for key in keys} for name, arm in record["arms"].items() if arm["scores"]
    }
    return {**{key: record[key] for key in ("name", "task", "source", "half", "tokens")}, "arms": arms}


def _shown(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _change(compared: dict[str, Any]) -> str:
    low, high = compared["change_95"]
    return f"{compared['change']:+.0%} [{low:+.0%}, {high:+.0%}]"


def _wins(compared: dict[str, Any]) -> str:
    return f"{compared['better_in']} of {compared['tasks']}"
