"""Turns that wait or are pushed back: aborted in the queue or in prefill, retracted, idle for too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from duel import assert_same_turn
from fleet import PAGED, Arena, Fleet
from transcripts import random_steps

pytestmark = [pytest.mark.engine, pytest.mark.long]
BUDGET = 128


@pytest.fixture(scope="module")
def narrow(module_fleet: Fleet, tiny: Callable[..., Path]) -> Arena:
    """One request at a time, so one row for all sessions; they are released after ten idle seconds."""
    folder = tiny("llama-gqa")
    flags = ("--max-running-requests", "1", "--agentkv-idle-seconds", "10")
    return Arena.of(module_fleet.agentkv(folder, *PAGED, *flags), folder)


def test_abort_while_queued(narrow: Arena) -> None:
    steps = random_steps([300, 40, 50], [10, 10, 10], seed=70)
    with narrow.duel(BUDGET) as runner, narrow.duel(BUDGET) as waiter:
        waiter.play(steps[0])
        with (
            runner.conversation.running(random_steps([100], [1], seed=71)[0].pieces, 1500) as live,
            waiter.conversation.running(steps[1].pieces, 10) as queued,
        ):
            live.read(2)
            queued.abort()
            live.abort()
        one = waiter.play(steps[2])
        assert one.reply.facts["state"] == "rebuilt"  # the runner took the only row
        assert_same_turn(one)
        for step in random_steps([30, 40], [10, 10], seed=74):  # its own row is all that it waits for
            one = waiter.play(step)
            assert one.reply.facts["state"] == "resumed"
            assert_same_turn(one)


def test_abort_in_prefill(narrow: Arena) -> None:
    """A turn of many chunks is aborted before its first token; whatever state is left, the next turn is right."""
    steps = random_steps([300, 6000, 50, 40], [10, 1, 10, 10], seed=72)
    with narrow.duel(BUDGET) as duel:
        duel.play(steps[0])
        with duel.conversation.running(steps[1].pieces, 10) as turn:
            turn.abort()
        for step in steps[2:]:
            assert_same_turn(duel.play(step))
        assert duel.rounds[1].reply.facts["state"] in ("resumed", "rebuilt")
        assert duel.rounds[2].reply.facts["state"] == "resumed"


def test_idle_sessions_are_released(narrow: Arena) -> None:
    steps = random_steps([300, 40], [10, 10], seed=73)
    with narrow.duel(BUDGET) as duel:
        duel.play(steps[0])
        time.sleep(12)
        narrow.server.complete([1, 2, 3], 1)  # any work lets the scheduler look at its clock
        one = duel.play(steps[1])
        assert (one.reply.facts["state"], one.reply.facts["reason"]) == ("rebuilt", "idle")
        assert_same_turn(one)


@pytest.mark.parametrize("interval", [60, 25])
def test_retraction(module_fleet: Fleet, tiny: Callable[..., Path], interval: int) -> None:
    """Forced retractions in decode, at 25 steps several in a turn: the turn ends, the session goes on, nothing leaks.

    A retracted turn never becomes what the next one is resumed from.
    """
    folder = tiny("llama-gqa")
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(interval)}
    arena = Arena.of(module_fleet.agentkv(folder, *PAGED, **env), folder)
    steps = random_steps([300, 60, 50], [90, 90, 90], seed=74)
    with arena.duel(4096) as duel:  # nothing is dropped: the tokens do not depend on where it was retracted
        for step in steps:
            one = duel.play(step)
            assert one.reply.output_ids == one.turn.output_ids
            assert one.reply.facts["held"] == one.reply.facts["logical"] - 1
    with arena.duel(BUDGET) as duel:
        for step in steps:
            for label, ids in step.pieces:
                duel.conversation.extend(ids, label)
            reply = duel.conversation.send(step.max_tokens, step.initial, ignore_eos=True)
            assert len(reply.output_ids) == step.max_tokens
            assert BUDGET <= reply.facts["held"] < BUDGET + arena.page
        assert arena.server.process.poll() is None
