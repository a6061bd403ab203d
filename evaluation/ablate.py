"""`agentkv eval ablate`: what each part of AgentKV is worth, with the paper's figures beside ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentkv_serve.bench.report import machine
from agentkv_serve.evaluation import quality
from agentkv_serve.evaluation.arms import Entrant
from agentkv_serve.evaluation.summary import summarise
from agentkv_serve.evaluation.variants import PAPER, variants


def entrants(groups: Sequence[str]) -> tuple[Entrant, ...]:
    """The base and the variants of some groups.

    Raises:
        ValueError: an unknown group.
    """
    found = variants()
    unknown = sorted(set(groups) - {group for group, _, _ in found.values()})
    if unknown:
        raise ValueError(f"unknown group {', '.join(unknown)}")
    return tuple(
        Entrant(name, policy, noise) for name, (group, policy, noise) in found.items() if group in ("base", *groups)
    )


def run(settings: quality.Settings, folder: Path, out: Path) -> None:
    """Evaluates the variants and writes the summary to `out`, its table beside it."""
    records = quality.run(settings, folder)
    names = [entrant.name for entrant in settings.entrants]
    tables = summarise(records, names, [budget.text for budget in settings.budgets])
    result = {
        "model": settings.model.name,
        "protocol": {**settings.protocol(), "least": settings.least, "split": settings.split or "both"},
        "commits": sorted({arm["commit"] for record in records for arm in record["arms"].values()}),
        "machine": machine(),
        "paper": PAPER,
        "budgets": tables,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(page(result))


def page(result: dict[str, Any]) -> str:
    """The Markdown page of an ablation."""
    lines = [
        f"# Ablations of AgentKV: {result['model']}",
        "",
        f"{result['protocol']['split'].capitalize()} half, means over tasks; protocol as in quality.md. "
        "Paper: task scores of Qwen3-32B (multi_turn at 3072 / retail at 4096), "
        "higher = better; ours: KL to full KV, lower = better.",
    ]
    for budget, table in result["budgets"].items():
        lines += ["", f"## Budget {budget}: {table['trajectories']} trajectories of {table['tasks']} tasks", ""]
        lines += ["| variant | KL | act | copy accuracy | KL against agentkv [95%] | better in | paper |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: | --- |"]
        for name, values in table["policies"].items():
            paired = table["paired"].get(name)
            change, wins = "", ""
            if paired:
                low, high = paired["kl"]["change_95"]
                change = f"{paired['kl']['change']:+.0%} [{low:+.0%}, {high:+.0%}]"
                wins = f"{paired['kl']['better_in']} of {paired['kl']['tasks']}"
            act, copy = (("–" if values[key] is None else f"{values[key]:.3f}") for key in ("kl_act", "copy_acc"))
            lines.append(
                f"| {name} | {values['kl']:.3f} | {act} | {copy} | {change} | {wins} | {PAPER.get(name, '–')} |"
            )
    return "\n".join(lines) + "\n"
