"""Triton kernel of the automaton's step: one thread per row."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 128


@triton.jit
def _step_kernel(next_ptr, label_ptr, state_ptr, ids_ptr, read_ptr, after_ptr, R, V, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < R
    token = tl.load(ids_ptr + row, mask=live, other=0)
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    cell = tl.load(state_ptr + row, mask=live, other=0) * V + token
    tl.store(read_ptr + row, tl.load(label_ptr + cell, mask=live, other=0), mask=live)
    tl.store(after_ptr + row, tl.load(next_ptr + cell, mask=live, other=0).to(tl.int64), mask=live)


def step(
    next_state: torch.Tensor, label: torch.Tensor, state: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `agentkv_serve.kernels.phase_step.step`."""
    read, after = torch.empty_like(ids, dtype=torch.int8), torch.empty_like(state)
    _step_kernel[(triton.cdiv(ids.numel(), _BLOCK),)](
        next_state.contiguous(), label.contiguous(), state.contiguous(), ids.contiguous(),
        read, after, ids.numel(), next_state.shape[1], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return read, after
