"""SGLang's FlashInfer attention with index streams that begin at each row's window."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashinfer_backend import (
    FlashInferAttnBackend,
    FlashInferIndicesUpdaterDecode,
    FlashInferIndicesUpdaterPrefill,
)
from torch import Tensor

from agentkv_serve.engine.attention.window import WindowBackend
from agentkv_serve.engine.runtime import Runtime


class WindowFlashInfer(WindowBackend, FlashInferAttnBackend):
    """SGLang's wrappers, unchanged; only what they plan over is cut.

    FlashInfer aligns the causal mask of paged attention at the end of queries and keys, so a window needs no other
    mask. In the ragged path new tokens attend to each other without the pool, and to the window of the prefix in it.
    """

    def __init__(self, runner: Any, runtime: Runtime) -> None:
        super().__init__(runner, runtime, init_new_workspace=runner.init_new_workspace)
        self.indices_updater_prefill = WindowPrefill(runner, self)
        self.indices_updater_decode = WindowDecode(runner, self)

    def host_starts(self, size: int) -> Tensor:
        """[size] int64 window starts of the batch on the host: FlashInfer plans there. Padded rows have none."""
        starts = torch.zeros(size, dtype=torch.int64)
        known = self._runtime.starts[:size]
        starts[: len(known)] = torch.tensor(known, dtype=torch.int64)
        return starts


class WindowDecode(FlashInferIndicesUpdaterDecode):
    """Plans decode steps over `row[start:length]`."""

    def call_begin_forward(
        self,
        wrapper: Any,
        paged_kernel_lens: Tensor,
        paged_kernel_lens_sum: int,
        kv_indptr: Tensor,
        kv_start_idx: Tensor | None,
        spec_info: Any,
        seq_lens_cpu: Tensor | None,
        *,
        req_pool_indices: Tensor,
        **options: Any,
    ) -> None:
        """Arguments are those of a batch of whole rows; the plan that is made of them is that of their windows.

        Args:
            paged_kernel_lens: [B] logical lengths.
            seq_lens_cpu: [B] the same on the host, or None: then FlashInfer reads the device.
        """
        size = len(paged_kernel_lens)
        start = self.attn_backend.window_starts(req_pool_indices[:size])
        cut = self.attn_backend.host_starts(size)
        super().call_begin_forward(
            wrapper,
            paged_kernel_lens - start,
            paged_kernel_lens_sum - int(cut.sum()),
            kv_indptr,
            start,
            spec_info,
            None if seq_lens_cpu is None else seq_lens_cpu - cut,
            req_pool_indices=req_pool_indices,
            **options,
        )


class WindowPrefill(FlashInferIndicesUpdaterPrefill):
    """Plans extends over `row[start:prefix]` (ragged) or `row[start:length]` (paged)."""

    def call_begin_forward(
        self,
        wrapper_ragged: Any,
        wrapper_paged: Any,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        paged_kernel_lens_sum: int,
        seq_lens: Tensor,
        prefix_lens: Tensor | None,
        kv_start_idx: Tensor | None,
        *buffers: Any,
        **options: Any,
    ) -> None:
        """Arguments are those of a batch of whole rows. New tokens are `seq_lens - prefix_lens`, as ever.

        Args:
            paged_kernel_lens: [B] tokens read from the pool: the prefixes' (ragged) or all (paged).
        """
        size = len(paged_kernel_lens)
        start = self.attn_backend.window_starts(req_pool_indices[:size])
        super().call_begin_forward(
            wrapper_ragged,
            wrapper_paged,
            req_pool_indices,
            paged_kernel_lens - start,
            paged_kernel_lens_sum - int(self.attn_backend.host_starts(size).sum()),
            seq_lens,
            prefix_lens,
            start,
            *buffers,
            **options,
        )
