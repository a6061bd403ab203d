"""Cases of test_attention.py, run in a process of their own: SGLang's backends as they are, on a CPU.

Pools, index translation, metadata code and Triton kernels (in the interpreter) are SGLang's; what has no CPU version
(FlashInfer's wrappers, FlashAttention) is a fake that notes what it is asked to do.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch.overrides import TorchFunctionMode

sys.path.append(str(Path(__file__).parents[1] / "models"))
from tiny_models import write_model

from agentkv_serve.engine.attention.window import WindowBackend
from agentkv_serve.engine.policies import get_policy
from agentkv_serve.engine.state import ModelShape, SessionSlots

CONTEXT, ROWS, LAYERS, KV_HEADS, GROUP, DIM = 512, 6, 2, 2, 2, 16
PAGES = pytest.mark.parametrize("page", [1, 16])
# Row: (window start, length). Row 4 is not compressed.
STATE = {3: (48, 130), 4: (0, 77), 5: (208, 333)}
ORDER = [5, 4, 3]


class OnCpu(TorchFunctionMode):
    """Buffers that SGLang allocates by name on "cuda" are made here."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@pytest.fixture(scope="session")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The published arguments of a server on a tiny model."""
    folder = write_model(tmp_path_factory.mktemp("model") / "llama", "llama-gqa")
    args = prepare_server_args(
        ["--model-path", str(folder), "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
    )
    publish(args, role="test", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    return args


@dataclass
class Rig:
    """A model runner's pools with rows in them, and a batch over these."""

    arguments: Any
    page: int
    backend: Any = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def __post_init__(self) -> None:
        size = 2048
        self.rows = ReqToTokenPool(ROWS - 1, CONTEXT, "cpu", enable_memory_saver=False)
        self.pool = MHATokenToKVPool(
            size, self.page, torch.float32, KV_HEADS, DIM, LAYERS, "cpu", enable_memory_saver=False
        )
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.normal_(generator=self.generator)
        allocator = TokenToKVPoolAllocator(size, torch.float32, "cpu", self.pool, need_sort=False)
        self.table = self.rows.req_to_token
        pages = 1 + torch.randperm(size // self.page - 1, generator=self.generator)
        for number, (row, (start, _)) in enumerate(STATE.items()):
            own = pages[number * CONTEXT // self.page : (number + 1) * CONTEXT // self.page]
            slots = (own[:, None] * self.page + torch.arange(self.page)).flatten()
            self.table[row] = slots[:CONTEXT].to(torch.int32)
            self.table[row, :start] = 0
        model_config = ModelConfig.from_server_args(self.arguments)
        assert model_config.head_dim == DIM
        self.runner = SimpleNamespace(
            req_to_token_pool=self.rows,
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=allocator,
            kv_index_translator=KVIndexTranslator(
                req_to_token=self.table,
                token_to_kv_pool_allocator=allocator,
                token_to_kv_pool=self.pool,
                page_size=self.page,
                device="cpu",
            ),
            page_size=self.page,
            model_config=model_config,
            server_args=self.arguments,
            sliding_window_size=None,
            device="cpu",
            gpu_id=0,
            dtype=torch.float32,
            kv_cache_dtype=torch.float32,
            kv_cache_dtype_str="auto",
            is_draft_worker=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            decode_num_tokens_per_req=lambda: 1,
            prefill_attention_backend_str="flashinfer",
            decode_attention_backend_str="flashinfer",
            init_new_workspace=False,
        )
        shape = ModelShape(
            tuple(range(LAYERS)), KV_HEADS * GROUP, KV_HEADS, DIM, DIM, DIM**-0.5, torch.float32, torch.device("cpu")
        )
        slots = SessionSlots(shape, rows=ROWS, slots=3, ring_queries=32)
        for row, (start, _) in STATE.items():
            slots.start[row] = start
        vocabulary, states = 60, 5
        following = ((torch.arange(states) + 1) % states).to(torch.int16)[:, None].expand(-1, vocabulary).contiguous()
        self.runtime: Any = SimpleNamespace(
            slots=slots,
            shape=shape,
            automata=SimpleNamespace(next=following, label=torch.zeros(states, vocabulary, dtype=torch.int8)),
            backend="torch",
            layer_index={layer: layer for layer in range(LAYERS)},
            plan=None,
            starts=[],
        )
        policy = get_policy("agentkv")
        for row, slot in ((3, 1), (5, 2)):
            slots.row_slot[row] = slot
            slots.lay_out(slot, policy.samplers, policy.ring_table())

    def window(self, row: int, end: int | None = None) -> torch.Tensor:
        """Pool slots that row `row` reads up to position `end`."""
        start, length = STATE[row]
        return self.table[row, start : length if end is None else end].to(torch.int64)

    def batch(self, mode: ForwardMode, rows: list[int], new: list[int] | None = None, padded: int = 0) -> Any:
        """A forward batch over whole rows, as SGLang makes it: logical lengths; padded rows are row 0, length 1."""
        lengths = torch.tensor([STATE[row][1] for row in rows] + [1] * padded)
        counts = [1] * len(lengths) if new is None else new
        prefixes = [int(length) - count for length, count in zip(lengths, counts, strict=True)]
        indices = torch.tensor(rows + [0] * padded)
        places = [self.table[row, at:length] for row, at, length in zip(indices, prefixes, lengths, strict=True)]
        self.runtime.starts = [STATE[row][0] for row in rows]
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(lengths),
            req_pool_indices=indices,
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            seq_lens_sum=int(lengths.sum()),
            extend_prefix_lens=torch.tensor(prefixes),
            extend_prefix_lens_cpu=prefixes,
            extend_seq_lens=torch.tensor(counts),
            extend_seq_lens_cpu=counts,
            extend_num_tokens=sum(counts),
            input_ids=torch.arange(sum(counts)) % 60,
            positions=torch.arange(sum(counts)),
            out_cache_loc=torch.cat(places).to(torch.int64),
            out_cache_loc_is_physical=True,
            spec_info=None,
            encoder_lens=None,
            cross_attention_custom_mask=None,
            mha_one_shot=False,
            attn_attend_prefix_cache=None,
            multi_item_delimiter_indices=None,
        )
        batch.kv_loc_plan = self.runner.kv_index_translator.own_plan(batch)
        return batch

    def tensors(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, Hq * D], keys and values [T, Hkv, D] of new tokens."""
        q = torch.randn(tokens, KV_HEADS * GROUP * DIM, generator=self.generator)
        k, v = (torch.randn(tokens, KV_HEADS, DIM, generator=self.generator) for _ in range(2))
        return q, k, v

    def dense(self, batch: Any, rows: list[int], q: torch.Tensor, layer: int) -> torch.Tensor:
        """[T, Hq * D]: causal attention over the windows, straight from the pool (new tokens are in it)."""
        keys, values = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
        out, first = [], 0
        for row, count in zip(rows, batch.extend_seq_lens_cpu, strict=False):
            slots = self.window(row)
            query = q[first : first + count].view(count, -1, DIM).transpose(0, 1)
            k, v = (buffer[slots].transpose(0, 1).repeat_interleave(GROUP, 0) for buffer in (keys, values))
            logits = query @ k.transpose(1, 2) * DIM**-0.5
            future = torch.ones(count, len(slots), dtype=torch.bool).triu(len(slots) - count + 1)
            mass = logits.masked_fill(future, float("-inf")).softmax(-1)
            out.append((mass @ v).transpose(0, 1).reshape(count, -1))
            first += count
        return torch.cat(out)


def layer_of(number: int) -> Any:
    """What an attention backend reads of a layer."""
    return SimpleNamespace(
        layer_id=number,
        tp_q_head_num=KV_HEADS * GROUP,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        head_dim=DIM,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=DIM**-0.5,
        logit_cap=0.0,
        logit_capping_method="tanh",
        sliding_window_size=-1,
        is_cross_attention=False,
        attn_type=None,
        k_scale=None,
        v_scale=None,
        k_scale_float=None,
        v_scale_float=None,
        xai_temperature_len=-1,
    )


def check_capture(rig: Rig, batch: Any, q: torch.Tensor) -> None:
    """A decode step's queries are in the rings of its sessions, and the dummy slot is nobody's."""
    plan = rig.runtime.plan
    expected = [2, 0, 1] + [0] * (batch.batch_size - len(ORDER))
    assert plan.slot.tolist() == expected[: batch.batch_size]
    ring = rig.runtime.slots.ring
    for index, slot in enumerate(plan.slot.tolist()):
        if slot:
            held = ring[slot, 0, 0, plan.place[index]]
            assert torch.equal(held.flatten(), q[index])
    assert rig.runtime.slots.written[1].sum() == rig.runtime.slots.written[2].sum() > 0


# --- Triton ---------------------------------------------------------------------------------------------------------


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


def addresses(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


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


# --- FlashInfer -----------------------------------------------------------------------------------------------------


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


# --- FlashAttention 3 -----------------------------------------------------------------------------------------------


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


def test_every_backend_of_ours_captures_queries() -> None:
    import pkgutil

    from agentkv_serve.engine.build import BACKENDS

    for name in ("triton", "flashinfer"):
        assert issubclass(pkgutil.resolve_name(BACKENDS[name]), WindowBackend)
