"""The query rings: what the samplers say, whether planned on the host or on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentkv_serve.engine.capture import ExtendPiece, capture, capture_step, plan_decode, plan_extend, ring_positions
from agentkv_serve.engine.policies import Policy, Sampler, entry_positions, get_policy
from agentkv_serve.engine.policies.sampler import KEEP_LAST, NO_RING, rings_of
from agentkv_serve.engine.sessions import KvState
from agentkv_serve.engine.state import ModelShape, SessionSlots

LAYERS, HEADS, DIM = 2, 3, 4


def make_slots(slots: int = 3, ring_queries: int = 32, rings: int = 4) -> SessionSlots:
    shape = ModelShape((0, 5), HEADS, 1, DIM, DIM, 0.5, torch.float32, torch.device("cpu"))
    return SessionSlots(shape, rows=8, slots=slots, ring_queries=ring_queries, rings=rings)


def make_runtime(slots: SessionSlots, vocabulary: int) -> Any:
    """The part of the runtime that capture reads. Token v has label v % 6 in every state; the state counts tokens."""
    states = 5
    label = torch.arange(vocabulary).remainder(6).to(torch.int8).expand(states, -1).contiguous()
    following = ((torch.arange(states) + 1) % states).to(torch.int16)[:, None].expand(-1, vocabulary).contiguous()
    return SimpleNamespace(
        slots=slots,
        automata=SimpleNamespace(next=following, label=label),
        backend="torch",
        layer_index={0: 0, 5: 1},
        plan=None,
    )


def prepare(slots: SessionSlots, slot: int, row: int, policy: Policy) -> tuple[int, ...]:
    table = policy.ring_table()
    slots.row_slot[row] = slot
    slots.lay_out(slot, policy.samplers, table)
    return table


def expected_rings(labels: np.ndarray, table: tuple[int, ...]) -> list[int]:
    rings, last = [], 0
    for label in labels:
        last = table[label] if table[label] != KEEP_LAST else last
        rings.append(last)
    return rings


@pytest.mark.parametrize("table", [(0, 1, 2, 3, 0, 0), (0, 1, 2, 3, KEEP_LAST, KEEP_LAST), (0, NO_RING, 1, 0, -1, 0)])
@pytest.mark.parametrize("length", [1, 2, 63, 500])
def test_rings_follow_the_table_and_sticky_labels_the_token_before(table: tuple[int, ...], length: int) -> None:
    labels = np.random.default_rng(length).integers(0, 6, length).astype(np.int8)
    assert rings_of(labels, table, 0).tolist() == expected_rings(labels, table)


@pytest.mark.parametrize("name", ["agentkv", "agentkv_paper", "agentkv_plus", "recent", "actkv", "streamingllm"])
@pytest.mark.parametrize("steps", [(40,), (1, 1, 1), (3, 200, 1, 1, 17, 1), (*[1] * 90, 5, *[1] * 40)])
@pytest.mark.parametrize("unseen", [0, 29])
@pytest.mark.parametrize("together", [False, True])
def test_rings_hold_what_the_samplers_say(name: str, steps: tuple[int, ...], unseen: int, together: bool) -> None:
    """Prompt chunks are planned on the host, single tokens on the device; both must agree with `entry_positions`."""
    policy = get_policy(name)
    slots = make_slots(ring_queries=policy.ring_queries, rings=len(policy.samplers))
    slot, row = slots.take(), 2
    assert slot is not None
    table = prepare(slots, slot, row, policy)
    runtime = make_runtime(slots, vocabulary=60)
    generator = np.random.default_rng(len(steps))
    tokens = generator.integers(0, 60, unseen + sum(steps))
    labels = (tokens % 6).astype(np.int8)
    queries = torch.from_numpy(generator.standard_normal((len(tokens), HEADS, DIM))).float()
    done = unseen
    for index, count in enumerate(steps):
        part = slice(done, done + count)
        if count == 1 and index:  # a turn begins with an extend
            runtime.plan = plan_decode(runtime, torch.tensor([row]), torch.from_numpy(tokens[part]))
        else:
            rings = rings_of(labels[: done + count], table)
            rings[:unseen] = NO_RING
            runtime.plan = plan_extend(slots, [ExtendPiece(slot, 0, done, rings, policy.samplers)])
        held: list[torch.Tensor] = []
        for layer_id in (0, 5):
            if together and runtime.plan and runtime.plan.source is None:
                capture_step(runtime, held, queries[part] * (1 + layer_id))
            else:
                capture(runtime, layer_id, queries[part] * (1 + layer_id))
        done += count
    where = entry_positions(labels, policy.samplers, table, unseen)
    assert (
        len(where) == policy.ring_queries
        and (where < len(tokens)).all()
        and not ((where >= 0) & (where < unseen)).any()
    )
    for layer, factor in ((0, 1), (1, 6)):
        for entry, position in enumerate(where):
            if position >= 0:
                assert torch.equal(slots.ring[slot, layer, 0, entry], queries[position] * factor)


def test_pieces_of_several_sessions_are_planned_together() -> None:
    policy = get_policy("agentkv")
    slots = make_slots()
    first, second = slots.take(), slots.take()
    assert first is not None and second is not None
    tables = [prepare(slots, slot, row, policy) for slot, row in ((first, 2), (second, 5))]
    labels = np.array([0, 1, 1, 2, 3, 3], dtype=np.int8)
    pieces = [
        ExtendPiece(first, 0, 2, rings_of(labels[:4], tables[0]), policy.samplers),
        ExtendPiece(second, 2, 0, rings_of(labels, tables[1]), policy.samplers),
    ]
    runtime = make_runtime(slots, vocabulary=60)
    runtime.plan = plan_extend(slots, pieces)
    queries = torch.randn(8, HEADS, DIM)
    capture(runtime, 0, queries)
    assert torch.equal(slots.ring[first, 0, 0, [9, 16]], queries[:2])  # second think, first act
    assert torch.equal(slots.ring[second, 0, 0, [0, 8, 9, 16, 24, 25]], queries[2:])
    assert slots.written[second].tolist() == [1, 2, 1, 2]


def test_positions_of_a_session_s_rings() -> None:
    """Old tokens count as they were captured, whatever the request calls them now; launched ones hide older ones."""
    policy = get_policy("recent", queries_per_phase=4)
    runtime: Any = SimpleNamespace(policies={"recent": policy}, config=SimpleNamespace(say_phase="others"))
    state = KvState(row=1, slot=1, policy="recent", uncaptured=2)
    labels = np.zeros(9, dtype=np.int8)
    assert sorted(ring_positions(runtime, state, labels[:5], 5)) == [-1, 2, 3, 4]
    assert sorted(ring_positions(runtime, state, labels, 9)) == [5, 6, 7, 8]
    assert sorted(ring_positions(runtime, state, labels, 8)) == [-1, 5, 6, 7]
    state.labels = np.array([0, 1, 1, 1], dtype=np.int8)
    assert state.captured_labels(labels).tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 0]


def test_labels_without_a_sampler_are_not_kept() -> None:
    slots = make_slots()
    slots.lay_out(1, (Sampler(8), Sampler(4, 4, 2)), (0, 1, 2, 3, NO_RING, KEEP_LAST))
    assert slots.table[1].tolist() == [0, 1, NO_RING, NO_RING, NO_RING, KEEP_LAST]
    assert slots.layout[1, :2].tolist() == [[0, 8, 1, 1 << 40], [8, 4, 4, 2]]


def test_rows_without_a_session_write_only_to_the_dummy_slot() -> None:
    slots = make_slots()
    runtime = make_runtime(slots, vocabulary=60)
    slot = slots.take()
    assert slot is not None
    prepare(slots, slot, 2, get_policy("agentkv"))
    runtime.plan = plan_decode(runtime, torch.tensor([4, 2, 5]), torch.tensor([7, 7, 7]))
    capture(runtime, 0, torch.ones(3, HEADS, DIM))
    assert slots.written[slot].sum() == 1
    others = [number for number in range(1, slots.ring.shape[0]) if number != slot]
    assert not slots.ring[others].any() and not slots.written[others].any()


def test_a_token_beyond_the_vocabulary_counts_as_the_last_one() -> None:
    slots = make_slots()
    runtime = make_runtime(slots, vocabulary=6)
    slot = slots.take()
    assert slot is not None
    prepare(slots, slot, 2, get_policy("agentkv"))
    plan_decode(runtime, torch.tensor([2]), torch.tensor([999]))
    assert slots.written[slot].sum() == 1


def test_a_slot_is_taken_empty_and_can_be_given_back() -> None:
    slots = make_slots(slots=2)
    first, second = slots.take(), slots.take()
    assert {first, second} == {1, 2} and slots.take() is None
    assert first is not None
    slots.written[first] = 9
    copy = slots.copy_rings(first)
    slots.ring[first] = 5.0
    slots.written[first] = 11
    slots.restore_rings(first, copy)
    assert not slots.ring[first].any() and (slots.written[first] == 9).all()
    slots.give_back(first)
    assert slots.take() == first
    assert not slots.written[first].any()
    assert slots.nbytes > slots.ring.numel() * 4
