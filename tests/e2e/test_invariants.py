"""What must always hold of compressed sessions, on the real server with SGLang's strict memory checks on.

Token identity with stock SGLang is in test_identity.py, equality with an independent run in test_oracle.py.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from duel import assert_same_queries, assert_same_turn
from fleet import PAGED, Arena, Fleet
from oracle import dense
from server import Conversation
from transcripts import random_steps

from agentkv_serve.phase_tagger import Label

pytestmark = pytest.mark.engine
BUDGET, EVERY, PAGE = 128, 128, 16


def test_held_tokens_stay_within_the_budget_at_every_step(arena: Arena) -> None:
    """The scheduler's own count of used tokens, step by step: budget + compression interval + page."""
    mark = arena.server.log.stat().st_size
    with arena.duel(BUDGET) as duel:
        for step in random_steps([600, 300], [400, 300], seed=20):
            duel.play(step)
    with arena.server.log.open() as log:
        log.seek(mark)
        used = [int(count) for count in re.findall(r"Decode batch.*?#token: (\d+)", log.read())]
    assert len(used) >= 650
    assert BUDGET < max(used) <= BUDGET + EVERY + PAGE


def test_shared_pages_are_never_written(arena: Arena) -> None:
    """A stranger's compaction leaves the shared prefix bit for bit as it was."""
    salt = uuid.uuid4().hex
    head = random_steps([480], [0], seed=21)[0].ids
    probe = [*head, *range(20)]

    def look() -> tuple[int, list[float]]:
        reply = arena.server.complete(probe, 8, cache_salt=salt, ignore_eos=True, logprobs=True)
        return reply.cached, reply.logprobs

    look()
    before = look()
    assert before[0] >= 480
    with arena.duel(BUDGET, salt) as duel:
        duel.conversation.extend(head, Label.INPUT)
        one = duel.play(random_steps([40], [200], seed=22)[0])
        assert one.reply.cached >= 480 - PAGE
        assert one.dumps
        assert_same_turn(one)
        assert look() == before
    assert look() == before


def test_a_secret_of_one_session_never_reaches_another(arena: Arena) -> None:
    """The same session beside two neighbours that differ in content only: bit-equal log-probabilities."""
    mine = random_steps([300, 80, 60], [40, 150, 20], seed=23)

    def run(secret: int) -> list[list[float]]:
        theirs = random_steps([350, 70, 90], [30, 140, 30], seed=secret)
        with arena.duel(BUDGET) as probe, arena.duel(BUDGET) as neighbour:
            heard = []
            for step, other in zip(mine, theirs, strict=True):
                neighbour.play(other)
                heard.append(probe.play(step).reply.logprobs)
            return heard

    assert run(101) == run(102)


def test_two_budgets_side_by_side(arena: Arena) -> None:
    """Two sessions with the same text and different budgets keep to their own."""
    steps = random_steps([400, 100], [30, 30], seed=24)
    with arena.duel(128) as small, arena.duel(256) as large:
        for step in steps:
            for duel, budget in ((small, 128), (large, 256)):
                one = duel.play(step)
                assert_same_turn(one)
                assert budget <= one.reply.facts["held"] < budget + PAGE


def test_cold_equals_warm(arena: Arena) -> None:
    """A resumed session and one that starts with the whole text say the same when nothing is dropped."""
    steps = random_steps([300, 60, 50], [30, 40, 30], seed=25)
    with arena.duel(4096) as warm, arena.duel(4096) as cold:
        for step in steps[:2]:
            warm.play(step)
        cold.conversation.ids, cold.conversation.labels = list(warm.conversation.ids), list(warm.conversation.labels)
        last, first = warm.play(steps[2]), cold.play(steps[2])
        assert (last.reply.facts["state"], first.reply.facts["state"]) == ("resumed", "new")
        assert (last.reply.cached > 0, first.reply.cached) == (True, 0)
        assert last.reply.output_ids == first.reply.output_ids
        torch.testing.assert_close(
            torch.tensor(last.reply.logprobs), torch.tensor(first.reply.logprobs), atol=1e-4, rtol=0
        )


def test_after_a_restart_labels_and_rings_equal_the_uninterrupted_ones(arena: Arena) -> None:
    """An engine that never saw the session gets its ledger in the middle: the same rings, the same keep-sets."""
    steps = random_steps([300, 120, 90, 40], [30, 40, 30, 30], seed=26)
    with arena.duel(4096) as steady, arena.duel(4096) as moved:
        for step in steps[:2]:
            steady.play(step)
        source, target = steady.conversation, moved.conversation
        target.ids, target.labels, target.epoch = list(source.ids), list(source.labels), source.epoch
        for step, budget in zip(steps[2:], (4096, BUDGET), strict=True):
            for duel in (steady, moved):
                duel.set_budget(budget)
                duel.play(step)
        assert moved.rounds[0].reply.facts["state"] == "rebuilt"
        assert moved.rounds[0].reply.facts["reason"] == "restarted"
        assert moved.conversation.labels == steady.conversation.labels
        ours, theirs = steady.rounds[-1], moved.rounds[-1]
        for one in (ours, theirs):
            assert_same_turn(one)
            assert sum(assert_same_queries(one).values()) == 32 * len(one.dumps)
        assert ours.reply.output_ids == theirs.reply.output_ids
        assert torch.equal(ours.dumps[0].kept, theirs.dumps[0].kept)


@pytest.mark.long
def test_one_layer_equals_a_dense_run_under_a_mask(fleet: Fleet, tiny: Callable[..., Path]) -> None:
    """With one layer, what the server computes is the whole text seen through the mask of its own keep-sets."""
    folder = tiny("llama-one-layer")
    arena = Arena.of(fleet.agentkv(folder, *PAGED), folder)
    with arena.duel(BUDGET) as duel:
        for step in random_steps([500, 90], [200, 30], seed=27):
            duel.play(step)
        dumps = [(dump.length, dump.kept[0]) for one in duel.rounds for dump in one.dumps]
        end = len(duel.conversation.ids)
        last = duel.rounds[-1].reply
        for place in (0, 15, 29):
            before = end - len(last.output_ids) + place
            held = [(length, kept) for length, kept in dumps if length < before]
            logits = dense.last_logits(arena.model, duel.conversation.ids[:before], 2, held)
            expected = float(torch.log_softmax(logits, -1)[last.output_ids[place]])
            assert last.logprobs[place] == pytest.approx(expected, abs=1e-4)
        assert len(dumps) >= 5


def test_streamed_frames_carry_ids_and_facts(arena: Arena) -> None:
    """What the gateway reads at the end of a streamed turn: output ids, facts, usage, in this order."""
    with arena.duel(4096) as duel:
        step = random_steps([200], [10], seed=28)[0]
        for label, ids in step.pieces:
            duel.conversation.extend(ids, label)
        plain = Conversation(arena.server, 4096, ids=list(duel.conversation.ids), labels=list(duel.conversation.labels))
        expected = plain.send(10, step.initial, ignore_eos=True)
        plain.close()
        frames = duel.conversation.stream(10, step.initial)
    kinds = [name for name, _ in frames]
    assert kinds[-3:] == ["facts", "ids", "usage"]
    assert frames[-2][1] == expected.output_ids
    assert frames[-3][1] == expected.facts
    assert frames[-1][1]["completion_tokens"] == 10
