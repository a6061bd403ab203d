"""Triton kernels of the mean similarity, without an N x N matrix.

`_last_kernel` searches, for a block of rows, the last similar column from the right and stops when every row
of the block has found one; the removed entries are added up per column as 2^-32 fixed-point integers, whose
sum does not depend on the order of the additions. `_sum_kernel` adds up the normalised keys of a head,
`_mean_kernel` puts the parts together.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from agentkv_serve.kernels.backend import aligned, base_addresses
from agentkv_serve.kernels.paged import ELEMENT, load_rows

_BLOCK = 64


@triton.jit
def _inverse_norm(rows):
    wide = rows.to(tl.float32)
    return 1.0 / (tl.sqrt(tl.sum(wide * wide, axis=1)) + 1e-8)


@triton.jit
def _last_kernel(
    address_ptr, slots_ptr, removed_ptr,
    N, D, threshold, slot_stride, head_stride,
    HKV: tl.constexpr, ELEMENT: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    layer, head = row // HKV, row % HKV
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = load_rows(address_ptr, slots_ptr, layer, head, i, N, D, slot_stride, head_stride, ELEMENT, ALIGNED, BLOCK_D)
    scale = _inverse_norm(mine)
    mine = mine.to(COMPUTE)
    last = tl.where(i < N, -1, 0)
    begin = tl.cdiv(N, BLOCK) * BLOCK - BLOCK
    while (begin >= 0) & (tl.min(last, axis=0) < 0):
        j = begin + tl.arange(0, BLOCK)
        others = load_rows(
            address_ptr, slots_ptr, layer, head, j, N, D, slot_stride, head_stride, ELEMENT, ALIGNED, BLOCK_D
        )  # fmt: skip
        product = tl.dot(mine, tl.trans(others.to(COMPUTE)), input_precision="ieee")
        similarity = product * scale[:, None] * _inverse_norm(others)[None, :]
        alike = (similarity > threshold) & (i[:, None] != j[None, :]) & (j < N)[None, :]
        found = tl.max(tl.where(alike, j[None, :], -1), axis=1)
        last = tl.where(last < 0, found, last)
        begin -= BLOCK
    last = tl.maximum(last, 0)
    other = load_rows(
        address_ptr, slots_ptr, layer, head, last, N, D, slot_stride, head_stride, ELEMENT, ALIGNED, BLOCK_D
    )  # fmt: skip
    product = tl.sum(mine.to(tl.float32) * other.to(tl.float32), axis=1) * scale * _inverse_norm(other)
    fixed = tl.where(last == i, 0.0, product * 4294967296.0).to(tl.int64)
    tl.atomic_add(removed_ptr + row * N + last, fixed, mask=i < N, sem="relaxed")


@triton.jit
def _sum_kernel(
    address_ptr, slots_ptr, sum_ptr,
    N, D, slot_stride, head_stride,
    HKV: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        keys = load_rows(
            address_ptr, slots_ptr, row // HKV, row % HKV, n, N, D, slot_stride, head_stride, ELEMENT, ALIGNED, BLOCK_D
        )  # fmt: skip
        total += tl.sum(keys.to(tl.float32) * _inverse_norm(keys)[:, None], axis=0)
    tl.store(sum_ptr + row * BLOCK_D + tl.arange(0, BLOCK_D), total)


@triton.jit
def _mean_kernel(
    address_ptr, slots_ptr, sum_ptr, removed_ptr, mean_ptr,
    N, D, slot_stride, head_stride,
    HKV: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = load_rows(
        address_ptr, slots_ptr, row // HKV, row % HKV, n, N, D, slot_stride, head_stride, ELEMENT, ALIGNED, BLOCK_D
    )  # fmt: skip
    unit = keys.to(tl.float32) * _inverse_norm(keys)[:, None]
    total = tl.load(sum_ptr + row * BLOCK_D + tl.arange(0, BLOCK_D))
    removed = tl.load(removed_ptr + row * N + n, mask=n < N, other=0).to(tl.float32) / 4294967296.0
    column = tl.sum(unit * (total[None, :] - unit), axis=1) - removed
    tl.store(mean_ptr + row * N + n, column / N, mask=n < N)


def mean_similarity(k_buffers: Sequence[torch.Tensor], slots: torch.Tensor, threshold: float) -> torch.Tensor:
    """fp32 `[L, Hkv, N]`, as the reference. Scratch memory: 8 bytes per score."""
    hkv, dim = k_buffers[0].shape[1:]
    count, rows = slots.numel(), len(k_buffers) * hkv
    block_d = max(16, triton.next_power_of_2(dim))
    blocks = triton.cdiv(count, _BLOCK)
    addresses, strides = base_addresses(k_buffers), k_buffers[0].stride()[:2]
    config = {
        "HKV": hkv,
        "ELEMENT": ELEMENT[k_buffers[0].dtype],
        "ALIGNED": aligned(k_buffers, 16),
        "BLOCK": _BLOCK,
        "BLOCK_D": block_d,
        "num_warps": 8 if block_d > 64 else 4,
    }
    # 16-bit products are exact in float32; Triton's interpreter has none for bfloat16.
    exact = k_buffers[0].dtype == torch.float16 or isinstance(_last_kernel, triton.JITFunction)
    compute = ELEMENT[k_buffers[0].dtype] if exact and k_buffers[0].element_size() == 2 else tl.float32
    removed = torch.zeros(rows, count, dtype=torch.int64, device=slots.device)
    total = torch.empty(rows, block_d, device=slots.device)
    mean = torch.empty(len(k_buffers), hkv, count, device=slots.device)
    _last_kernel[(blocks, rows)](
        addresses, slots, removed, count, dim, threshold, *strides, COMPUTE=compute, **config, num_stages=2
    )
    _sum_kernel[(rows,)](addresses, slots, total, count, dim, *strides, **config)
    _mean_kernel[(blocks, rows)](
        addresses, slots, total, removed, mean, count, dim, *strides, **config
    )  # fmt: skip
    return mean
