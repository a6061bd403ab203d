"""Torch definition of the value norms; the CPU path of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def value_norms(v_buffers: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """See `agentkv_serve.kernels.value_norm.value_norms`. Reads only the window's rows of the pools."""
    norms = torch.empty(len(v_buffers), v_buffers[0].shape[1], slots.numel(), device=slots.device)
    for layer, values in enumerate(v_buffers):
        norms[layer] = values.index_select(0, slots).float().norm(dim=-1).t()
    return norms
