"""What the GPU backends share: query capture in every layer, and a decode plan at addresses that a graph can record."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from agentkv_serve.engine.capture import CapturePlan, capture, plan_decode
from agentkv_serve.engine.runtime import Runtime


class WindowBackend(AttentionBackend):
    """Mixed in before one of SGLang's backends.

    A decode step's plan is made before the step, outside of its CUDA graph: the automaton's tables may be replaced when
    a session brings a new model family, and a graph would go on reading the old ones. The graph reads only the plan.
    """

    def __init__(self, runner: Any, runtime: Runtime, **options: Any) -> None:
        super().__init__(runner, **options)
        self._runtime = runtime
        rows = runtime.slots.row_slot.shape[0]
        self._slot = torch.zeros(rows, dtype=torch.int64, device=runtime.shape.device)
        self._place = torch.zeros_like(self._slot)
        self._zero = torch.zeros_like(self._slot)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before a forward without a graph."""
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_decode():
            self._plan_decode(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a graph is recorded, and before each of its replays; padded rows are row 0, which has no session."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if forward_batch.forward_mode.is_decode_or_idle():
            self._plan_decode(forward_batch)

    def _plan_decode(self, forward_batch: Any) -> None:
        size = forward_batch.batch_size
        rows = forward_batch.req_pool_indices[:size]
        plan = plan_decode(self._runtime, rows, forward_batch.input_ids[:size])
        self._slot[:size] = plan.slot
        self._place[:size] = plan.place
        self._runtime.plan = CapturePlan(None, self._slot[:size], self._place[:size], self._zero[:size])

    def window_starts(self, rows: Tensor) -> Tensor:
        """[B] int64 first valid position of each row of the batch, on the device."""
        return self._runtime.slots.start[rows]

    def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Attention of new prompt tokens; their queries [T, Hq, D] go to the rings as planned."""
        capture(self._runtime, layer.layer_id, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
        return super().forward_extend(q, k, v, layer, *args, **kwargs)

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Attention of one new token per row; its query goes to the ring of its phase."""
        capture(self._runtime, layer.layer_id, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
        return super().forward_decode(q, k, v, layer, *args, **kwargs)
