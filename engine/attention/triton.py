"""The GPU backend: SGLang's Triton attention with index streams that begin at each row's window.

Written against SGLang's source; on the CPU only its index streams are tested. Nobody has run it on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from torch import Tensor

from agentkv_serve.engine.capture import CapturePlan, capture, plan_decode
from agentkv_serve.engine.runtime import Runtime


class WindowTriton(TritonAttnBackend):
    """SGLang's kernels, unchanged: a compressed row is a sliding window whose content was chosen instead of recent."""

    def __init__(self, runner: Any, runtime: Runtime) -> None:
        super().__init__(runner)
        self._runtime = runtime
        rows = runtime.slots.row_slot.shape[0]
        # A CUDA graph records addresses: each step's decode plan is copied into these.
        self._slot = torch.zeros(rows, dtype=torch.int64, device=runtime.shape.device)
        self._place = torch.zeros(rows, dtype=torch.int64, device=runtime.shape.device)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_decode():
            self._plan_decode(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if forward_batch.forward_mode.is_decode_or_idle():
            self._plan_decode(forward_batch)

    def _plan_decode(self, forward_batch: Any) -> None:
        size = forward_batch.batch_size
        rows = forward_batch.req_pool_indices[:size]
        plan = plan_decode(self._runtime, rows, forward_batch.input_ids[:size])
        self._slot[:size] = plan.slot
        self._place[:size] = plan.place
        self._runtime.plan = CapturePlan(None, self._slot[:size], self._place[:size])

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
        start = self._runtime.slots.start[req_pool_indices[:bs]]
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

    def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any) -> Any:
        capture(self._runtime, layer.layer_id, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
        return super().forward_extend(q, k, v, layer, *args, **kwargs)

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any) -> Any:
        capture(self._runtime, layer.layer_id, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
        return super().forward_decode(q, k, v, layer, *args, **kwargs)
