"""One session's life through the engine's own planning, capture and compaction, without SGLang's scheduler or server.

The model is a tiny Hugging Face one whose attention step is ours: keys and values lie in a paged pool behind a
req_to_token row, as in the engine, and a turn's forwards are planned and settled by `forward` and `progress`. Only the
allocator, the tree and the batch objects are stand-ins, with the few fields that those functions read.
"""

from __future__ import annotations

import sys
import warnings
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "e2e"), str(TESTS / "models")]
from oracle import load_model  # noqa: E402
from oracle.model import forward as run_model  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang's modules warn of what a CPU does not have
    from agentkv_serve.engine import forward, progress
from agentkv_serve.engine.automata import AutomatonBank  # noqa: E402
from agentkv_serve.engine.capture import capture, plan_decode  # noqa: E402
from agentkv_serve.engine.config import EngineConfig  # noqa: E402
from agentkv_serve.engine.policies import AutoBudget, Policy, Rope  # noqa: E402
from agentkv_serve.engine.runtime import Runtime  # noqa: E402
from agentkv_serve.engine.sessions import SessionTable  # noqa: E402
from agentkv_serve.engine.state import ModelShape, SessionSlots  # noqa: E402
from agentkv_serve.engine.turn import ATTRIBUTE, Turn  # noqa: E402
from agentkv_serve.engine.wire import TurnSpec  # noqa: E402

ROW, POOL, CONTEXT = 1, 4096, 4096


class Allocator:
    """Slots of the pool, one token a page."""

    page_size = 1
    free_group: Any = None

    def __init__(self) -> None:
        self.slots = list(range(POOL - 1, 0, -1))

    def alloc(self, count: int) -> Tensor:
        return torch.tensor([self.slots.pop() for _ in range(count)])

    def free(self, slots: Tensor) -> None:
        returned = slots.tolist()
        assert not set(returned) & set(self.slots), "a slot was freed twice"
        self.slots += returned

    def available_size(self) -> int:
        return len(self.slots)


