"""Plots of a result: throughput against concurrency, and quality against throughput where quality was measured."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

QUALITY = Path("docs/results/quality.json")


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


def points(presets: list[dict[str, Any]], quality: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(setting, output tok/s, quality) of every row of ours whose policy and budget have a measured quality.

    `quality` are rows with `policy`, `budget` and `score`.
    """
    scores = {(row["policy"], row["budget"]): float(row["score"]) for row in quality if row.get("score") is not None}
    return [
        (f"{row['setting']}, {preset['regime']}", float(row["output_tok_s"]["median"]), scores[key])
        for preset in presets
        for row in preset["rows"]
        if (key := (row["policy"], row["budget"])) in scores
    ]


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
    found = points(presets, quality.get("rows", []))
    if not found:
        return None
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, speed, score in found:
        axes.scatter(speed, score)
        axes.annotate(name, (speed, score), textcoords="offset points", xytext=(5, 5), fontsize="small")
    axes.set(xlabel="output tokens per second", ylabel=quality.get("metric", "quality"))
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return path
