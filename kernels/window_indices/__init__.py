"""The slots that attention reads: `row[start:length]` of every request of a batch, one after another."""

from __future__ import annotations

import torch

from agentkv_serve.kernels.backend import Backend, check_index, resolve
from agentkv_serve.kernels.window_indices import reference

__all__ = ["window_indices"]


def window_indices(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(indptr int64 [B + 1], indices int64)`: request b reads `indices[indptr[b] : indptr[b + 1]]`.

    req_to_token: int32 `[R, M]` page table; rows: int64 `[B]` rows of the batch; start: int64 `[R]`, first
    valid position of every row; seq_lens: int64 `[B]` logical lengths (a length below the start gives an
    empty window).

    Without `out` the result has exactly `indptr[-1]` entries, which takes one read on the host. With `out`
    (int64 or int32, large enough) the first `indptr[-1]` entries are written, the rest stays as it is, and
    the call is recordable in a CUDA graph. Raises `ValueError` for shapes that do not fit.
    """
    if req_to_token.dtype != torch.int32 or req_to_token.dim() != 2:
        raise ValueError(f"req_to_token must be int32 [R, M], got {req_to_token.dtype} {tuple(req_to_token.shape)}")
    for name, index in (("rows", rows), ("start", start), ("seq_lens", seq_lens)):
        check_index(name, index)
    if rows.shape != seq_lens.shape or start.numel() != req_to_token.shape[0]:
        raise ValueError(
            f"{rows.numel()} rows, {seq_lens.numel()} lengths, "
            f"{start.numel()} starts for {req_to_token.shape[0]} table rows"
        )
    lens = (seq_lens - start[rows]).clamp_(min=0)
    indptr = torch.zeros(rows.numel() + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(lens, 0, out=indptr[1:])
    if out is None:
        out = torch.empty(int(indptr[-1]), dtype=torch.int64, device=rows.device)
    if resolve(backend, rows.device) == "triton" and rows.numel() and out.numel():
        from agentkv_serve.kernels.window_indices import kernel

        kernel.fill(req_to_token, rows, start, indptr, out)
    else:
        reference.fill(req_to_token, rows, start, indptr, out)
    return indptr, out
