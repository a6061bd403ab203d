"""SGLang's FlashAttention 3 with page tables that begin at each row's window."""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.attention.metadata import normal_decode_set_metadata
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.utils import get_device_capability
from torch import Tensor

from agentkv_serve.engine.attention.window import WindowBackend
from agentkv_serve.engine.runtime import Runtime


class WindowFlashAttention(WindowBackend, FlashAttentionBackend):
    """SGLang's kernel calls, unchanged.

    They take a page table and a key count per request and align the causal mask at the end. A hole is whole pages, so
    a table that begins at the window's first page and the window's length are all that a compressed row needs.
    """

    def __init__(self, runner: Any, runtime: Runtime) -> None:
        capability = get_device_capability()
        if capability[0] not in (8, 9):
            raise ValueError(
                f"FlashAttention 3 needs an NVIDIA GPU of compute capability 8.x or 9.x, not {capability}; "
                "use --attention-backend triton or flashinfer"
            )
        super().__init__(runner, runtime)
        self._width = self.req_to_token.shape[1]
        # Row r from position s on is row r * width + s of this view: SGLang's table kernel takes windows as it is.
        self._suffixes = self.req_to_token.view(-1).unfold(0, self._width, 1)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Page tables and key counts of an extend, or of a decode step without a graph."""
        super().init_forward_metadata(forward_batch)
        metadata = self.forward_metadata
        rows = forward_batch.req_pool_indices
        start = self.window_starts(rows)
        metadata.cache_seqlens_int32 = (forward_batch.seq_lens - start).to(torch.int32)
        # A new tensor: without prefixes SGLang lets `cu_seqlens_q` be the old one.
        metadata.cu_seqlens_k = torch.nn.functional.pad(
            torch.cumsum(metadata.cache_seqlens_int32, dim=0, dtype=torch.int32), (1, 0)
        )
        pages = torch.arange(0, metadata.max_seq_len_k, self.page_size, device=rows.device)
        columns = (start[:, None] + pages).clamp(max=self._width - 1)
        metadata.page_table = self.req_to_token[rows[:, None], columns] // self.page_size
        if metadata.scheduler_metadata is not None:  # it was made for whole rows
            metadata.scheduler_metadata = self._compute_scheduler_metadata(
                len(rows), max(metadata.max_seq_len_k, 1), metadata.cache_seqlens_int32, metadata.cu_seqlens_q
            )

    def _set_decode_page_metadata(
        self, plan: Any, metadata: Any, req_pool_indices: Tensor, seq_lens: Tensor, seq_len_delta: int
    ) -> None:
        """The same for a decode step under a CUDA graph, in place and without a word from the host.

        SGLang derives FlashAttention's schedule from these key counts afterwards.
        """
        start = self.window_starts(req_pool_indices)
        normal_decode_set_metadata(
            metadata.cache_seqlens_int32,
            metadata.cu_seqlens_k,
            metadata.page_table,
            self._suffixes,
            req_pool_indices.to(torch.int64) * self._width + start,
            self.max_num_pages,
            seq_lens - start,
            seq_len_delta,
            self.page_size,
        )
