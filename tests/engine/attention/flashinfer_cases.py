"""Cases of SGLang's FlashInfer backend: its metadata code as it is.

FlashInfer's wrappers have no CPU version: fakes note what they are asked to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from .rig import ORDER, PAGES, OnCpu, Rig, addresses


class Wrapper:
    """Notes what SGLang plans with one of FlashInfer's wrappers."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        self.is_cuda_graph_enabled = options.get("use_cuda_graph", False)
        self._paged_kv_indices_buf = options.get("paged_kv_indices_buffer", options.get("paged_kv_indices_buf"))
        self._custom_mask_buf = None
        self.planned: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def begin_forward(self, *args: Any, **kwargs: Any) -> None:
        copies = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
        self.planned.append((copies, kwargs))


def fast_decode_plan(wrapper: Wrapper, *args: Any, **kwargs: Any) -> None:
    Wrapper.begin_forward(wrapper, *args, **kwargs)


@pytest.fixture
def flashinfer(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import sglang.srt.layers.attention.flashinfer_backend as stock

    monkeypatch.setenv("SGLANG_FLASHINFER_USE_TENSOR_CORE", "true")
    for name in ("Decode", "Prefill"):
        monkeypatch.setattr(stock, f"Batch{name}WithPagedKVCacheWrapper", Wrapper, raising=False)
    monkeypatch.setattr(stock, "BatchPrefillWithRaggedKVCacheWrapper", Wrapper, raising=False)
    monkeypatch.setattr(stock, "fast_decode_plan", fast_decode_plan, raising=False)

    def make(page: int) -> Rig:
        from agentkv_serve.engine.attention.flashinfer import WindowFlashInfer

        rig = Rig(arguments, page)
        rig.backend = WindowFlashInfer(rig.runner, rig.runtime)
        return rig

    with OnCpu():
        yield make


def plan_streams(indptr: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    bounds = indptr.tolist()
    return [indices[low:high].tolist() for low, high in itertools.pairwise(bounds)]


@PAGES
def test_flashinfer_decode_plans_over_windows(flashinfer: Any, page: int) -> None:
    rig = flashinfer(page)
    rig.backend.init_forward_metadata(rig.batch(ForwardMode.DECODE, ORDER))
    (wrapper,) = rig.backend.forward_metadata.decode_wrappers
    ((args, _),) = wrapper.planned
    assert plan_streams(args[0], args[1]) == [rig.window(row).tolist() for row in ORDER]
    assert len(args[1]) == sum(len(rig.window(row)) for row in ORDER)
    assert rig.runtime.plan.slot.tolist() == [2, 0, 1]


@PAGES
def test_flashinfer_graph_decode_plans_windows_on_the_host_too(flashinfer: Any, page: int) -> None:
    rig = flashinfer(page)
    rig.backend.init_cuda_graph_state(max_bs=5, max_num_tokens=5)
    rig.backend.init_forward_metadata_out_graph(rig.batch(ForwardMode.DECODE, [], padded=5), in_capture=True)
    (wrapper,) = rig.backend.decode_cuda_graph_metadata[5]
    buffer = wrapper._paged_kv_indices_buf
    before = addresses(buffer, rig.runtime.plan.slot)
    assert isinstance(wrapper.begin_forward, partial)
    for _ in range(2):
        rig.backend.init_forward_metadata_out_graph(rig.batch(ForwardMode.DECODE, ORDER, padded=2))
        args, options = wrapper.planned[-1]
        expected = [rig.window(row).tolist() for row in ORDER] + [[0], [0]]
        assert plan_streams(args[0], buffer) == expected
        assert options["global_override_indptr_cpu"].tolist() == args[0].tolist()
        assert addresses(buffer, rig.runtime.plan.slot) == before
        assert rig.runtime.plan.slot.tolist() == [2, 0, 1, 0, 0]


@PAGES
@pytest.mark.parametrize("new", [[40, 1, 17], [1, 77, 82]])
@pytest.mark.parametrize("ragged", [True, False])
def test_flashinfer_extend_plans_over_windows(flashinfer: Any, page: int, new: list[int], ragged: bool) -> None:
    rig = flashinfer(page)
    rig.backend.use_paged = not ragged
    batch = rig.batch(ForwardMode.EXTEND, ORDER, new)
    rig.backend.init_forward_metadata(batch)
    metadata = rig.backend.forward_metadata
    assert metadata.use_ragged == ragged and not metadata.extend_no_prefix
    (wrapper,) = metadata.prefill_wrappers
    ((args, _),) = wrapper.planned
    ends = batch.extend_prefix_lens_cpu if ragged else [None] * 3
    expected = [rig.window(row, end).tolist() for row, end in zip(ORDER, ends, strict=True)]
    assert plan_streams(args[1], args[2]) == expected
    assert args[0].diff().tolist() == new  # queries
    assert len(args[2]) >= sum(map(len, expected))
    if ragged:
        ((among, _),) = rig.backend.prefill_wrapper_ragged.planned
        assert among[0].diff().tolist() == among[1].diff().tolist() == new
