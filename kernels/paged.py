"""What the Triton kernels share: reading rows of the paged pools of all layers."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENT = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


@triton.jit
def layer_base(address_ptr, layer, ELEMENT, ALIGNED):
    """Pointer to the layer's buffer; ALIGNED = rows start at multiples of 16 bytes, so that loads can be
    wide."""
    base = tl.load(address_ptr + layer).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit
def load_rows(address_ptr, slots_ptr, layer, head, n, N, D, slot_stride, head_stride, ELEMENT, ALIGNED, BLOCK_D):
    """The rows `[BLOCK_N, BLOCK_D]` of one layer and head for the window's tokens n; zeros outside of it."""
    base = layer_base(address_ptr, layer, ELEMENT, ALIGNED)
    d = tl.arange(0, BLOCK_D)
    live = (n >= 0) & (n < N)
    # Slots are int64 and stay so: slot * stride passes 2^31 elements in pools of a few GiB.
    slot = tl.load(slots_ptr + n, mask=live, other=0)
    offset = slot[:, None] * slot_stride + head * head_stride + d[None, :]
    return tl.load(base + offset, mask=live[:, None] & (d < D)[None, :], other=0.0)
