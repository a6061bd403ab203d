"""The figure of a phase analysis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from agentkv_serve.evaluation.plots import figure, save
from agentkv_serve.phase_tagger import Label


def draw(
    result: dict[str, Any], angles: tuple[Any, Any], points: tuple[Any, Any], head: tuple[Any, Any], file: Path
) -> None:
    """Matrix by phase, distributions, gap per layer and head, and queries on their first two principal components.

    angles: inter- and intra-phase angles; points: queries `[P, D]` of one head and their labels `[P]`; head: which.
    """
    part = result["after_rope"]
    drawn, axes = figure(2, 2, (11, 8.5))
    _matrix(axes[0, 0], part)
    for values, label in zip(angles, ("two phases", "two spans of one phase"), strict=True):
        axes[0, 1].hist(values, bins=60, density=True, alpha=0.6, label=f"{label}, mean {values.mean():.1f}°")
    axes[0, 1].set(title="Angles over all heads and span pairs", xlabel="mean principal angle, degrees", yticks=[])
    axes[0, 1].legend()
    gaps = np.array(part["gap_by_head"]).T
    limit = float(np.abs(gaps).max())
    image = axes[1, 0].imshow(gaps, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes[1, 0].set(title="Gap between phases and repeats, degrees", xlabel="layer", ylabel="KV head")
    axes[1, 0].set_yticks(range(len(gaps)))
    drawn.colorbar(image, ax=axes[1, 0])
    _scatter(axes[1, 1], *points)
    axes[1, 1].set_title(f"Queries of layer {head[0]}, KV head {head[1]}: first two components")
    drawn.suptitle(result["model"])
    save(drawn, file)


def _matrix(axis: Any, part: dict[str, Any]) -> None:
    present = [index for index, name in enumerate(part["labels"]) if part["spans"][name] > 1]
    cells = np.array(part["matrix"], dtype=float)[np.ix_(present, present)]
    names = [part["labels"][index] for index in present]
    axis.imshow(cells, cmap="viridis")
    axis.set_xticks(range(len(names)), names)
    axis.set_yticks(range(len(names)), names)
    for row, column in np.ndindex(cells.shape):
        axis.text(column, row, f"{cells[row, column]:.1f}", ha="center", va="center", color="white")
    axis.set_title("Mean principal angle by phase, degrees")


def _scatter(axis: Any, queries: Any, labels: Any) -> None:
    from sklearn.decomposition import PCA

    flat = PCA(2, random_state=0).fit_transform(queries)
    for number, label in enumerate(Label):
        if (labels == label).any():
            chosen = flat[labels == label]
            axis.scatter(chosen[:, 0], chosen[:, 1], s=6, color=f"C{number}", label=label.name.lower())
    axis.legend(markerscale=2)
    axis.set(xticks=[], yticks=[])
