"""Triton kernel of the trigonometric score: a block of keys is read once for all query heads of its group."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from agentkv_serve.kernels.backend import aligned, base_addresses
from agentkv_serve.kernels.paged import ELEMENT, layer_base


@triton.jit
def _best_kernel(
    queries_ptr, weights_ptr, address_ptr, slots_ptr, scores_ptr,
    N, pairs, count, slot_stride, head_stride,
    HKV: tl.constexpr, G: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    layer, head = row // HKV, row % HKV
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    f = tl.arange(0, BLOCK_F)
    slot = tl.load(slots_ptr + n, mask=n < N, other=0)
    place = (
        layer_base(address_ptr, layer, ELEMENT, ALIGNED) + slot[:, None] * slot_stride + head * head_stride + f[None, :]
    )
    live = (n < N)[:, None] & (f < pairs)[None, :]
    real = tl.load(place, mask=live, other=0.0).to(tl.float32)
    imag = tl.load(place + pairs, mask=live, other=0.0).to(tl.float32)
    size = tl.sqrt(real * real + imag * imag)
    for g in range(G):
        q_head = row * G + g
        best = tl.full([BLOCK_N], float("-inf"), tl.float32)
        for o in range(count):
            query = queries_ptr + (q_head * count + o) * 2 * pairs + f
            q_real = tl.load(query, mask=f < pairs, other=0.0)
            q_imag = tl.load(query + pairs, mask=f < pairs, other=0.0)
            best = tl.maximum(best, tl.sum(real * q_real[None, :] + imag * q_imag[None, :], axis=1))
        weight = tl.load(weights_ptr + q_head * pairs + f, mask=f < pairs, other=0.0)
        tl.store(scores_ptr + q_head * N + n, best + tl.sum(size * weight[None, :], axis=1), mask=n < N)


def best_product(
    queries: torch.Tensor, weights: torch.Tensor, k_buffers: Sequence[torch.Tensor], slots: torch.Tensor
) -> torch.Tensor:
    """fp32 `[L, Hq, N]`, as the reference. Multiplied in float32: there are only a few queries per key."""
    layers, hq, count, width = queries.shape
    hkv = k_buffers[0].shape[1]
    scores = torch.empty(layers, hq, slots.numel(), device=slots.device)
    _best_kernel[(triton.cdiv(slots.numel(), 64), layers * hkv)](
        queries.contiguous(), weights.contiguous(), base_addresses(k_buffers), slots, scores,
        slots.numel(), width // 2, count, *k_buffers[0].stride()[:2],
        HKV=hkv, G=hq // hkv, ELEMENT=ELEMENT[k_buffers[0].dtype], ALIGNED=aligned(k_buffers, 16),
        BLOCK_N=64, BLOCK_F=triton.next_power_of_2(width // 2), num_warps=8 if width > 64 else 4,
    )  # fmt: skip
    return scores
