"""Attention mass of every cached token under a set of representative queries.

For KV head h and token i of a window of N tokens, with the queries q_1..q_U that are valid and the G query
heads of h's group:

    mass[h, i] = mean over u of softmax_i( max over g of q_{u,g} . k_{h,i} * scale )

then, if asked for, a max-pool along the tokens:

    score[h, i] = max over |j - i| <= pool // 2 of mass[h, j]

With the queries of all four phases this is AgentKV's score (arXiv 2609.14872, section on scoring); the group
maximum and the pool of 7 are those of R-KV (arXiv 2505.24133), whose importance term it is when the queries
are the newest ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv_serve.kernels.backend import Backend, check_index, check_pool, resolve
from agentkv_serve.kernels.score import reference

__all__ = ["attention_mass", "attention_mass_layers"]


def attention_mass(
    queries: torch.Tensor,
    valid: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    group_max: bool = True,
    pool: int = 7,
    weights: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Scores fp32 `[Hkv, N]` of one layer. Arguments as in `attention_mass_layers`, without the layer
    dimension."""
    return attention_mass_layers(
        queries[None],
        valid,
        [keys],
        slots,
        scale=scale,
        group_max=group_max,
        pool=pool,
        weights=weights,
        backend=backend,
    )[0]


def attention_mass_layers(
    queries: torch.Tensor,
    valid: torch.Tensor,
    k_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    *,
    scale: float,
    group_max: bool = True,
    pool: int = 7,
    weights: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Scores fp32 `[L, Hkv, N]` of all layers; higher = keep. Mutates nothing.

    queries: `[L, U, Hq, D]` post-RoPE queries (any strides over L, U, Hq); valid: bool `[U]`, False = ignore
    the query, its content may be anything; k_buffers: one paged pool `[S, Hkv, D]` per layer; slots: int64
    `[N]`, the window's slots in token order. scale: the softmax scale, 1/sqrt(D) for most
    models. group_max=False averages the softmaxes of the group's heads instead of taking the group's maximum
    before the softmax. pool: odd width of the max-pool, 0 or 1 = none. weights: fp32 `[U]`, a weighted sum over the
    valid queries instead of their mean. Without any valid query all scores are 0.

    Raises `ValueError` for shapes that do not fit each other, with both numbers.
    """
    hkv, dim = check_pool("k_buffers", k_buffers)
    check_index("slots", slots)
    if queries.dim() != 4 or queries.shape[3] != dim or queries.shape[2] % hkv:
        raise ValueError(
            f"queries must be [L, U, Hq, {dim}] with Hq a multiple of the pool's {hkv} KV heads, "
            f"got {tuple(queries.shape)}"
        )
    if queries.shape[0] != len(k_buffers):
        raise ValueError(f"queries have {queries.shape[0]} layers, k_buffers {len(k_buffers)}")
    if valid.dtype != torch.bool or valid.shape != queries.shape[1:2]:
        raise ValueError(f"valid must be bool [{queries.shape[1]}], got {valid.dtype} {tuple(valid.shape)}")
    if weights is not None and (weights.dtype != torch.float32 or weights.shape != valid.shape):
        raise ValueError(f"weights must be float32 [{valid.numel()}], got {weights.dtype} {tuple(weights.shape)}")
    if pool > 1 and pool % 2 == 0:
        raise ValueError(f"pool must be odd (or 0 for none), got {pool}")
    if not slots.numel():
        return torch.empty(len(k_buffers), hkv, 0, device=slots.device)
    if resolve(backend, slots.device) == "triton":
        from agentkv_serve.kernels.score import kernel

        run = kernel.attention_mass_layers
    else:
        run = reference.attention_mass_layers
    return run(queries, valid, k_buffers, slots, scale, group_max, pool, weights)
