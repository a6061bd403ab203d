"""Triton kernel of the query capture: one program per token and block of its query."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kernel(
    ring_ptr, queries_ptr, slot_ptr, phase_ptr, position_ptr,
    size, D, slot_stride, phase_stride, position_stride, ring_head_stride, token_stride, head_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ring[slot, phase, position] = query, for one token; slot 0 is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot != 0:
        place = slot * slot_stride
        place += tl.load(phase_ptr + token) * phase_stride + tl.load(position_ptr + token) * position_stride
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        head, d = element // D, element % D
        content = tl.load(queries_ptr + token * token_stride + head * head_stride + d, mask=element < size)
        tl.store(ring_ptr + place + head * ring_head_stride + d, content, mask=element < size)


def write(
    ring: torch.Tensor,
    layer: int,
    queries: torch.Tensor,
    slot: torch.Tensor,
    phase: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """See `agentkv_serve.kernels.capture.write`."""
    tokens, heads, dim = queries.shape
    if queries.stride(2) != 1:
        queries = queries.contiguous()
    ring = ring[:, layer]
    block = min(1024, triton.next_power_of_2(heads * dim))
    _write_kernel[(tokens, triton.cdiv(heads * dim, block))](
        ring, queries, slot, phase, position,
        heads * dim, dim, *ring.stride()[:4], *queries.stride()[:2],
        BLOCK=block, num_warps=4,
    )  # fmt: skip
