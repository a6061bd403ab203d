"""Torch definition of the compaction's move; the CPU path of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_write(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    source: torch.Tensor,
    kept: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """See `agentkv_serve.kernels.compact.gather_write`. Gathers a layer whole before it writes, hence safe on
    overlap."""
    heads = torch.arange(kept.shape[1], device=kept.device)
    for layer, slots in enumerate(source[kept].transpose(1, 2)):  # [B, Hkv]
        for buffer in (k_buffers[layer], v_buffers[layer]):
            buffer[target] = buffer[slots, heads]
