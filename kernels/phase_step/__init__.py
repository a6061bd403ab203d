"""Advance the decode automaton that knows the phase of every sampled token."""

from __future__ import annotations

import torch

from agentkv_serve.kernels.backend import Backend, check_index, resolve
from agentkv_serve.kernels.phase_step import reference

__all__ = ["step"]


def step(
    next_state: torch.Tensor,
    label: torch.Tensor,
    state: torch.Tensor,
    ids: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one token per row: `(label int8 [R], new state int64 [R])`. Mutates nothing.

    next_state: int16 `[S, V]` and label: int8 `[S, V]`, the tables of `phase_tagger.build_automaton` on the
    rows' device; state: int64 `[R]` in `[0, S)`; ids: int64 `[R]` token ids, clamped into `[0, V)`.

    Recordable in a CUDA graph: no value is read on the host. Raises `ValueError` for shapes that do not fit.
    """
    if next_state.dtype != torch.int16 or label.dtype != torch.int8 or next_state.shape != label.shape:
        raise ValueError(
            "the tables must be int16 and int8 of one shape [S, V], "
            f"got {next_state.dtype} {tuple(next_state.shape)} and {label.dtype} {tuple(label.shape)}"
        )
    check_index("state", state)
    check_index("ids", ids)
    if state.shape != ids.shape:
        raise ValueError(f"{state.numel()} states for {ids.numel()} ids")
    if resolve(backend, ids.device) == "triton" and ids.numel():
        from agentkv_serve.kernels.phase_step import kernel

        return kernel.step(next_state, label, state, ids)
    return reference.step(next_state, label, state, ids)
