"""Torch definition of the top-B selection; the CPU path of the engine."""

from __future__ import annotations

import torch


def top_keep(scores: torch.Tensor, keep: int, protected: torch.Tensor) -> torch.Tensor:
    """See `agentkv_serve.kernels.select.top_keep`.

    A threshold and a running count of ties instead of a stable sort: the result comes out in ascending order,
    in linear time.
    """
    limit = torch.finfo(scores.dtype).max
    ranked = scores.nan_to_num(nan=-limit, posinf=limit, neginf=-limit).masked_fill(protected, torch.inf)
    threshold = ranked.topk(keep, dim=-1, sorted=True).values[..., -1:]
    above = ranked > threshold
    ties = ranked == threshold
    room = keep - above.sum(-1, keepdim=True)
    kept = above | (ties & (ties.cumsum(-1) <= room))
    return kept.nonzero()[:, -1].view(*scores.shape[:-1], keep)
