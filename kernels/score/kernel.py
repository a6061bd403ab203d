"""Triton kernels of the attention-mass score: two passes over the keys, no [queries, keys] matrix in memory.

Pass 1 (`_lse_kernel`): every program takes one run of keys of one layer and KV head and writes, per query,
the base-2 logarithm of its part of the softmax's denominator, kept as a running maximum and sum. The parts
are joined by one log-sum-exp. Pass 2 (`_mass_kernel`) forms the same logits again and sums the probabilities
over the queries. Reading the keys twice costs 2 N D elements per KV head; storing the logits would cost 2 N U
floats more. Pooling is a third, light pass (`_pool_kernel`).

Logits, sums and results are float32. 16-bit keys and queries of one dtype are multiplied as they are (their
products are exact in float32); any other combination is multiplied in float32 without TF32.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from agentkv_serve.kernels.backend import aligned, base_addresses
from agentkv_serve.kernels.paged import ELEMENT, load_rows

_LOG2_E = math.log2(math.e)
# Keys per program: long enough to repay loading the queries, short enough for a few programs per SM at 4k
# keys.
_RUN = 1024


@triton.jit
def _queries(q_ptr, valid_ptr, first, U, D, row_stride, head_stride, G, COMPUTE, BLOCK_U, BLOCK_G, BLOCK_D):
    """Queries `[BLOCK_D, BLOCK_U * BLOCK_G]`: column c holds query first + c // BLOCK_G of group member c %
    BLOCK_G."""
    column = tl.arange(0, BLOCK_U * BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    u = first + column // BLOCK_G
    g = column % BLOCK_G
    live = (u < U) & (g < G)
    live = live & (tl.load(valid_ptr + u, mask=u < U, other=0) != 0)
    offset = u[None, :].to(tl.int64) * row_stride + g[None, :] * head_stride + d[:, None]
    return tl.load(q_ptr + offset, mask=live[None, :] & (d < D)[:, None], other=0.0).to(COMPUTE)


@triton.jit
def _logits(k, q, scale, G, COMPUTE, BLOCK_N, BLOCK_U, BLOCK_G):
    """Base-2 logits `[BLOCK_N, BLOCK_U]`, the group's maximum already taken."""
    product = tl.dot(k.to(COMPUTE), q, input_precision="ieee") * scale
    if BLOCK_G == 1:
        return product
    grouped = tl.reshape(product, (BLOCK_N, BLOCK_U, BLOCK_G))
    if G < BLOCK_G:
        g = tl.arange(0, BLOCK_G)
        grouped = tl.where((g < G)[None, None, :], grouped, float("-inf"))
    return tl.max(grouped, axis=2)


@triton.jit
def _lse_kernel(
    q_ptr, valid_ptr, address_ptr, slots_ptr, lse_ptr,
    scale, N, U, D, splits,
    q_layer_stride, q_row_stride, q_kv_stride, q_head_stride, slot_stride, head_stride,
    HKV: tl.constexpr, G: tl.constexpr, ELEMENT: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
    RUN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """lse[layer, head, u, split] = log2 sum over the split's keys of 2^logit."""
    part = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    layer, head = row // HKV, row % HKV
    first = part * BLOCK_U
    q_ptr += layer * q_layer_stride + head * q_kv_stride
    q = _queries(q_ptr, valid_ptr, first, U, D, q_row_stride, q_head_stride, G, COMPUTE, BLOCK_U, BLOCK_G, BLOCK_D)
    top = tl.full([BLOCK_U], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_U], tl.float32)
    begin = split * RUN
    for start in range(begin, tl.minimum(begin + RUN, N), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = load_rows(address_ptr, slots_ptr, layer, head, n, N, D, slot_stride, head_stride, ELEMENT, ALIGNED, BLOCK_D)
        logits = _logits(k, q, scale, G, COMPUTE, BLOCK_N, BLOCK_U, BLOCK_G)
        logits = tl.where((n < N)[:, None], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, axis=0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[None, :]), axis=0)
        top = higher
    u = first + tl.arange(0, BLOCK_U)
    tl.store(lse_ptr + (row * U + u) * splits + split, top + tl.log2(total), mask=u < U)


