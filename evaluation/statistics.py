"""Statistics over tasks: runs of one task, and tokens of one run, are not independent of each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

DRAWS = 10_000
Floats = npt.NDArray[np.float64]


def by_task(tasks: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Mean value of each task over its runs."""
    groups: dict[str, list[float]] = defaultdict(list)
    for task, value in zip(tasks, values, strict=True):
        groups[task].append(value)
    return {task: float(np.mean(group)) for task, group in groups.items()}


def resampled(count: int) -> npt.NDArray[np.int64]:
    """[DRAWS, count] the same draws, with replacement, every time."""
    return np.random.default_rng(0).integers(0, count, (DRAWS, count))


def interval(values: Floats) -> list[float]:
    """95% bootstrap interval of a mean over tasks."""
    means = values[resampled(len(values))].mean(1)
    return [round(float(bound), 6) for bound in np.percentile(means, [2.5, 97.5])]


def compare(ours: Floats, theirs: Floats) -> dict[str, Any]:
    """Paired comparison over tasks, lower = better: mean difference and relative change with 95% intervals, wins.

    The intervals come from 10,000 draws of tasks with replacement; `change` is mean(ours) / mean(theirs) - 1.
    """
    draws = resampled(len(ours))
    changes = ours[draws].mean(1) / np.maximum(theirs[draws].mean(1), 1e-12) - 1
    return {
        "tasks": len(ours),
        "difference": round(float((ours - theirs).mean()), 6),
        "difference_95": interval(ours - theirs),
        "change": round(float(ours.mean() / max(theirs.mean(), 1e-12) - 1), 4),
        "change_95": [round(float(bound), 4) for bound in np.percentile(changes, [2.5, 97.5])],
        "better_in": int((ours < theirs).sum()),
        "worse_in": int((ours > theirs).sum()),
    }


def compare_shares(ours: Floats, theirs: Floats, counts: Floats) -> dict[str, Any]:
    """Paired comparison of shares (right copies among `counts`), summed over tasks; higher = better."""
    use = counts > 0
    ours, theirs, counts = ours[use], theirs[use], counts[use]
    if not len(counts):
        return {"tasks": 0}
    draws = resampled(len(counts))
    gains = (ours[draws].sum(1) - theirs[draws].sum(1)) / counts[draws].sum(1)
    return {
        "tasks": len(counts),
        "difference": round(float((ours - theirs).sum() / counts.sum()), 4),
        "difference_95": [round(float(bound), 4) for bound in np.percentile(gains, [2.5, 97.5])],
        "better_in": int((ours > theirs).sum()),
        "worse_in": int((ours < theirs).sum()),
    }
