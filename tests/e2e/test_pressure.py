"""A small pool: nothing wedges, nothing is pinned for good, and compression makes the room that it promises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from duel import Duel, assert_same_turn
from fleet import PAGED, Arena, Fleet
from server import ServerError
from transcripts import random_steps

from agentkv_serve.phase_tagger import Label

pytestmark = [pytest.mark.engine, pytest.mark.long]
POOL, BUDGET = 2048, 128


@pytest.fixture(scope="module")
def small(module_fleet: Fleet, tiny: Callable[..., Path]) -> Arena:
    """The tiny model with a pool of 2,048 tokens."""
    folder = tiny("llama-gqa")
    pool = [str(POOL) if flag == "16384" else flag for flag in PAGED]
    return Arena.of(module_fleet.agentkv(folder, *pool, "--agentkv-ring-share", "1"), folder)


def together(duels: list[Duel], step_of: Callable[[Duel], object]) -> None:
    """All at once; the first failure is raised."""
    failures: list[BaseException] = []

    def one(duel: Duel) -> None:
        try:
            step_of(duel)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(duel,)) for duel in duels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads), "a turn waits for ever"
    if failures:
        raise failures[0]


def test_a_session_grows_past_the_pool(small: Arena) -> None:
    steps = random_steps([800] * 5, [20] * 5, seed=40)
    with small.duel(BUDGET) as duel:
        for step in steps:
            assert_same_turn(duel.play(step))
        assert len(duel.conversation.ids) > 2 * POOL
        assert [one.reply.facts["state"] for one in duel.rounds] == ["new"] + ["resumed"] * 4


def test_one_prompt_longer_than_the_pool(small: Arena) -> None:
    with small.duel(BUDGET) as duel:
        assert_same_turn(duel.play(random_steps([POOL + 700], [20], seed=41)[0]))


def test_prompts_that_a_policy_keeps_whole_never_wait_for_ever(small: Arena) -> None:
    """Prompts up to half the pool stay whole under agentkv_paper; longer ones are compressed, also when rebuilt."""
    duels = [small.duel(BUDGET) for _ in range(3)]
    facts = []

    def one(duel: Duel, length: int) -> None:
        conversation = duel.conversation
        conversation.policy = "agentkv_paper"
        conversation.extend(random_steps([length], [5], seed=50)[0].ids, Label.TOOL)
        facts.append(conversation.send(1, ignore_eos=True).facts)

    try:
        for length in (900, POOL + 300):
            together(duels, partial(one, length=length))
        first, second = facts[:3], facts[3:]
        assert {(fact["held"], fact["evicted"]) for fact in first} == {(900, 0)}
        assert len(second) == 3 and all(fact["evicted"] >= POOL // 2 for fact in second)
        for duel in duels:
            one(duel, 20)
        assert all(fact["evicted"] >= POOL // 2 for fact in facts[6:])
    finally:
        for duel in duels:
            duel.conversation.close()


def test_many_sessions_hold_their_state_at_once(small: Arena) -> None:
    """At least nine tenths of what the pool can hold at budget + interval resume, all their turns in parallel."""
    count = POOL // (BUDGET + 128 + 16)
    duels = [small.duel(BUDGET) for _ in range(count)]
    first, second = random_steps([500, 25], [5, 5], seed=42)
    try:
        for duel in duels:
            duel.play(first)
        together(duels, lambda duel: duel.play(second))
        states = [duel.rounds[1].reply.facts["state"] for duel in duels]
        assert states.count("resumed") >= int(0.9 * count)
        for duel in duels:
            assert_same_turn(duel.rounds[1])
    finally:
        for duel in duels:
            duel.conversation.close()


def test_uncompressed_sessions_beyond_the_pool_push_one_another_out(small: Arena) -> None:
    """Five sessions of 900 tokens in a pool of 2,048: stock SGLang's streaming sessions would wait for ever."""
    duels = [small.duel(0) for _ in range(5)]
    first, second = random_steps([880, 30], [10, 10], seed=43)
    try:
        for step in (first, second):
            for duel in duels:
                assert_same_turn(duel.play(step))
        reasons = {one.reply.facts["reason"] for duel in duels for one in duel.rounds}
        assert "evicted" in reasons
    finally:
        for duel in duels:
            duel.conversation.close()


def test_parallel_turns_beyond_the_pool_all_end(small: Arena) -> None:
    duels = [small.duel(0) for _ in range(6)]
    step = random_steps([700], [100], seed=44)[0]
    try:
        together(duels, lambda duel: duel.play(step))
        for duel in duels:
            assert_same_turn(duel.rounds[0])
    finally:
        for duel in duels:
            duel.conversation.close()


def test_what_can_never_fit_is_refused_at_once_with_the_numbers(small: Arena) -> None:
    with small.duel(0) as duel:
        duel.conversation.extend(random_steps([POOL + 500], [1], seed=45)[0].ids, Label.INPUT)
        with pytest.raises(ServerError) as refused:
            duel.conversation.send(5)
        assert refused.value.status == 400
        assert str(POOL + 500) in refused.value.text
    with small.duel(BUDGET) as duel:
        assert_same_turn(duel.play(random_steps([300], [5], seed=46)[0]))


def test_stateless_requests_get_room_from_idle_sessions(small: Arena) -> None:
    duels = [small.duel(0) for _ in range(2)]
    try:
        for number, duel in enumerate(duels):
            duel.play(random_steps([800], [5], seed=47 + number)[0])
        reply = small.server.complete(random_steps([1200], [5], seed=49)[0].ids, 5, ignore_eos=True)
        assert len(reply.output_ids) == 5
    finally:
        for duel in duels:
            duel.conversation.close()
