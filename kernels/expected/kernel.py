"""Triton kernel of the expected logits: a block of keys stays on the chip for all query heads of its
group."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from agentkv_serve.kernels.backend import aligned, base_addresses
from agentkv_serve.kernels.paged import ELEMENT, layer_base, load_rows


@triton.jit
def _logits_kernel(
    mean_ptr, covariance_ptr, address_ptr, slots_ptr, logits_ptr,
    N, D, slot_stride, head_stride,
    HKV: tl.constexpr, G: tl.constexpr, COVARIANCE: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    layer, head = row // HKV, row % HKV
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    keys = load_rows(
        address_ptr, slots_ptr, layer, head, n, N, D, slot_stride, head_stride, ELEMENT, ALIGNED, BLOCK_D
    ).to(tl.float32)  # fmt: skip
    slot = tl.load(slots_ptr + n, mask=n < N, other=0)
    place = layer_base(address_ptr, layer, ELEMENT, ALIGNED) + slot[:, None] * slot_stride + head * head_stride
    for g in range(G):
        q_head = row * G + g
        mean = tl.load(mean_ptr + q_head * D + d, mask=d < D, other=0.0)
        total = tl.sum(keys * mean[None, :], axis=1) * tl.rsqrt(D.to(tl.float32))
        if COVARIANCE:
            square = tl.zeros([BLOCK_N], tl.float32)
            for first in range(0, D, BLOCK_C):
                c = first + tl.arange(0, BLOCK_C)
                part = tl.load(
                    covariance_ptr + (q_head * D + d)[:, None] * D + c[None, :],
                    mask=(d < D)[:, None] & (c < D)[None, :],
                    other=0.0,
                )
                columns = tl.load(place + c[None, :], mask=(n < N)[:, None] & (c < D)[None, :], other=0.0)
                square += tl.sum(tl.dot(keys, part, input_precision="tf32x3") * columns.to(tl.float32), axis=1)
            total += square / (2.0 * D)
        tl.store(logits_ptr + q_head * N + n, total, mask=n < N)


def expected_logits(
    mean: torch.Tensor,
    covariance: torch.Tensor | None,
    k_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:
    """fp32 `[L, Hq, N]`, as the reference. The quadratic form runs on tensor cores in three TF32 parts
    (float32 accuracy)."""
    layers, hq, dim = mean.shape
    hkv = k_buffers[0].shape[1]
    logits = torch.empty(layers, hq, slots.numel(), device=slots.device)
    mean = mean.float().contiguous()
    wide = dim > 128  # both factors lie in shared memory, in float32
    block_n = 32 if wide else 64
    _logits_kernel[(triton.cdiv(slots.numel(), block_n), layers * hkv)](
        mean, mean if covariance is None else covariance.float().contiguous(), base_addresses(k_buffers), slots, logits,
        slots.numel(), dim, *k_buffers[0].stride()[:2],
        HKV=hkv, G=hq // hkv, COVARIANCE=covariance is not None,
        ELEMENT=ELEMENT[k_buffers[0].dtype], ALIGNED=aligned(k_buffers, 16),
        BLOCK_N=block_n, BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_C=16 if wide else 32,
        num_warps=8, num_stages=1 if wide else 2,
    )  # fmt: skip
    return logits
