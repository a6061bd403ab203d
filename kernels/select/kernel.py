"""Triton kernel of the top-B selection: a radix select per row, then one ordered pass that writes the kept
positions.

Floats become integers of the same order (sign bit flipped, negative ones mirrored), so the B-th best value is
found digit by digit with four histograms of 256 bins, exactly. Above it everything is kept, of its equals the
first ones. One program per row, no atomics across programs: the result does not depend on scheduling.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _ranks(scores_ptr, protected_ptr, n, N):
    """Order-preserving uint32 images of the scores at n; protected ones above all others."""
    x = tl.load(scores_ptr + n, mask=n < N, other=0.0)
    kept = tl.load(protected_ptr + n, mask=n < N, other=0) != 0
    limit = 3.4028234663852886e38
    x = tl.where(x != x, -limit, x)
    x = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
    x = tl.where(kept, float("inf"), x)
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 and 0.0 are one value
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _select_kernel(
    scores_ptr, protected_ptr, out_ptr, N, keep, protected_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * N
    protected_ptr += row * protected_stride
    bins = tl.arange(0, 256)

    threshold = tl.full([], 0, tl.uint32)
    room = keep  # how many are still wanted among those that agree with the threshold's digits so far
    for digit in tl.static_range(4):
        shift = 24 - 8 * digit
        counts = tl.zeros([256], tl.int32)
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            rank = _ranks(scores_ptr, protected_ptr, n, N)
            agrees = n < N
            if digit > 0:
                agrees = agrees & ((rank >> (shift + 8)) == threshold)
            counts += tl.histogram(((rank >> shift) & 255).to(tl.int32), 256, mask=agrees)
        at_least = tl.cumsum(counts, axis=0, reverse=True)
        best = tl.sum((at_least >= room).to(tl.int32), axis=0) - 1
        room -= tl.sum(tl.where(bins > best, counts, 0), axis=0)
        threshold = (threshold << 8) | best.to(tl.uint32)

    written = 0
    ties = 0
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        rank = _ranks(scores_ptr, protected_ptr, n, N)
        equal = ((n < N) & (rank == threshold)).to(tl.int32)
        kept = (n < N) & ((rank > threshold) | ((equal != 0) & (ties + tl.cumsum(equal, axis=0) <= room)))
        place = written + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(out_ptr + row * keep + place, n.to(tl.int64), mask=kept)
        written += tl.sum(kept.to(tl.int32), axis=0)
        ties += tl.sum(equal, axis=0)


def top_keep(scores: torch.Tensor, keep: int, protected: torch.Tensor) -> torch.Tensor:
    """See `agentkv_serve.kernels.select.top_keep`. No scratch memory."""
    count = scores.shape[-1]
    rows = scores.numel() // count
    out = torch.empty(*scores.shape[:-1], keep, dtype=torch.int64, device=scores.device)
    # One shared mask is read by all rows (stride 0) instead of being repeated.
    stride = 0 if protected.dim() == 1 and scores.dim() > 1 else count
    _select_kernel[(rows,)](
        scores.contiguous(),
        protected.contiguous().view(torch.uint8),
        out,
        count,
        keep,
        stride,
        BLOCK=min(2048, max(64, triton.next_power_of_2(count))),
        num_warps=8,
    )
    return out
