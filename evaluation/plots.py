"""Plots of a quality run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PHASES = {"kl_think": "think", "kl_act": "act", "kl_say": "visible text"}


def figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes, drawn without a display. Axes come as an array `[rows, columns]`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def save(drawn: Any, file: Path) -> None:
    """Writes a figure as PNG and closes it. Without a date, so that equal figures are equal files."""
    from matplotlib import pyplot

    drawn.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(drawn)


def quality(tables: dict[str, Any], by_budget: Path, by_phase: Path) -> None:
    """Two figures: KL and copy accuracy over the budgets, and KL by phase at each budget."""
    budgets = list(tables)
    names = sorted(
        {name for table in tables.values() for name in table["policies"]},
        key=lambda name: tables[budgets[0]]["policies"].get(name, {"kl": float("inf")})["kl"],
    )
    drawn, axes = figure(1, 2, (11, 4.5))
    for number, name in enumerate(names):
        known = [budget for budget in budgets if name in tables[budget]["policies"]]
        style = {"color": f"C{number % 10}", "marker": "osD^vPX*<>"[number % 10], "linewidth": 1.2, "markersize": 5}
        values = [tables[budget]["policies"][name] for budget in known]
        axes[0, 0].plot(known, [value["kl"] for value in values], label=name, **style)
        if all(value["copy_acc"] is not None for value in values):
            axes[0, 1].plot(known, [value["copy_acc"] for value in values], **style)
    full = [table["policies"][names[0]]["copy_acc_full"] for table in tables.values() if names[0] in table["policies"]]
    if full and None not in full:
        axes[0, 1].plot(budgets[: len(full)], full, "k--", linewidth=1, label="full KV")
    axes[0, 0].set(yscale="log", ylabel="KL to full KV, nats", xlabel="budget")
    axes[0, 1].set(ylabel="long-range copies right", xlabel="budget")
    drawn.legend(loc="outside right upper", fontsize=8)
    save(drawn, by_budget)

    drawn, axes = figure(1, len(budgets), (4.2 * len(budgets), 0.34 * len(names) + 1.4))
    for column, budget in enumerate(budgets):
        axis = axes[0, column]
        for offset, (key, label) in enumerate(PHASES.items()):
            values = [tables[budget]["policies"].get(name, {}).get(key) or 0.0 for name in names]
            axis.barh([row + 0.27 * (offset - 1) for row in range(len(names))], values, 0.25, label=label)
        axis.set_yticks(range(len(names)), names if column == 0 else [], fontsize=8)
        axis.invert_yaxis()
        axis.set(title=f"budget {budget}", xlabel="KL, nats")
    axes[0, 0].legend(fontsize=8)
    save(drawn, by_phase)
