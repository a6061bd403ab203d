"""Torch definition of the expected logits, and the statistics of the queries to come; the CPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rotated_statistics(
    mean: torch.Tensor,
    covariance: torch.Tensor,
    frequencies: torch.Tensor,
    position: int,
    horizon: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics fp32 of the queries at positions `position .. position + horizon - 1` from those of
    un-rotated queries.

    mean `[..., D]` and covariance `[..., D, D]` are multiplied by R = the mean of the positions' rotations
    (m' = R m, C' = R C R^T), as the paper's code does. frequencies `[F]`: radians per token of the pairs (f,
    f + F); dimensions from 2F on are not rotated.
    """
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1, got {horizon}")
    pairs, dim = frequencies.numel(), mean.shape[-1]
    ahead = torch.arange(position, position + horizon, dtype=torch.float64, device=mean.device)
    angles = ahead[:, None] * frequencies.to(torch.float64)
    cos, sin = angles.cos().mean(0), angles.sin().mean(0)
    rotation = torch.eye(dim, dtype=torch.float64, device=mean.device)
    first = torch.arange(pairs, device=mean.device)
    rotation[first, first] = rotation[first + pairs, first + pairs] = cos
    rotation[first, first + pairs], rotation[first + pairs, first] = -sin, sin
    turned = rotation @ covariance.double() @ rotation.t()
    return (mean.double() @ rotation.t()).float(), turned.float()


def expected_logits(
    mean: torch.Tensor,
    covariance: torch.Tensor | None,
    k_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:
    """fp32 `[L, Hq, N]`: m . k / sqrt(D) + k^T C k / (2 D)."""
    layers, hq, dim = mean.shape
    hkv = k_buffers[0].shape[1]
    logits = torch.empty(layers, hq, slots.numel(), device=slots.device)
    for layer, buffer in enumerate(k_buffers):
        keys = buffer.index_select(0, slots).float().transpose(0, 1)  # [Hkv, N, D]
        logits[layer] = (mean[layer].float().view(hkv, -1, dim) @ keys.transpose(1, 2)).view(hq, -1) / dim**0.5
        if covariance is not None:
            for head in range(hq):
                rows = keys[head // (hq // hkv)]
                logits[layer, head] += (rows @ covariance[layer, head].float()).mul_(rows).sum(-1) / (2 * dim)
    return logits
