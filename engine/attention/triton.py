"""SGLang's Triton attention with index streams that begin at each row's window."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from torch import Tensor

from agentkv_serve.engine.attention.window import WindowBackend


class WindowTriton(WindowBackend, TritonAttnBackend):
    """SGLang's kernels, unchanged: a compressed row is a sliding window whose content was chosen instead of recent."""

    def _fill_kv_indptr_and_indices(
        self,
        plan: Any,
        bs: int,
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        kv_indices: Tensor,
        kv_indptr: Tensor | None = None,
    ) -> Tensor:
        """Index stream `row[start:length]` of each request; no word from the host, so it can run before a graph replay.

        Args:
            seq_lens: [bs] logical lengths: of the whole row in decode, of the prefix in extend.
            kv_indices: written in place, `kv_indptr[-1]` entries.
        """
        indptr: Tensor = self.kv_indptr[: bs + 1] if kv_indptr is None else kv_indptr
        start = self.window_starts(req_pool_indices[:bs])
        lengths = (seq_lens[:bs] - start).clamp(min=0)
        indptr[1:] = torch.cumsum(lengths, dim=0)
        self.kv_index_translator.pack_read_stream(
            plan,
            req_pool_indices=req_pool_indices,
            seq_lens=lengths,
            indptr=indptr,
            out=kv_indices,
            kv_start_idx=start,
        )
        return indptr

    def get_num_kv_splits(self, num_kv_splits: Tensor, seq_lens: Tensor, uneven_batch: Tensor | None = None) -> None:
        """Splits a row's keys by how many are read: the stream's lengths, not the logical ones.

        SGLang calls this right after the stream was filled. `num_kv_splits` is written in place.
        """
        lengths = torch.diff(self.kv_indptr[: seq_lens.shape[0] + 1])
        super().get_num_kv_splits(num_kv_splits, lengths, uneven_batch)
