"""Triton kernels of the compaction's move: one launch for all layers, KV heads, kept rows, K and V.

Rows are moved as machine words of up to eight bytes, so the pool's dtype does not matter.

In the window layout (`shifted`) the j-th kept token moves to place N - B + j, never below its own place,
since the kept tokens ascend. So one program per layer, head and block of columns walks from the last row to
the first, a block of rows at a time: what a block overwrites was read by it or by an earlier block, and a
barrier stands between a block's reads and its writes. Any other combination of source and target goes through
scratch memory.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from agentkv_serve.kernels.backend import aligned, base_addresses

_WORD = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_SCRATCH_BYTES = 256 << 20


@triton.jit
def _places(source_ptr, kept_ptr, target_ptr, j):
    """Slots int64 from where and to where the j-th kept tokens move; equal (no move) for negative j."""
    kept = tl.load(kept_ptr + j, mask=j >= 0, other=0)
    origin = tl.load(source_ptr + kept, mask=j >= 0, other=0)
    return origin, tl.load(target_ptr + j, mask=j >= 0, other=0)


@triton.jit
def _shift_kernel(
    address_ptr, source_ptr, kept_ptr, target_ptr,
    layers, B, k_words, v_words, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride, k_blocks,
    HKV: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """In place: rows of one layer, head and column block, from the last kept one to the first."""
    row = tl.program_id(1).to(tl.int64)
    layer, head = row // HKV, row % HKV
    block = tl.program_id(0)
    is_k = block < k_blocks
    words = tl.where(is_k, k_words, v_words)
    stride = tl.where(is_k, k_slot_stride, v_slot_stride)
    base = tl.load(address_ptr + layer + tl.where(is_k, 0, layers)).to(tl.pointer_type(WORD))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    base += head * tl.where(is_k, k_head_stride, v_head_stride)
    block -= tl.where(is_k, 0, k_blocks)
    column = block * BLOCK_W + tl.arange(0, BLOCK_W)
    j = B - BLOCK_J + tl.arange(0, BLOCK_J)
    origin, target = _places(source_ptr, kept_ptr + row * B, target_ptr, j)
    for _ in range(0, B, BLOCK_J):
        moves = (origin != target)[:, None] & (column < words)[None, :]
        content = tl.load(base + origin[:, None] * stride + column[None, :], mask=moves, other=0)
        j -= BLOCK_J
        next_origin, next_target = _places(source_ptr, kept_ptr + row * B, target_ptr, j)  # while the rows arrive
        tl.debug_barrier()  # all reads of this block before its first write
        tl.store(base + target[:, None] * stride + column[None, :], content, mask=moves)
        origin, target = next_origin, next_target


@triton.jit
def _copy_kernel(
    address_ptr, source_ptr, kept_ptr, target_ptr, scratch_ptr,
    B, words, slot_stride, head_stride,
    HKV: tl.constexpr, WORD: tl.constexpr, OUT: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """OUT: pool rows to scratch `[L, Hkv, B, words]`; else scratch to pool rows."""
    row = tl.program_id(1).to(tl.int64)
    layer, head = row // HKV, row % HKV
    base = tl.load(address_ptr + layer).to(tl.pointer_type(WORD)) + head * head_stride
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    column = tl.arange(0, BLOCK_W)
    live = (j < B)[:, None] & (column < words)[None, :]
    place = scratch_ptr + (row * B + j)[:, None] * words + column[None, :]
    if OUT:
        kept = tl.load(kept_ptr + row * B + j, mask=j < B, other=0)
        origin = tl.load(source_ptr + kept, mask=j < B, other=0)
        tl.store(place, tl.load(base + origin[:, None] * slot_stride + column[None, :], mask=live, other=0), mask=live)
    else:
        target = tl.load(target_ptr + j, mask=j < B, other=0)
        tl.store(base + target[:, None] * slot_stride + column[None, :], tl.load(place, mask=live, other=0), mask=live)


def gather_write(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    source: torch.Tensor,
    kept: torch.Tensor,
    target: torch.Tensor,
    shifted: bool,
) -> None:
    """See `agentkv_serve.kernels.compact.gather_write`. Scratch memory: none if `shifted`, else at most 256
    MiB or a layer."""
    layers, hkv, keep = kept.shape
    kept = kept.contiguous()
    if not shifted:
        for buffers in (k_buffers, v_buffers):
            _through_scratch(buffers, source, kept, target)
        return
    size = min(_word_size(k_buffers), _word_size(v_buffers))
    k_words, v_words = (_in_words(buffers[0], buffers[0].shape[2], size) for buffers in (k_buffers, v_buffers))
    block_w = min(32, triton.next_power_of_2(max(k_words, v_words)))
    k_blocks, v_blocks = triton.cdiv(k_words, block_w), triton.cdiv(v_words, block_w)
    _shift_kernel[(k_blocks + v_blocks, layers * hkv)](
        base_addresses([*k_buffers, *v_buffers]), source, kept, target,
        layers, keep, k_words, v_words,
        *(_in_words(buffers[0], step, size) for buffers in (k_buffers, v_buffers) for step in buffers[0].stride()[:2]),
        k_blocks,
        HKV=hkv, WORD=_WORD[size], ALIGNED=aligned(k_buffers, 16) and aligned(v_buffers, 16),
        BLOCK_J=32, BLOCK_W=block_w, num_warps=4, num_stages=1,
    )  # fmt: skip


def _through_scratch(
    buffers: Sequence[torch.Tensor], source: torch.Tensor, kept: torch.Tensor, target: torch.Tensor
) -> None:
    layers, hkv, keep = kept.shape
    size = _word_size(buffers)
    words = _in_words(buffers[0], buffers[0].shape[2], size)
    step = max(1, _SCRATCH_BYTES // (hkv * keep * words * size))
    scratch = torch.empty(min(step, layers) * hkv * keep * words * size, dtype=torch.uint8, device=source.device)
    for first in range(0, layers, step):
        part = buffers[first : first + step]
        for out in (True, False):
            _copy_kernel[(triton.cdiv(keep, 64), len(part) * hkv)](
                base_addresses(part), source, kept[first : first + step], target,
                scratch.view(_TORCH_WORD[size]), keep, words,
                *(_in_words(part[0], stride, size) for stride in part[0].stride()[:2]),
                HKV=hkv, WORD=_WORD[size], OUT=out, BLOCK_J=64, BLOCK_W=triton.next_power_of_2(words), num_warps=4,
            )  # fmt: skip


def _word_size(buffers: Sequence[torch.Tensor]) -> int:
    """The widest word in bytes that divides every row and its place in memory."""
    row = buffers[0].shape[2] * buffers[0].element_size()
    return next(size for size in _WORD if row % size == 0 and aligned(buffers, size))


def _in_words(buffer: torch.Tensor, elements: int, size: int) -> int:
    return elements * buffer.element_size() // size


_TORCH_WORD = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
