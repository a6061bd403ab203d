"""Torch definition of the mean similarity: the matrix C itself, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROWS = 1024


def mean_similarity(k_buffers: Sequence[torch.Tensor], slots: torch.Tensor, threshold: float) -> torch.Tensor:
    """fp32 `[L, Hkv, N]`: mean over the rows of C after both rules (see the package's docstring)."""
    count, hkv = slots.numel(), k_buffers[0].shape[1]
    mean = torch.zeros(len(k_buffers), hkv, count, device=slots.device)
    columns = torch.arange(count, device=slots.device)
    for layer, buffer in enumerate(k_buffers):
        keys = buffer.index_select(0, slots).float()
        keys = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
        for head in range(hkv):
            for rows in torch.split(columns, _ROWS):
                similarity = keys[rows, head] @ keys[:, head].t()
                similarity.scatter_(1, rows[:, None], 0.0)
                last = torch.where(similarity > threshold, columns, 0).amax(1, keepdim=True)
                similarity.scatter_(1, last, 0.0)
                mean[layer, head] += similarity.sum(0)
    return mean / count