class MiniEngine:
    """A session `key` on a model folder. `play` runs turns; `kept` notes what each compaction kept."""

    def __init__(self, folder: Path, policy: Policy, auto: AutoBudget | None = None, key: str = "ab" * 16) -> None:
        self.model = load_model(folder)
        config = self.model.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        layers = config.num_hidden_layers
        cpu = torch.device("cpu")
        shape = ModelShape(tuple(range(layers)), heads, kv_heads, dim, dim, dim**-0.5, torch.float32, cpu)
        self.keys, self.values = (
            [torch.full((POOL, kv_heads, dim), torch.nan) for _ in range(layers)] for _ in range(2)
        )
        self.allocator = Allocator()
        self.runtime = Runtime(
            config=EngineConfig(),
            shape=shape,
            slots=SessionSlots(shape, rows=4, slots=2, ring_queries=policy.ring_queries, rings=len(policy.samplers)),
            sessions=SessionTable(3600.0),
            automata=AutomatonBank(transformers.AutoTokenizer.from_pretrained(folder), cpu),
            layer_index={layer: layer for layer in range(layers)},
            kv_pool=SimpleNamespace(get_key_buffer=self.keys.__getitem__, get_value_buffer=self.values.__getitem__),
            req_to_token=torch.zeros(4, CONTEXT, dtype=torch.int32),
            backend="torch",
            policies={policy.name: policy},
            rope=Rope.from_config(config),
            auto=auto or AutoBudget(),
        )
        self.session = SimpleNamespace(slots={}, borrowed_slot=lambda _: None)
        self.runtime.tree = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator, page_size=1, session=self.session, evictable_size=lambda: 0,
            checkpoint=lambda *_, **__: None,
        )  # fmt: skip
        self.runtime.scheduler = SimpleNamespace(enable_overlap=False, chunked_req=None, max_total_num_tokens=POOL)
        self.policy, self.key = policy, key
        self.kv = SimpleNamespace(
            req_pool_idx=ROW, kv_committed_len=0, cache_protected_len=0, cache_inserted_len=0, holds_kv=True
        )
        self.kept: list[tuple[int, Tensor]] = []
        self.logits = torch.empty(0)
        self.epoch = 0

    @property
    def held(self) -> int:
        return self.kv.kv_committed_len - self.runtime.start_of(self.kv)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The model's attention step: query [Hq, T, D], key and value [Hkv, T, D] -> [T, Hq, D]."""
        capture(self.runtime, layer, query.transpose(0, 1))
        row, end = self.runtime.req_to_token[ROW], self.kv.kv_committed_len
        self.keys[layer][row[end - key.shape[1] : end].long()] = key.transpose(0, 1)
        self.values[layer][row[end - key.shape[1] : end].long()] = value.transpose(0, 1)
        window = row[int(self.runtime.slots.start[ROW]) : end].long()
        held_keys, held_values = (pool[layer][window].transpose(0, 1) for pool in (self.keys, self.values))
        new, size, group = query.shape[1], len(window), query.shape[0] // key.shape[0]
        hidden = torch.ones(new, size, dtype=torch.bool).triu(size - new + 1)
        logits = query @ held_keys.repeat_interleave(group, 0).transpose(1, 2) * scale
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ held_values.repeat_interleave(group, 0)).transpose(0, 1)

    def play(
        self,
        ids: list[int],
        labels: list[int],
        max_tokens: int,
        budget: int,
        *,
        chunk: int = 256,
        family: str = "qwen3",
        initial: str = "start",
        auto: bool = False,
        given: tuple[int, ...] = (),
    ) -> list[int]:
        """One turn: the whole conversation in, greedy tokens out. Compactions are noted in `kept`."""
        spec = TurnSpec(
            self.key, self.epoch, budget, self.policy.name, np.array(labels, np.int8), family, initial, auto=auto
        )
        self.epoch += 1
        record = self.runtime.sessions.admit(spec)
        turn = Turn(spec, self.policy, array("q", ids), self.runtime.automata.initial(family, initial))
        turn.state = "resumed" if record.kv is not None else "new"
        self.req = SimpleNamespace(
            kv=self.kv, output_ids=[], rid="r", is_retracted=False, finished_reason=None, done=False, lock=None
        )
        self.req.finished = lambda: self.req.done
        setattr(self.req, ATTRIBUTE, turn)
        record.running = "r"
        for first in range(self.kv.kv_committed_len, len(ids), chunk):
            self._step(ids[first : first + chunk], first, extends=True)
        while True:
            number = len(self.req.output_ids)
            token = given[number] if number < len(given) else int(self.logits.argmax())
            self.req.output_ids.append(token)
            if len(self.req.output_ids) == max_tokens:
                break
            self._step([token], self.kv.kv_committed_len, extends=False)
        self.req.done = True
        self.session.slots = {self.key: SimpleNamespace(kv=self.kv, lock=None)}
        before = self._compactions()
        progress.finish_turns(self.runtime, [self.req])
        self._note(before)
        self.facts = turn.facts
        return list(self.req.output_ids)

    def _step(self, ids: list[int], first: int, *, extends: bool) -> None:
        runtime, end = self.runtime, first + len(ids)
        runtime.req_to_token[ROW, first:end] = self.allocator.alloc(len(ids)).int()
        self.kv.kv_committed_len = end
        mode = SimpleNamespace(is_decode=lambda: not extends)
        batch = SimpleNamespace(reqs=[self.req], extend_lens=[len(ids)], prefix_lens=[first], forward_mode=mode)
        forward.plan_forward(runtime, batch, extends)
        if not extends:
            runtime.plan = plan_decode(runtime, torch.tensor([ROW]), torch.tensor(ids))
        self.logits = run_model(self.model, ids, first, self)
        before = self._compactions()
        progress.after_step(runtime, batch)
        self._note(before)

    def _compactions(self) -> int:
        return len(self.runtime.sessions.get(self.key).compactions)  # type: ignore[union-attr]

    def _note(self, before: int) -> None:
        record = self.runtime.sessions.get(self.key)
        assert record is not None
        if len(record.compactions) > before:
            assert record.kv is not None and record.kv.kept is not None
            self.kept.append((record.compactions[-1].length, record.kv.kept.clone()))
        assert len(self.allocator.slots) == POOL - 1 - self.held
