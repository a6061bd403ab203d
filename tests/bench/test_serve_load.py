"""The load generator, against an engine on a real port."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from agentkv_serve.bench.serve.client import Setting
from agentkv_serve.bench.serve.engine import Pressure
from agentkv_serve.bench.serve.load import Run, drive
from agentkv_serve.bench.serve.workload import Turn, Workload
from agentkv_serve.phase_tagger import Label

from .fake_engine import Served, served

OURS = Setting("agentkv 100", "agentkv", "agentkv", 100)


def plan(sessions: int = 3, turns: int = 3, pause: float = 0.0) -> list[list[Turn]]:
    """Turns whose first token tells session and turn: 1000 * session + 100 * (turn + 1)."""
    return [
        [
            Turn(
                tuple(range(1000 * number + 100 * turn, 1000 * number + 100 * turn + 10)),
                ((4, Label.INPUT), (6, Label.TOOL)),
                5,
                pause if turn > 1 else 0.0,
            )
            for turn in range(1, turns + 1)
        ]
        for number in range(sessions)
    ]


async def run_on(state_folder: Path, setting: Setting, work: Workload, stall: float = 5.0) -> tuple[Served, Run]:
    async with served(state_folder, setting.kind) as (state, engine):
        run = await drive(engine, setting, plan(work.sessions, work.turns), work, "plain", stall)
    return state, run


def order(state: Served) -> list[tuple[int, int]]:
    """(session, turn) of every request, by the first of its last ten prompt tokens."""
    return [(body["input_ids"][-10] // 1000, body["input_ids"][-10] % 1000 // 100) for body in state.bodies]


async def test_sessions_take_turns_and_no_more_are_in_flight_than_asked_for(tmp_path: Path) -> None:
    state, run = await run_on(tmp_path, OURS, Workload(sessions=4, turns=3, concurrency=2))
    assert [number for number, _ in order(state)[:4]] == [0, 1, 2, 3]
    assert [turn for _, turn in order(state)] == sorted(turn for _, turn in order(state))
    assert state.at_work_max == 2
    assert sorted(run.ended) == [0, 1, 2, 3] and run.output_tokens == 4 * 3 * 5


async def test_no_more_sessions_are_begun_than_are_admitted(tmp_path: Path) -> None:
    setting = Setting("stock", "session", admitted=2)
    state, _ = await run_on(tmp_path, setting, Workload(sessions=4, turns=3, concurrency=4))
    begun = [number for number, turn in order(state) if turn == 1]
    assert begun == [0, 1, 2, 3]
    third = order(state).index((2, 1))
    assert any((number, 3) in order(state)[:third] for number in (0, 1)), "the third waits for one to end"


@pytest.mark.parametrize("way", ["prefix", "session", "agentkv"])
async def test_each_way_sends_the_conversation_as_its_server_wants_it(tmp_path: Path, way: str) -> None:
    setting = Setting(way, way, "agentkv", 100)  # type: ignore[arg-type]
    state, run = await run_on(tmp_path, setting, Workload(sessions=1, turns=3, concurrency=1))
    first, second, third = state.bodies
    said = [1, 2, 3, 4, 5]
    assert first["input_ids"] == list(range(100, 110))
    history = list(range(100, 110)) + said
    assert second["input_ids"] == ([] if way == "session" else history) + list(range(200, 210))
    assert all(body["sampling_params"]["ignore_eos"] for body in state.bodies)
    assert len(state.opened) == (way == "session") and state.closed[:1] == (state.opened or state.closed[:1])
    if way == "agentkv":
        told = json.loads(third["sampling_params"]["custom_params"]["agentkv"])
        assert told["epoch"] == 2 and told["budget"] == 100
        runs = told["runs"]
        assert runs[0] == 0 and runs[-2] == len(third["input_ids"]) and runs[1:-2:3] == runs[3::3]
        assert runs[2::3] == [0, 3, 4, 0, 3, 4, 0, 3]
        assert [reply.facts["state"] for reply in run.replies] == ["new", "resumed", "resumed"]
    assert [reply.computed for reply in run.replies[1:]] == [
        reply.needed for reply in run.replies[1:]
    ] or way == "prefix"


async def test_a_refused_turn_ends_its_session_and_its_tokens_count_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (state, engine):
        state.refused = {1200}
        run = await drive(engine, OURS, plan(), Workload(sessions=3, turns=3, concurrency=2), "plain", 5.0)
    assert sorted(run.ended) == [0, 2]
    assert run.output_tokens == (3 + 1 + 3) * 5
    assert len([body for body in state.bodies if body["input_ids"][0] == 1100]) == 2, "no third turn"
    assert [reply.error for reply in run.replies if reply.error] == ['{"error": {"message": "no"}}']


async def test_turns_that_wait_for_ever_are_given_up(tmp_path: Path) -> None:
    async with served(tmp_path) as (state, engine):
        state.stuck = {1100, 2200}
        run = await drive(engine, OURS, plan(), Workload(sessions=3, turns=3, concurrency=3), "plain", 3.0)
    assert sorted(run.ended) == [0]
    assert {(reply.session, reply.turn) for reply in run.replies if reply.error == "given up"} == {(1, 0), (2, 1)}


async def test_a_poisson_process_begins_the_sessions(tmp_path: Path) -> None:
    work = Workload(sessions=3, turns=2, concurrency=1, rate=1200)
    arrivals = work.arrivals()
    assert arrivals == work.arrivals() and arrivals == sorted(arrivals) and arrivals[0] > 0
    began = time.perf_counter()
    _, run = await run_on(tmp_path, OURS, work)
    begun = sorted(reply.sent for reply in run.replies if reply.turn == 0)
    assert all(sent - began >= due for sent, due in zip(begun, arrivals, strict=True)), "nobody comes too early"
    assert sorted(run.ended) == [0, 1, 2]


async def test_the_cache_is_emptied_and_the_log_of_the_run_is_read(tmp_path: Path) -> None:
    state, run = await run_on(tmp_path, OURS, Workload(sessions=2, turns=1, concurrency=1))
    assert state.flushed == 2
    assert run.pressure == Pressure(usage_mean=0.5, usage_max=0.5, queue_max=3, retractions=0)
    assert len(state.closed) == 2


def test_the_pools_pressure_is_read_from_sglangs_own_words() -> None:
    log = (
        "[x] Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0, token usage: 0.25, #running-req: 1, "
        "#queue-req: 4, #pending-token: 0, cuda graph: False, input throughput (token/s): 600.00\n"
        "[x] Decode batch, #running-req: 3, #token: 9000, token usage: 0.75, gen throughput (token/s): 9.0, "
        "#queue-req: 1\n"
        "[x] KV cache pool is full. Retract requests. #retracted_reqs: 1\n"
    )
    assert Pressure.read(log) == Pressure(usage_mean=0.5, usage_max=0.75, queue_max=4, retractions=1)
    assert Pressure.read("") == Pressure(0.0, 0.0, 0, 0)
