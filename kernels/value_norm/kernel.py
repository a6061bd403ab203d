"""Triton kernel of the value norms: one program per run of tokens of a layer and KV head."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from agentkv_serve.kernels.backend import aligned, base_addresses
from agentkv_serve.kernels.paged import ELEMENT, load_rows

_BLOCK_N = 64  # tokens per program


@triton.jit
def _norm_kernel(
    address_ptr, slots_ptr, out_ptr,
    N, D, slot_stride, head_stride,
    HKV: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[layer, head, n] = |v_n|."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    v = load_rows(
        address_ptr, slots_ptr, row // HKV, row % HKV, n, N, D, slot_stride, head_stride, ELEMENT, ALIGNED, BLOCK_D
    ).to(tl.float32)  # fmt: skip
    tl.store(out_ptr + row * N + n, tl.sqrt(tl.sum(v * v, axis=1)), mask=n < N)


def value_norms(v_buffers: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """See `agentkv_serve.kernels.value_norm.value_norms`."""
    first, count = v_buffers[0], slots.numel()
    hkv, dim = first.shape[1:]
    out = torch.empty(len(v_buffers), hkv, count, device=slots.device)
    _norm_kernel[(triton.cdiv(count, _BLOCK_N), len(v_buffers) * hkv)](
        base_addresses(v_buffers), slots, out, count, dim, *first.stride()[:2],
        HKV=hkv, ELEMENT=ELEMENT[first.dtype], ALIGNED=aligned(v_buffers, 16),
        BLOCK_N=_BLOCK_N, BLOCK_D=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return out
