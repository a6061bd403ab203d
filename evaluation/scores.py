"""From a replay's tracks to the numbers of one arm on one trajectory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from agentkv_serve.evaluation.meter import Meter, Track
from agentkv_serve.evaluation.session import Session
from agentkv_serve.evaluation.trajectory import Trajectory
from agentkv_serve.phase_tagger import Label, Phase

PHASES = {"think": Label.THINK, "act": Label.ACT, "say": Label.SAY}
"""The generated phases; visible text is reported by itself, whatever phase the policies count it as."""
Mask = npt.NDArray[np.bool_]


def score_arm(
    trajectory: Trajectory, meter: Meter, track: Track, session: Session, start: int | None, copies: Mask
) -> dict[str, Any] | None:
    """The numbers of one arm over the generated tokens after `start`; None where there are none.

    `n` and `n_<phase>`: tokens; `kl`, `top1`, `nll_delta`, `sharp_miss`: means over them (also by phase); `copy_*`:
    long-range copies; `coverage`: share of the uncompressed row's attention mass on history keys of each phase that
    falls on kept keys; `retained`: the same by the phase of the query; `kv_tokens`: mean tokens per layer and head that
    a prediction was made from, `peak_tokens`: the most.
    """
    if start is None:
        return None
    after = trajectory.generated & (np.arange(len(trajectory.ids)) > start) & ~np.isnan(track.kl)
    if not after.any():
        return None
    right = track.top == trajectory.ids
    agrees = track.top == meter.reference.top
    delta = track.nll - meter.reference.nll
    result: dict[str, Any] = {"budget": session.arm.budget, "compactions": len(session.compactions), "start": start}
    for suffix, label in {"": None, **{f"_{name}": label for name, label in PHASES.items()}}.items():
        mask = after if label is None else after & (trajectory.labels == label)
        result[f"n{suffix}"] = int(mask.sum())
        if mask.any():
            result[f"kl{suffix}"] = _number(track.kl[mask].mean())
            result[f"top1{suffix}"] = _number(agrees[mask].mean())
            result[f"nll_delta{suffix}"] = _number(delta[mask].mean())
            asked = mask & ~np.isnan(track.misses)
            result[f"sharp_miss{suffix}"] = _number(track.misses[asked].mean()) if asked.any() else None
    far = after & copies
    result["n_copy"] = int(far.sum())
    result["copy_right"] = int(right[far].sum())
    result["copy_right_full"] = int((meter.reference.top == trajectory.ids)[far].sum())
    result["copy_nll_delta"] = _number(delta[far].mean()) if far.any() else None
    result["coverage"] = _shares(track.lost.sum(0), track.mass.sum(0), {p.name.lower(): p for p in Phase})
    result["retained"] = _shares(track.lost.sum(1), track.mass.sum(1), PHASES)
    result["kv_tokens"] = _number(track.held[after].mean())
    result["peak_tokens"] = _number(np.nanmax(track.held))
    return result


def _shares(lost: npt.NDArray[np.float64], mass: npt.NDArray[np.float64], names: dict[str, Any]) -> dict[str, float]:
    return {name: _number(1 - lost[index] / mass[index]) for name, index in names.items() if mass[index] > 0}


def _number(value: Any) -> float:
    return float(f"{float(value):.6g}")
