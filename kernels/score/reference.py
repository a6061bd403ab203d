"""Torch definition of the attention-mass score; the CPU path of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import max_pool1d

# Logits are made for at most this many (query, key) pairs at a time: 64 MiB, so that long windows do not
# swell the process.
_PAIRS = 1 << 24


def attention_mass_layers(
    queries: torch.Tensor,
    valid: torch.Tensor,
    k_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    scale: float,
    group_max: bool,
    pool: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `agentkv_serve.kernels.score.attention_mass_layers`. Reads only the window's rows of the pools."""
    count, hkv = slots.numel(), k_buffers[0].shape[1]
    queries = queries[:, valid]
    weights = None if weights is None else weights[valid]
    mass = torch.zeros(len(k_buffers), hkv, count, device=slots.device)
    if queries.shape[1]:
        for layer, keys in enumerate(k_buffers):
            _mass(queries[layer], keys.index_select(0, slots).float(), scale, group_max, weights, mass[layer])
    if pool > 1:
        mass = max_pool1d(mass, pool, stride=1, padding=pool // 2)
    return mass


def _mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    group_max: bool,
    weights: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write the mean (or sum by `weights` [U]) softmax of `queries` [U, Hq, D] over `keys` [N, Hkv, D] to `out`
    [Hkv, N]."""
    number, hq, dim = queries.shape
    count, hkv, _ = keys.shape
    group = hq // hkv
    grouped = (queries.float() * scale).view(number, hkv, group, dim)
    step = min(number, max(1, _PAIRS // (group * count)))
    buffer = keys.new_empty(step * group, count)  # one for all heads, and the softmax in place: the caches hold it
    for head in range(hkv):
        for first in range(0, number, step):
            part = grouped[first : first + step, head]
            logits = torch.mm(part.reshape(-1, dim), keys[:, head].t(), out=buffer[: len(part) * group])
            if group_max:
                logits = logits.view(-1, group, count).amax(1)
            mass = torch.softmax(logits, -1, out=logits)
            if weights is None:
                out[head] += mass.sum(0)
            else:
                out[head] += weights[first : first + step].repeat_interleave(len(mass) // len(part)) @ mass
    if weights is None:
        out /= number if group_max else number * group
    elif not group_max:
        out /= group
