"""Attention that the window's entries receive from buffered queries, with the causal mask.

The kernels' attention mass has no mask, as AgentKV and R-KV define it. The methods here are defined on attention as the
model computes it: a query does not see what came after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from agentkv_serve.engine.policies.base import Window

_PAIRS = 1 << 24  # attention weights made at a time: 64 MiB


def causal_attention(window: Window, chosen: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Softmax attention of buffered queries over the window, layer by layer, a part of the queries at a time.

    Args:
        chosen: [R] bool ring entries.

    Yields:
        (layer, [U] ring entries, [Hkv, U, G, N] fp32 attention of each query head of the KV heads' groups).
    """
    assert window.query_positions is not None
    where = window.query_positions.to(window.device)
    layers, kv_heads, count = window.positions.shape
    used = chosen.nonzero()[:, 0]
    group = window.queries.shape[2] // kv_heads
    step = max(1, _PAIRS // (kv_heads * group * max(count, 1)))
    for layer in range(layers if used.numel() else 0):
        keys = window.k_buffers[layer].index_select(0, window.slots).float().permute(1, 2, 0)  # [Hkv, D, N]
        for part in torch.split(used, step):
            queries = window.queries[layer, part].float() * window.scale
            grouped = queries.view(len(part), kv_heads, group, -1).permute(1, 0, 2, 3)  # [Hkv, U, G, D]
            logits = (grouped.flatten(1, 2) @ keys).view(kv_heads, len(part), group, count)
            later = window.positions[layer][:, None] > where[part][None, :, None]  # [Hkv, U, N]
            attention = logits.masked_fill(later[:, :, None], -torch.inf).softmax(-1)
            # A query older than every entry that is left saw none of them.
            yield layer, part, attention.nan_to_num(nan=0.0)


def received_attention(window: Window, weights: Tensor) -> Tensor:
    """[L, Hkv, N] fp32: sum over the queries u of weights[u] x the mean over the GQA group of their softmax attention.

    Args:
        weights: [R] fp32, 0 = leave the query out.
    """
    received = torch.zeros(window.positions.shape, device=window.device)
    for layer, part, attention in causal_attention(window, weights > 0):
        received[layer] += torch.einsum("hun,u->hn", attention.mean(2), weights[part])
    return received


def mean_weights(chosen: Tensor) -> Tensor:
    """[R] fp32 weights that make a mean over the chosen queries; all 0 where none is chosen."""
    return chosen / chosen.sum().clamp(min=1)
