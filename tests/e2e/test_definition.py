"""The independent replay checked by itself, before the server is measured against it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from oracle import (
    Replay,
    Rings,
    Settings,
    agentkv_scores,
    dense,
    keep_set,
    load_model,
    prefill_chunks,
    recorded,
    tie_gap,
)
from transcripts import random_steps


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "llama-mqa", "llama-scaled-rope", "qwen2.5", "qwen3"])
def test_without_a_budget_the_replay_is_plain_hugging_face(tiny: Callable[..., Path], name: str) -> None:
    folder = tiny(name)
    ids = random_steps([300], [40])[0].ids
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = plain.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    turn = Replay(load_model(folder), Settings(chunk=128)).turn(ids, [0] * 300, lambda _: 0, 40)
    assert turn.output_ids == expected[0, 300:].tolist()
    assert turn.held == 339


def test_compressed_replay_equals_a_masked_dense_run(tiny: Callable[..., Path]) -> None:
    """On one layer: no cache, no gather, only a mask."""
    model = load_model(tiny("llama-one-layer"))
    replay = Replay(model, Settings(budget=128, chunk=256))
    ids: list[int] = []
    done: list[tuple[int, torch.Tensor]] = []
    for step in random_steps([600, 200], [200, 5]):
        ids = ids + step.ids
        turn = replay.turn(ids, [number % 4 for number in range(len(ids))], lambda _: 1, step.max_tokens)
        sofar = done + dense.of(turn.compactions)
        for place in {0, len(turn.output_ids) // 2, len(turn.output_ids) - 1}:
            before = len(ids) + place
            seen = [(at, kept) for at, kept in sofar if at < before]
            logits = dense.last_logits(model, ids + turn.output_ids[:place], 2, seen)
            torch.testing.assert_close(turn.logits[place], logits, atol=1e-4, rtol=0)
        done = sofar
        ids = ids + turn.output_ids
    assert len(done) >= 6


def test_recorded_check_accepts_the_replay_and_nothing_else(tiny: Callable[..., Path]) -> None:
    """Turns, then a mid-turn restart from nothing, as a retraction is; and a token that nobody said."""
    model = load_model(tiny("llama-gqa"))
    replay, held = Replay(model, Settings(budget=128, chunk=256)), recorded.Held(model)
    ids: list[int] = []
    steps = random_steps([400, 100], [200, 30])
    for step in steps:
        ids = ids + step.ids
        turn = replay.turn(ids, [0] * len(ids), lambda _: 1, step.max_tokens)
        ids = ids + turn.output_ids
        events = [recorded.Event(c.length, c.length - c.candidates.shape[-1], c.kept) for c in turn.compactions]
        wrong = [*ids[:-5], (ids[-5] + 1) % 256, *ids[-4:]]
        before = copy.copy(held)
        for name in ("keys", "values", "positions"):
            setattr(before, name, dict(getattr(held, name)))
        with pytest.raises(AssertionError, match="does not follow"):
            recorded.check_turn(before, wrong, step.max_tokens, events)
        held = recorded.check_turn(held, ids, step.max_tokens, events)
    prompt = [*ids, 7, 8, 9]
    again = prompt + Replay(model, Settings()).turn(prompt, [0] * len(prompt), lambda _: 1, 20).output_ids
    size = len(again) - 1
    everything = torch.arange(size).repeat(2, 2, 1)
    events = [recorded.Event(size, 0, everything)]
    assert recorded.check_restarted(held, again, 20, events, size).length == size
    with pytest.raises(AssertionError, match="none of"):
        recorded.check_restarted(held, [*again[:-5], (again[-5] + 1) % 256, *again[-4:]], 20, events, size)


def test_scores_by_hand() -> None:
    """One query, two heads in one group, three keys: the larger logit of the group counts, then the softmax."""
    queries = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    keys = torch.tensor([[[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    expected = torch.tensor([[3.0, 2.0, 0.0]]).softmax(-1)
    torch.testing.assert_close(agentkv_scores(queries, keys, 1.0, pool=1), expected)
    pooled = agentkv_scores(queries, keys, 1.0, pool=3)
    assert pooled[0].tolist() == [expected[0, 0], expected[0, 0], expected[0, 1]]


def test_keep_set_protects_and_breaks_ties_low() -> None:
    scores = torch.tensor([[0.0, 5.0, 5.0, 5.0, 9.0, 0.0]])
    positions = torch.tensor([[0, 40, 50, 60, 70, 80]])
    assert keep_set(scores, positions, 4, sinks=32, recent=1).tolist() == [[0, 1, 4, 5]]
    assert tie_gap(scores[0], torch.tensor([1, 4]), torch.tensor([2, 4])) == (1, 0.0)
    assert tie_gap(scores[0], torch.tensor([1, 4]), torch.tensor([0, 4])) == (1, 5.0)


def test_rings_keep_the_newest() -> None:
    rings = Rings(size=2)
    for position in range(5):
        rings.add(0, position % 2, position, torch.full((1, 1), float(position)))
    assert rings.positions(0) == [[2, 4], [1, 3], [], []]
    assert rings.queries(0).flatten().tolist() == [2.0, 4.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("first", "end", "chunk", "page", "pieces"),
    [
        (0, 700, 256, 16, [(0, 256), (256, 512), (512, 700)]),
        (7, 263, 256, 1, [(7, 263)]),
        (999, 1300, 256, 16, [(999, 1248), (1248, 1300)]),
        (0, 250, 256, 64, [(0, 250)]),
        (0, 5000, None, 16, [(0, 5000)]),
    ],
)
def test_prefill_chunks(first: int, end: int, chunk: int | None, page: int, pieces: list[tuple[int, int]]) -> None:
    assert list(prefill_chunks(first, end, chunk, page)) == pieces
