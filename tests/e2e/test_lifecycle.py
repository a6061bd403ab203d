"""Turns that end otherwise than by their last token: aborted, refused, overtaken, closed, branched.

After each of them the next turns must be token for token what the independent replay says.
"""

from __future__ import annotations

import dataclasses

import httpx
import pytest
from duel import Duel, assert_same_queries, assert_same_turn
from fleet import Arena
from server import ServerError
from transcripts import Step, random_steps

from agentkv_serve.phase_tagger import Label

pytestmark = pytest.mark.engine


def settle(duel: Duel, steps: list[Step], states: list[str]) -> None:
    """Plays the steps; each must equal the replay and be in the given state."""
    for step, state in zip(steps, states, strict=True):
        one = duel.play(step)
        assert (one.reply.facts["state"], one.reply.facts["reason"] is None) == (state, state != "rebuilt")
        assert_same_turn(one)
        assert_same_queries(one)


def test_abort_before_the_turns_first_compaction_rolls_back(arena: Arena) -> None:
    steps = random_steps([400, 60, 50, 40], [30, 40, 20, 150], seed=1)
    with arena.duel(480) as duel:
        settle(duel, steps[:1], ["new"])
        with duel.conversation.running(steps[1].pieces[:1]) as turn:
            turn.read(10)
            turn.abort()
        settle(duel, steps[1:], ["resumed"] * 3)
        assert sum(len(one.dumps) for one in duel.rounds) >= 3


def test_abort_after_a_compaction_rebuilds(arena: Arena) -> None:
    steps = random_steps([400, 60, 50, 40], [30, 40, 20, 150], seed=2)
    with arena.duel(128) as duel:
        settle(duel, steps[:2], ["new", "resumed"])
        with duel.conversation.running(steps[2].pieces) as turn:
            turn.read(300)
            turn.abort()
        settle(duel, steps[2:], ["rebuilt", "resumed"])
        assert duel.rounds[2].reply.facts["reason"] == "aborted"


def test_a_lost_client_does_not_delay_the_next_turn(arena: Arena) -> None:
    """The connection breaks in mid-turn; the next turn follows at once, with a higher epoch."""
    steps = random_steps([300, 60, 50], [30, 40, 20], seed=3)
    with arena.duel(128) as duel:
        settle(duel, steps[:1], ["new"])
        with duel.conversation.running(steps[1].pieces[:1]) as turn:
            turn.read(5)
        one = duel.play(steps[1])
        assert one.reply.facts["state"] in ("resumed", "rebuilt")
        assert_same_turn(one)
        settle(duel, steps[2:], ["resumed"])


def test_a_second_turn_is_refused_and_the_live_one_untouched(arena: Arena) -> None:
    steps = random_steps([300, 60], [30, 300], seed=4)
    with arena.duel(128) as duel:
        settle(duel, steps[:1], ["new"])
        conversation = duel.conversation
        with conversation.running(steps[1].pieces, 400) as turn:
            turn.read(3)
            epoch, conversation.epoch = conversation.epoch, conversation.epoch - 1
            with pytest.raises(ServerError) as refused:
                conversation.send(5)
            conversation.epoch = epoch
            assert refused.value.status == 400
            assert "agentkv:session_busy" in refused.value.text
            end = turn.read()
        assert end["meta_info"]["finish_reason"]["type"] == "length"
        assert end["meta_info"]["completion_tokens"] == 400
        # The turn ended well, so the ledger must go on from it.
        for label, ids in steps[1].pieces:
            conversation.extend(ids, label)
        conversation.extend(end["output_ids"], Label.SAY)
        conversation.extend([10, 11, 12], Label.INPUT)
        assert conversation.send(3).facts["state"] == "resumed"


def test_an_old_epoch_is_refused(arena: Arena) -> None:
    steps = random_steps([300, 60, 30], [30, 30, 30], seed=5)
    with arena.duel(128) as duel:
        settle(duel, steps[:2], ["new", "resumed"])
        conversation = duel.conversation
        epoch, conversation.epoch = conversation.epoch, 0
        with pytest.raises(ServerError) as refused:
            conversation.send(5)
        assert refused.value.status == 400
        assert "agentkv:stale_epoch" in refused.value.text
        conversation.epoch = epoch
        settle(duel, steps[2:], ["resumed"])


def test_a_turn_over_the_length_limit_leaves_the_session_alone(arena: Arena) -> None:
    steps = random_steps([300, 60, 9000], [30, 30, 30], seed=6)
    with arena.duel(128) as duel:
        settle(duel, steps[:1], ["new"])
        conversation = duel.conversation
        size = len(conversation.ids)
        conversation.extend(steps[2].ids, Label.TOOL)
        with pytest.raises(ServerError) as refused:
            conversation.send(5)
        assert refused.value.status == 400
        duel.branch(size)
        settle(duel, steps[1:2], ["resumed"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("runs", [0, 5, 0]), ("budget", -1), ("budget", 40), ("policy", "nonsense"), ("v", 2), ("session", "")],
)
def test_a_malformed_turn_is_refused_and_the_session_goes_on(arena: Arena, name: str, value: object) -> None:
    steps = random_steps([200, 60], [10, 10], seed=7)
    with arena.duel(128) as duel:
        settle(duel, steps[:1], ["new"])
        size = len(duel.conversation.ids)
        duel.conversation.extend([1, 2, 3], Label.INPUT)
        with pytest.raises(ServerError) as refused:
            duel.conversation.send(5, agentkv={name: value})
        assert refused.value.status == 400
        assert "agentkv:" in refused.value.text
        duel.branch(size)
        settle(duel, steps[1:], ["resumed"])


