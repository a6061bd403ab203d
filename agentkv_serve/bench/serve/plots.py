"""Plots of a result: throughput against concurrency, and quality against throughput where quality was measured."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

QUALITY = Path("docs/results/quality.json")
METRIC = "copy_acc"
"""Of the summary's numbers: the share of tokens, copied from far back, that the model still gets right."""
METRIC_FULL = "copy_acc_full"
"""The same with everything kept."""


def plot(result: dict[str, Any], out: Path, quality: Path = QUALITY) -> list[Path]:
    """Draws what the result has the figures for. Returns the files.

    Raises:
        ImportError: matplotlib is missing (the extra `eval` has it).
    """
    import matplotlib

    matplotlib.use("Agg")
    made = [_concurrency(result["presets"], out / "throughput-concurrency.png")]
    if quality.is_file():
        made.append(_quality(result["presets"], json.loads(quality.read_text()), out / "quality-throughput.png"))
    return [path for path in made if path is not None]


def curves(presets: list[dict[str, Any]]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(regime, setting) -> (requests in flight, output tok/s), in order, of settings with more than one point."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for preset in presets:
        for row in preset["rows"]:
            point = (int(preset["configuration"]["concurrency"]), float(row["output_tok_s"]["median"]))
            found[preset["regime"], row["setting"]].append(point)
    return {name: sorted(points) for name, points in found.items() if len(points) > 1}


def points(presets: list[dict[str, Any]], quality: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(name, output tok/s, quality) of stock's rows, with all kept, and of ours whose budget has a measured quality.

    Args:
        quality: the summary of `agentkv eval quality`; its budgets are tokens, or shares of the length. A share stands
            for a row's budget where it is the nearest one and not more than half as much away.
    """
    arms = [scores for budget in quality["budgets"].values() for scores in budget["policies"].values()]
    full = next((scores[METRIC_FULL] for scores in arms if scores.get(METRIC_FULL) is not None), None)
    found = []
    for preset in presets:
        length = preset["configuration"]["full_length_max"]
        for row in preset["rows"]:
            name, speed = f"{row['setting']}, {preset['regime']}", float(row["output_tok_s"]["median"])
            if row["budget"] is None:
                if full is not None:
                    found.append((f"{name} (all kept)", speed, float(full)))
                continue
            text = _nearest(quality["budgets"], row["budget"], length)
            scores = quality["budgets"][text]["policies"].get(row["policy"], {}) if text else {}
            if scores.get(METRIC) is not None:
                found.append((f"{name} (quality at {text})", speed, float(scores[METRIC])))
    return found


def _nearest(budgets: Iterable[str], budget: int, length: int) -> str | None:
    def distance(text: str) -> float:
        tokens = length * float(text[:-1]) / 100 if text.endswith("%") else float(text)
        return max(tokens / budget, budget / tokens)

    best = min(budgets, key=distance, default=None)
    return best if best is not None and distance(best) <= 1.5 else None


def _concurrency(presets: list[dict[str, Any]], path: Path) -> Path | None:
    lines = curves(presets)
    if not lines:
        return None
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for (regime, setting), line in lines.items():
        axes.plot(*zip(*line, strict=True), marker="o", label=f"{setting} ({regime})")
    axes.set(xlabel="requests in flight", ylabel="output tokens per second", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return path


def _quality(presets: list[dict[str, Any]], quality: dict[str, Any], path: Path) -> Path | None:
    found = points(presets, quality)
    if not found:
        return None
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, speed, score in found:
        axes.scatter(speed, score, label=name)
    axes.set(xlabel="output tokens per second", ylabel="share of long copies that come out right")
    axes.set(xlim=(0, None), ylim=(0, 1.05))
    axes.legend(fontsize="small", loc="lower left")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return path
