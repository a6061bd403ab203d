"""Triton kernel of the window's index stream: a few programs per request walk its window together."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

_PROGRAMS = 16


@triton.jit
def _fill_kernel(table_ptr, rows_ptr, start_ptr, indptr_ptr, out_ptr, row_stride, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    row = tl.load(rows_ptr + b)
    first = tl.load(indptr_ptr + b)
    length = tl.load(indptr_ptr + b + 1) - first
    window = table_ptr + row * row_stride + tl.load(start_ptr + row)
    for begin in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        tl.store(out_ptr + first + i, tl.load(window + i, mask=i < length), mask=i < length)


def fill(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `agentkv_serve.kernels.window_indices.reference.fill`. Lengths stay on the device: recordable in a
    CUDA graph."""
    if req_to_token.stride(1) != 1:
        req_to_token = req_to_token.contiguous()
    _fill_kernel[(rows.numel(), _PROGRAMS)](
        req_to_token, rows.contiguous(), start.contiguous(), indptr, out, req_to_token.stride(0), BLOCK=512, num_warps=4
    )
