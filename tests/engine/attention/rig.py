"""What the cases of the attention backends share: a model runner's pools on a CPU, and batches over them.

Pools and index translation are SGLang's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
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

sys.path.append(str(Path(__file__).parents[2] / "models"))
from tiny_models import write_model

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


def server_arguments(folder: Path) -> Any:
    """The published arguments of a server on a tiny model, which is written to `folder`."""
    args = prepare_server_args(
        [
            *("--model-path", str(write_model(folder / "llama", "llama-gqa")), "--device", "cpu"),
            *("--attention-backend", "torch_native", "--dtype", "float32"),
        ]
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


def addresses(*tensors: torch.Tensor) -> list[int]:
    """Where tensors lie: a recorded graph goes on reading there."""
    return [tensor.data_ptr() for tensor in tensors]