@triton.jit
def _mass_kernel(
    q_ptr, valid_ptr, address_ptr, slots_ptr, lse_ptr, weight_ptr, mass_ptr,
    scale, N, U, D,
    q_layer_stride, q_row_stride, q_kv_stride, q_head_stride, slot_stride, head_stride,
    HKV: tl.constexpr, G: tl.constexpr, ELEMENT: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
    RUN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """mass[layer, head, n] = sum over u of weight[u] * 2^(logit - lse[layer, head, u])."""
    begin = tl.program_id(0) * RUN
    row = tl.program_id(1).to(tl.int64)
    layer, head = row // HKV, row % HKV
    q_ptr += layer * q_layer_stride + head * q_kv_stride
    u = tl.arange(0, BLOCK_U)
    if PARTS == 1:  # the queries stay on the chip; else they are loaded again for every block of keys
        q = _queries(q_ptr, valid_ptr, 0, U, D, q_row_stride, q_head_stride, G, COMPUTE, BLOCK_U, BLOCK_G, BLOCK_D)
        lse = tl.load(lse_ptr + row * U + u, mask=u < U, other=0.0)
        weight = tl.load(weight_ptr + u, mask=u < U, other=0.0)
    for start in range(begin, tl.minimum(begin + RUN, N), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = load_rows(address_ptr, slots_ptr, layer, head, n, N, D, slot_stride, head_stride, ELEMENT, ALIGNED, BLOCK_D)
        if PARTS == 1:
            logits = _logits(k, q, scale, G, COMPUTE, BLOCK_N, BLOCK_U, BLOCK_G)
            mass = tl.sum(tl.exp2(logits - lse[None, :]) * weight[None, :], axis=1)
        else:
            mass = tl.zeros([BLOCK_N], tl.float32)
            for part in range(PARTS):
                first = part * BLOCK_U
                live = first + u < U
                q = _queries(
                    q_ptr, valid_ptr, first, U, D, q_row_stride, q_head_stride, G, COMPUTE, BLOCK_U, BLOCK_G, BLOCK_D
                )  # fmt: skip
                lse = tl.load(lse_ptr + row * U + first + u, mask=live, other=0.0)
                weight = tl.load(weight_ptr + first + u, mask=live, other=0.0)
                logits = _logits(k, q, scale, G, COMPUTE, BLOCK_N, BLOCK_U, BLOCK_G)
                mass += tl.sum(tl.where(live[None, :], tl.exp2(logits - lse[None, :]), 0.0) * weight[None, :], axis=1)
        tl.store(mass_ptr + row * N + n, mass, mask=n < N)


@triton.jit
def _pool_kernel(mass_ptr, out_ptr, N, POOL: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[layer, head, n] = maximum of the mass within POOL // 2 tokens."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mass_ptr += row * N
    best = tl.load(mass_ptr + n, mask=n < N, other=0.0)
    for step in tl.static_range(1, POOL // 2 + 1):
        best = tl.maximum(best, tl.load(mass_ptr + n - step, mask=(n >= step) & (n - step < N), other=0.0))
        best = tl.maximum(best, tl.load(mass_ptr + n + step, mask=n + step < N, other=0.0))
    tl.store(out_ptr + row * N + n, best, mask=n < N)


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
    """See `agentkv_serve.kernels.score.attention_mass_layers`. Scratch memory: the denominators, 4 U bytes
    per run."""
    layers, number, hq, dim = queries.shape
    count, hkv = slots.numel(), k_buffers[0].shape[1]
    group = hq // hkv
    rows = layers * hkv
    if queries.stride(-1) != 1:
        queries = queries.contiguous()
    q_layer, q_row, q_head, _ = queries.stride()
    mean = valid / valid.sum().clamp(min=1) if weights is None else weights * valid
    if group_max:
        q_kv, width = q_head * group, triton.next_power_of_2(group)
    else:  # a group's heads are queries of their own: [L, U, Hkv, G, D] -> [L, Hkv, U * G, D]
        queries = queries.view(layers, number, hkv, group, dim).transpose(1, 2).reshape(layers, hkv, -1, dim)
        q_layer, q_kv, q_row, _ = queries.stride()
        mean, valid = (mean / group).repeat_interleave(group), valid.repeat_interleave(group)
        number, group, width = number * group, 1, 1

    exact = k_buffers[0].dtype == queries.dtype and queries.dtype.itemsize == 2
    if queries.dtype == torch.bfloat16 and not isinstance(_lse_kernel, triton.JITFunction):
        exact = False  # Triton's interpreter has no bfloat16 product
    block_d = max(16, triton.next_power_of_2(dim))
    # Logits per key and program: as many as fit the registers, and the queries the shared memory.
    columns = min(256 if exact and block_d <= 128 else 64, width * triton.next_power_of_2(number))
    block_u = max(16, columns) // width
    parts = triton.cdiv(number, block_u)
    splits = triton.cdiv(count, _RUN)
    addresses = base_addresses(k_buffers)
    config = {
        "HKV": hkv,
        "ELEMENT": ELEMENT[k_buffers[0].dtype],
        "ALIGNED": aligned(k_buffers, 16),
        "G": group,
        "COMPUTE": ELEMENT[queries.dtype] if exact else tl.float32,
        "RUN": _RUN,
        "BLOCK_N": 64 if exact else 32,
        "BLOCK_U": block_u,
        "BLOCK_G": width,
        "BLOCK_D": block_d,
        "num_warps": 8 if columns > 128 or not exact else 4,
        "num_stages": 3 if columns * block_d <= 128 * 128 and block_d <= 128 else 2,
    }
    strides = (q_layer, q_row, q_kv, q_head, *k_buffers[0].stride()[:2])
    lse = torch.empty(rows, number, splits, device=slots.device)
    mass = torch.empty(layers, hkv, count, device=slots.device)
    valid, scale = valid.view(torch.uint8), scale * _LOG2_E
    _lse_kernel[(parts, splits, rows)](
        queries, valid, addresses, slots, lse, scale, count, number, dim, splits, *strides, **config
    )
    lse = (lse.mul_(math.log(2)).logsumexp(-1) * _LOG2_E) if splits > 1 else lse
    _mass_kernel[(splits, rows)](
        queries, valid, addresses, slots, lse, mean, mass, scale, count, number, dim, *strides, PARTS=parts, **config
    )
    if pool <= 1:
        return mass
    out = torch.empty_like(mass)
    _pool_kernel[(triton.cdiv(count, _RUN), rows)](mass, out, count, POOL=pool, BLOCK_N=_RUN, num_warps=4)
    return out