def test_close_twice_and_reuse(arena: Arena) -> None:
    steps = random_steps([300, 60, 50], [30, 30, 30], seed=8)
    with arena.duel(128) as duel:
        settle(duel, steps[:2], ["new", "resumed"])
        assert duel.conversation.close().status_code == 200
        assert duel.conversation.close().status_code < 500
        settle(duel, steps[2:], ["new"])
        assert duel.rounds[-1].reply.facts["prefill"] > len(steps[2].ids)


def test_close_during_a_turn(arena: Arena) -> None:
    steps = random_steps([300, 60, 50], [30, 30, 30], seed=9)
    with arena.duel(128) as duel:
        settle(duel, steps[:1], ["new"])
        with duel.conversation.running(steps[1].pieces, 200) as turn:
            turn.read(3)
            duel.conversation.close()
            turn.read()
        one = duel.play(steps[2])
        assert one.reply.facts["state"] in ("new", "rebuilt")
        assert_same_turn(one)


def test_branch_from_an_earlier_turn(arena: Arena) -> None:
    steps = random_steps([300, 60, 50, 40], [30, 30, 30, 30], seed=10)
    with arena.duel(128) as duel:
        settle(duel, steps[:1], ["new"])
        end = len(duel.conversation.ids)
        settle(duel, steps[1:2], ["resumed"])
        duel.branch(end)
        settle(duel, steps[2:], ["rebuilt", "resumed"])
        assert duel.rounds[2].reply.facts["reason"] == "diverged"


def test_a_client_may_ask_for_a_rebuild(arena: Arena) -> None:
    steps = random_steps([300, 60, 50], [30, 30, 30], seed=11)
    with arena.duel(128) as duel:
        settle(duel, steps[:1], ["new"])
        one = duel.play(steps[1], agentkv={"rebuild": True})
        assert (one.reply.facts["state"], one.reply.facts["reason"]) == ("rebuilt", "requested")
        assert_same_turn(one)
        settle(duel, steps[2:], ["resumed"])


@pytest.mark.parametrize("budgets", [(4096, 256, 128), (128, 512, 512), (512, 160, 4096)])
def test_budget_changed_between_turns(arena: Arena, budgets: tuple[int, ...]) -> None:
    """Lower works at the end of the turn's prefill; higher brings nothing back but lets the session grow."""
    steps = random_steps([600, 100, 200], [30, 30, 30], seed=12)
    with arena.duel(budgets[0]) as duel:
        for step, budget, state in zip(steps, budgets, ["new", "resumed", "resumed"], strict=True):
            duel.set_budget(budget)
            settle(duel, [step], [state])
            assert duel.rounds[-1].reply.facts["held"] == duel.rounds[-1].turn.held < budget + 16


@pytest.mark.parametrize("first", range(256, 265))
def test_new_tokens_may_start_with_any_special_token(arena: Arena, first: int) -> None:
    steps = random_steps([200, 40], [5, 5], seed=13)
    pieces = [(Label.GLUE, [first]), *steps[1].pieces]
    with arena.duel(128) as duel:
        settle(duel, [steps[0], dataclasses.replace(steps[1], pieces=pieces)], ["new", "resumed"])


def test_one_new_token_is_a_turn(arena: Arena) -> None:
    """The empty continuation (an open turn after `length`) is not: the client must append something."""
    steps = random_steps([200, 1, 1], [5, 1, 40], seed=14)
    with arena.duel(128) as duel:
        settle(duel, steps, ["new", "resumed", "resumed"])


def test_sessions_beyond_the_slots_push_out_the_idle(arena: Arena) -> None:
    """More live sessions than the engine has room for: none fails, the pushed out are rebuilt."""
    duels = [arena.duel(128) for _ in range(12)]
    steps = random_steps([200, 40], [5, 5], seed=15)
    try:
        for duel in duels:
            settle(duel, steps[:1], ["new"])
        for duel in duels:
            one = duel.play(steps[1])
            assert one.reply.facts["state"] in ("resumed", "rebuilt")
            assert_same_turn(one)
    finally:
        for duel in duels:
            duel.conversation.close()


def test_a_flush_drops_idle_sessions_and_leaves_no_trace_in_their_rows(arena: Arena) -> None:
    """Whoever gets a flushed session's row reads it from its beginning; the session itself is rebuilt."""
    steps = random_steps([400, 60], [40, 20], seed=16)
    with arena.duel(128) as flushed:
        settle(flushed, steps[:1], ["new"])
        assert arena.server.client.post("/flush_cache").status_code == httpx.codes.OK
        others = [arena.duel(budget) for budget in (0, 4096, 128)]
        for duel in others:
            settle(duel, steps[:1], ["new"])
        settle(flushed, steps[1:], ["rebuilt"])
        assert flushed.rounds[1].reply.facts["reason"] == "evicted"
        for duel in others:
            duel.conversation.close()


def test_server_is_well_after_all_this(arena: Arena) -> None:
    """Strict memory checks were on all the time; an idle pool passes the leak check and can be flushed."""
    assert arena.server.process.poll() is None
    reply = arena.server.client.post("/flush_cache")
    assert reply.status_code == httpx.codes.OK
