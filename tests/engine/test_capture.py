"""The query rings: newest queries of each phase, whether planned on the host or on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentkv_serve.engine.capture import ExtendPiece, capture, plan_decode, plan_extend, rings_of
from agentkv_serve.engine.policies import get_policy
from agentkv_serve.engine.policies.base import KEEP_LAST
from agentkv_serve.engine.state import ModelShape, SessionSlots

LAYERS, HEADS, DIM = 2, 3, 4


def make_slots(slots: int = 3, ring_queries: int = 32) -> SessionSlots:
    shape = ModelShape((0, 5), HEADS, 1, DIM, DIM, 0.5, torch.float32, torch.device("cpu"))
    return SessionSlots(shape, rows=8, slots=slots, ring_queries=ring_queries)


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


def prepare(slots: SessionSlots, slot: int, row: int, policy_name: str) -> tuple[int, ...]:
    policy = get_policy(policy_name)
    table = policy.ring_table()
    slots.row_slot[row] = slot
    slots.table[slot] = torch.tensor(table)
    slots.capacity[slot] = policy.ring_capacity
    return table


def expected_rings(labels: np.ndarray, table: tuple[int, ...]) -> list[int]:
    rings, last = [], 0
    for label in labels:
        last = table[label] if table[label] != KEEP_LAST else last
        rings.append(last)
    return rings


@pytest.mark.parametrize("table", [(0, 1, 2, 3, 0, 0), (0, 1, 2, 3, KEEP_LAST, KEEP_LAST)])
@pytest.mark.parametrize("length", [1, 2, 63, 500])
def test_rings_follow_the_table_and_sticky_labels_the_token_before(table: tuple[int, ...], length: int) -> None:
    labels = np.random.default_rng(length).integers(0, 6, length).astype(np.int8)
    assert rings_of(labels, table, 0).tolist() == expected_rings(labels, table)


@pytest.mark.parametrize("policy", ["agentkv", "agentkv_paper"])
@pytest.mark.parametrize("steps", [(40,), (1, 1, 1), (3, 200, 1, 1, 17, 1)])
def test_rings_hold_the_newest_queries_of_each_phase(policy: str, steps: tuple[int, ...]) -> None:
    """Prompt chunks are planned on the host, single tokens on the device; together they must be one FIFO per phase."""
    slots = make_slots()
    slot, row = slots.take(), 2
    assert slot is not None
    table = prepare(slots, slot, row, policy)
    capacity = get_policy(policy).ring_capacity
    runtime = make_runtime(slots, vocabulary=60)
    generator = np.random.default_rng(len(steps))
    tokens = generator.integers(0, 60, sum(steps))
    labels = (tokens % 6).astype(np.int8)
    queries = torch.from_numpy(generator.standard_normal((len(tokens), HEADS, DIM))).float()
    done = 0
    for count in steps:
        part = slice(done, done + count)
        if count == 1:
            runtime.plan = plan_decode(runtime, torch.tensor([row]), torch.from_numpy(tokens[part]))
        else:
            last = int(slots.last_ring[slot])
            runtime.plan = plan_extend(slots, [ExtendPiece(slot, 0, labels[part], table, capacity, last)])
        for layer_id in (0, 5):
            capture(runtime, layer_id, queries[part] * (1 + layer_id))
        done += count
    rings = np.array(expected_rings(labels, table))
    valid = slots.valid_queries(slot, capacity, 4).numpy()
    for ring in range(4):
        newest = np.flatnonzero(rings == ring)[-capacity:]
        entries = slots.ring[slot, :, 0, ring * capacity : (ring + 1) * capacity]
        assert valid[ring * capacity : (ring + 1) * capacity].sum() == len(newest)
        for layer, factor in ((0, 1), (1, 6)):
            held = {tuple(row.flatten().tolist()) for row in entries[layer, : len(newest)]}
            assert held == {tuple((queries[index] * factor).flatten().tolist()) for index in newest}


def test_rows_without_a_session_write_only_to_the_dummy_slot() -> None:
    slots = make_slots()
    runtime = make_runtime(slots, vocabulary=60)
    slot = slots.take()
    assert slot is not None
    prepare(slots, slot, 2, "agentkv")
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
    prepare(slots, slot, 2, "agentkv")
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
