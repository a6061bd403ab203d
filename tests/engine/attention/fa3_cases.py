"""Cases of SGLang's FlashAttention backend: its metadata code as it is.

FlashAttention has no CPU version: a fake notes what it is asked to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from .rig import ORDER, PAGES, Rig, addresses


@pytest.fixture
def fa3(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    kernels = ModuleType("sgl_kernel")
    kernels.merge_state_v2 = None  # type: ignore[attr-defined]
    attention = ModuleType("sgl_kernel.flash_attn")
    asked: list[dict[str, Any]] = []
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(attention, name, None)

    def schedule(**options: Any) -> torch.Tensor:
        asked.append({**options, "cache_seqlens": options["cache_seqlens"].tolist()})
        return torch.zeros(5, dtype=torch.int32)

    attention.get_scheduler_metadata = schedule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", kernels)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", attention)

    def make(page: int) -> Rig:
        from agentkv_serve.engine.attention import fa3 as ours

        monkeypatch.setattr(ours, "get_device_capability", lambda: (9, 0))
        rig = Rig(arguments, page)
        rig.backend = ours.WindowFlashAttention(rig.runner, rig.runtime)
        rig.backend.asked = asked
        return rig

    yield make


def table_slots(rig: Rig, metadata: Any, index: int) -> list[int]:
    """Pool slots that FlashAttention reads for one request: its pages, cut to its key count."""
    pages = metadata.page_table[index].to(torch.int64)
    slots = (pages[:, None] * rig.page + torch.arange(rig.page)).flatten()
    return slots[: int(metadata.cache_seqlens_int32[index])].tolist()


@PAGES
@pytest.mark.parametrize(
    ("mode", "new"),
    [(ForwardMode.DECODE, None), (ForwardMode.EXTEND, [40, 1, 17]), (ForwardMode.EXTEND, [1, 77, 82])],
)
def test_fa3_tables_begin_at_windows(fa3: Any, page: int, mode: ForwardMode, new: list[int] | None) -> None:
    rig = fa3(page)
    batch = rig.batch(mode, ORDER, new)
    rig.backend.init_forward_metadata(batch)
    metadata = rig.backend.forward_metadata
    assert [table_slots(rig, metadata, i) for i in range(3)] == [rig.window(row).tolist() for row in ORDER]
    assert metadata.cache_seqlens_int32.dtype == metadata.page_table.dtype == metadata.cu_seqlens_k.dtype == torch.int32
    assert metadata.cu_seqlens_k.diff().tolist() == metadata.cache_seqlens_int32.tolist()
    assert metadata.cu_seqlens_q.diff().tolist() == batch.extend_seq_lens_cpu
    assert metadata.max_seq_len_k >= max(metadata.cache_seqlens_int32)
    if mode.is_decode():
        assert rig.backend.asked[-1]["cache_seqlens"] == metadata.cache_seqlens_int32.tolist()


def test_fa3_without_prefixes_queries_stay_whole(fa3: Any) -> None:
    rig = fa3(16)
    batch = rig.batch(ForwardMode.EXTEND, [4], [77])
    rig.backend.init_forward_metadata(batch)
    assert rig.backend.forward_metadata.cu_seqlens_q.tolist() == [0, 77]
    assert table_slots(rig, rig.backend.forward_metadata, 0) == rig.window(4).tolist()


@PAGES
def test_fa3_graph_decode_refills_the_same_tables(fa3: Any, page: int) -> None:
    rig = fa3(page)
    rig.backend.init_cuda_graph_state(max_bs=5, max_num_tokens=5)
    rig.backend.init_forward_metadata_out_graph(rig.batch(ForwardMode.DECODE, [], padded=5), in_capture=True)
    metadata = rig.backend.forward_metadata
    before = addresses(metadata.page_table, metadata.cache_seqlens_int32, metadata.cu_seqlens_k, rig.runtime.plan.slot)
    for _ in range(2):
        rig.backend.init_forward_metadata_out_graph(rig.batch(ForwardMode.DECODE, ORDER, padded=2))
        assert rig.backend.forward_metadata is metadata
        expected = [rig.window(row).tolist() for row in ORDER] + [[0], [0]]
        assert [table_slots(rig, metadata, i) for i in range(5)] == expected
        assert metadata.cu_seqlens_k.diff().tolist() == [len(slots) for slots in expected]
        # FlashAttention's schedule is computed from the windows, not from the logical lengths.
        assert rig.backend.asked[-1]["cache_seqlens"] == [len(slots) for slots in expected]
        assert before == addresses(
            metadata.page_table, metadata.cache_seqlens_int32, metadata.cu_seqlens_k, rig.runtime.plan.slot
        )
