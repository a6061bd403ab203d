"""Torch definition of the window's index stream; the CPU path of the engine."""

from __future__ import annotations

import torch


def fill(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write `req_to_token[rows[b], start[rows[b]] + i]` to `out[indptr[b] + i]` for every i of request b's
    window."""
    bounds = indptr.tolist()
    for b, (row, first) in enumerate(zip(rows.tolist(), start[rows].tolist(), strict=True)):
        length = bounds[b + 1] - bounds[b]
        out[bounds[b] : bounds[b + 1]] = req_to_token[row, first : first + length]
