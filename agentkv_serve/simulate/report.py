"""The table and the plot of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("workers", "workers", ",d"),
    ("budget", "budget", ""),
    ("turns", "turns", ",d"),
    ("turns_per_worker_minute", "turns/worker/min", ".2f"),
    ("output_tokens_per_worker_second", "tok/worker/s", ".1f"),
    ("resumed", "resumed", ".1%"),
    ("prompt_tokens_saved", "prompt saved", ".1%"),
    ("queue_p50", "queue p50 s", ".2f"),
    ("queue_p95", "queue p95 s", ".2f"),
    ("first_token_p50", "TTFT p50 s", ".2f"),
    ("first_token_p95", "TTFT p95 s", ".2f"),
    ("pool_use", "KV in use", ".1%"),
    ("gave_way", "gave way", ",d"),
    ("moved", "moved", ",d"),
    ("refused", "refused", ",d"),
)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each run."""
    made = Table(title="Simulated fleet", title_justify="left")
    for _, title, _ in COLUMNS:
        made.add_column(title, justify="right")
    for row in rows:
        made.add_row(*(format(row[name], form) if form else str(row[name]) for name, _, form in COLUMNS))
    return made


def plot(rows: Sequence[dict[str, Any]], series: dict[str, list[tuple[float, float, float]]], file: Path) -> None:
    """Hit rate, queueing and KV use over the number of workers, and over time for the largest fleets.

    Args:
        series: label -> (seconds, KV in use, waiting turns per worker) of single runs.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    marks = "osD^v"
    panels = (
        ("resumed", "turns that find their session", True),
        ("prompt_tokens_saved", "prompt tokens not computed", True),
        ("first_token_p95", "time to first token, p95 (s)", False),
        ("pool_use", "KV pool in use", True),
        ("queue_p95", "wait for admission, p95 (s)", False),
    )
    for axis, (name, title, share) in zip(axes.flat, panels, strict=False):
        for i, budget in enumerate(budgets):
            mine = [row for row in rows if row["budget"] == budget]
            xs, ys = [row["workers"] for row in mine], [row[name] for row in mine]
            axis.plot(xs, ys, marker=marks[i % len(marks)], label=f"budget {budget}")
        axis.set_xscale("log")
        axis.set_xlabel("workers")
        axis.set_title(title, fontsize=10)
        axis.set_ylim((0, 1.02) if share else (0, None))
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    last = axes.flat[-1]
    for label, points in series.items():
        last.plot([t / 60 for t, _, _ in points], [waiting for _, _, waiting in points], label=label)
    last.set_title("waiting turns per worker over time", fontsize=10)
    last.set_xlabel("minutes")
    last.set_ylim(0, None)
    last.legend(fontsize=8)
    last.grid(alpha=0.3)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
