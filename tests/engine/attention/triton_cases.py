"""Cases of SGLang's Triton backend: its metadata code as it is, and its kernels, in the interpreter on a CPU."""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from agentkv_serve.engine.attention.window import WindowBackend
from agentkv_serve.engine.build import BACKENDS

from .rig import ORDER, PAGES, Rig, addresses, check_capture, layer_of


def triton(arguments: Any, page: int) -> Rig:
    from agentkv_serve.engine.attention.triton import WindowTriton

    rig = Rig(arguments, page)
    rig.backend = WindowTriton(rig.runner, rig.runtime)
    return rig


def streams(metadata: Any, count: int) -> list[list[int]]:
    bounds = metadata.kv_indptr.tolist()
    return [metadata.kv_indices[bounds[i] : bounds[i + 1]].tolist() for i in range(count)]


@PAGES
def test_triton_decode_reads_windows_and_captures(arguments: Any, page: int) -> None:
    rig = triton(arguments, page)
    batch = rig.batch(ForwardMode.DECODE, ORDER)
    rig.backend.init_forward_metadata(batch)
    metadata = rig.backend.forward_metadata
    assert streams(metadata, 3) == [rig.window(row).tolist() for row in ORDER]
    q, k, v = rig.tensors(3)
    got = rig.backend.forward_decode(q, k, v, layer_of(0), batch)
    assert torch.equal(rig.pool.get_key_buffer(0)[batch.out_cache_loc], k)
    torch.testing.assert_close(got, rig.dense(batch, ORDER, q, 0), atol=1e-5, rtol=1e-4)
    check_capture(rig, batch, q)


@PAGES
@pytest.mark.parametrize("new", [[40, 1, 17], [1, 77, 82]])
def test_triton_extend_reads_the_prefix_window_and_the_new_tokens(arguments: Any, page: int, new: list[int]) -> None:
    rig = triton(arguments, page)
    batch = rig.batch(ForwardMode.EXTEND, ORDER, new)
    rig.backend.init_forward_metadata(batch)
    prefixes = batch.extend_prefix_lens_cpu
    assert streams(rig.backend.forward_metadata, 3) == [
        rig.window(row, end).tolist() for row, end in zip(ORDER, prefixes, strict=True)
    ]
    q, k, v = rig.tensors(sum(new))
    got = rig.backend.forward_extend(q, k, v, layer_of(1), batch)
    torch.testing.assert_close(got, rig.dense(batch, ORDER, q, 1), atol=1e-5, rtol=1e-4)


@PAGES
def test_triton_graph_decode_refills_the_same_buffers(arguments: Any, page: int) -> None:
    rig = triton(arguments, page)
    rig.backend.init_cuda_graph_state(max_bs=5, max_num_tokens=5)
    empty = rig.batch(ForwardMode.DECODE, [], padded=5)
    rig.backend.init_forward_metadata_out_graph(empty, in_capture=True)
    metadata, plan = rig.backend.forward_metadata, rig.runtime.plan

    def recorded() -> list[int]:
        """Everything that the recorded kernels read."""
        return addresses(
            metadata.kv_indptr, metadata.kv_indices, metadata.num_kv_splits, metadata.attn_logits, metadata.attn_lse,
            plan.slot, plan.place, plan.zero, rig.runtime.slots.ring,
        )  # fmt: skip

    at_capture = recorded()
    assert not plan.slot.any()
    for step in range(2):
        batch = rig.batch(ForwardMode.DECODE, ORDER, padded=2)
        rig.backend.init_forward_metadata_out_graph(batch)
        assert recorded() == at_capture
        assert addresses(rig.runtime.plan.slot, rig.runtime.plan.place) == addresses(plan.slot, plan.place)
        assert streams(metadata, 5) == [rig.window(row).tolist() for row in ORDER] + [[0], [0]]
        assert plan.slot.tolist() == [2, 0, 1, 0, 0]
        assert rig.runtime.slots.written[1].sum() == step + 1
    # What the graph would run, over the recorded metadata.
    q, k, v = rig.tensors(5)
    got = rig.backend.forward_decode(q, k, v, layer_of(0), batch)
    torch.testing.assert_close(got[:3], rig.dense(batch, ORDER, q, 0), atol=1e-5, rtol=1e-4)


def test_triton_splits_a_row_by_the_keys_it_reads(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    rig = triton(arguments, 1)
    seen: list[list[int]] = []
    monkeypatch.setattr(
        TritonAttnBackend, "get_num_kv_splits", lambda self, splits, lengths, uneven=None: seen.append(lengths.tolist())
    )
    rig.backend.init_forward_metadata(rig.batch(ForwardMode.DECODE, ORDER))
    rig.backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    rig.backend.init_forward_metadata_out_graph(rig.batch(ForwardMode.DECODE, ORDER, padded=1), in_capture=True)
    lengths = [len(rig.window(row)) for row in ORDER]
    assert seen == [lengths, [*lengths, 1]]


def test_every_backend_of_ours_captures_queries() -> None:
    for name in ("triton", "flashinfer"):
        assert issubclass(pkgutil.resolve_name(BACKENDS[name]), WindowBackend)
