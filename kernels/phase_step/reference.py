"""Torch definition of the automaton's step; the CPU path of the engine."""

from __future__ import annotations

import torch


def step(
    next_state: torch.Tensor, label: torch.Tensor, state: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `agentkv_serve.kernels.phase_step.step`."""
    ids = ids.clamp(0, next_state.shape[1] - 1)
    return label[state, ids], next_state[state, ids].long()
