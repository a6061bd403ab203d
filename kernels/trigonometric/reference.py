"""Torch definition of the trigonometric score after the reduction to inner products; the CPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def best_product(
    queries: torch.Tensor, weights: torch.Tensor, k_buffers: Sequence[torch.Tensor], slots: torch.Tensor
) -> torch.Tensor:
    """fp32 `[L, Hq, N]`: max over o of `queries` [L, Hq, O, 2F] . k, plus sum over f of `weights` [L, Hq, F]
    * |k_f|."""
    layers, hq, count, width = queries.shape
    hkv, pairs = k_buffers[0].shape[1], width // 2
    scores = torch.empty(layers, hq, slots.numel(), device=slots.device)
    for layer, buffer in enumerate(k_buffers):
        keys = buffer.index_select(0, slots)[..., :width].float().transpose(0, 1)  # [Hkv, N, 2F]
        grouped = queries[layer].reshape(hkv, -1, width) @ keys.transpose(1, 2)
        turning = grouped.view(hq, count, -1).amax(1)
        size = torch.hypot(keys[..., :pairs], keys[..., pairs:])
        steady = weights[layer].view(hkv, -1, pairs) @ size.transpose(1, 2)
        scores[layer] = turning + steady.reshape(hq, -1)
    return scores
