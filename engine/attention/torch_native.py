"""The CPU backend: torch attention over `row[start:L]`, and the query capture of every layer."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentkv_serve.engine.capture import capture, capture_step, plan_decode
from agentkv_serve.engine.runtime import Runtime


class WindowTorchNative(TorchNativeAttnBackend):
    """SGLang's own path while nothing in the batch is compressed, so that such batches are bit-identical to stock."""

    def __init__(self, runner: Any, runtime: Runtime) -> None:
        super().__init__(runner)
        self._runtime = runtime
        self._windows: list[Tensor] | None = None  # pool slots that each request reads; None = stock path
        self._queries: list[Tensor] = []  # of a decode step's layers so far

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        runtime = self._runtime
        self._queries.clear()
        rows = forward_batch.req_pool_indices
        if forward_batch.forward_mode.is_decode():
            captures = bool(runtime.slots.row_slot[rows].any())
            runtime.plan = plan_decode(runtime, rows, forward_batch.input_ids) if captures else None
        starts = runtime.slots.start[rows]
        if not (runtime.force_window or bool(starts.any())):
            self._windows = None
            return
        table = self.req_to_token_pool.req_to_token
        self._windows = [
            table[row, start:length].to(torch.int64)
            for row, start, length in zip(rows.tolist(), starts.tolist(), forward_batch.seq_lens.tolist(), strict=True)
        ]

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any:
        capture(self._runtime, layer.layer_id, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
        if self._windows is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, forward_batch.extend_seq_lens_cpu)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any:
        capture_step(self._runtime, self._queries, q.view(-1, layer.tp_q_head_num, layer.qk_head_dim))
        if self._windows is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, [1] * len(self._windows))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, query_lens: list[int]) -> Tensor:
        """Causal attention of each request's new tokens over its window, which ends with them."""
        windows = self._windows
        assert windows is not None
        pool = self.token_to_kv_pool
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = queries.new_empty((queries.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        first = 0
        for slots, count in zip(windows, query_lens, strict=True):
            rows = slice(first, first + count)
            mask = None
            if count > 1:
                size = len(slots)
                mask = torch.ones(count, size, dtype=torch.bool, device=q.device).tril(size - count)
            out[rows] = scaled_dot_product_attention(
                queries[rows].transpose(0, 1)[None],
                keys[slots].transpose(0, 1)[None],
                values[slots].transpose(0, 1)[None],
                attn_mask=mask,
                scale=layer.scaling,
                enable_gqa=True,
            )[0].transpose(0, 1)
            first += count
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
