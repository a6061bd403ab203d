"""`agentkv bench sessions` against an engine on a real port."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentkv_serve.bench.serve.client import Setting
from agentkv_serve.bench.sessions import Held, measure, results, stall_after

from .fake_engine import served
from .test_serve_load import plan


@pytest.mark.parametrize("way", ["agentkv", "session"])
async def test_sessions_that_find_their_state_were_held(tmp_path: Path, way: str) -> None:
    setting = Setting(way, way, "agentkv", 100)  # type: ignore[arg-type]
    async with served(tmp_path, setting.kind) as (state, engine):
        state.stuck = {2100}  # the third session waits for memory
        state.forgetful = {1}
        found = await measure(engine, setting, plan(5, 2), "plain", 3.0)
    assert (found.first_turns, found.given_up, found.finished, found.held) == (3, 1, 3, 2)
    assert found.states == {"resumed": 2, "rebuilt": 1}
    first, *order = [body["input_ids"][-10] // 1000 for body in state.bodies]
    assert first == 4 and 0 < found.alone_s < 3, "the last one is timed by itself, before the others"
    assert sorted(order[:4]) == [0, 1, 2, 3]
    ended_first = [number for number in order[:4] if number != 2]
    assert sorted(order[4:]) == sorted(ended_first), "the one that waited has no second turn"
    assert len(state.closed) == 5


def test_how_long_nothing_may_move_comes_from_the_machine() -> None:
    assert stall_after(5.0) == 60
    assert stall_after(55.0) == 165


def test_the_goal_is_a_share_of_what_arithmetic_allows() -> None:
    times = {"seconds": 1.0, "alone_s": 0.1, "stall_s": 60.0}
    held = Held(held=12, finished=16, first_turns=16, given_up=0, states={"resumed": 12, "rebuilt": 4}, **times)
    stock = Held(held=2, finished=2, first_turns=2, given_up=14, states={"resumed": 2}, **times)
    found = results(8192, 3000, 512, 16, {"ours": held, "stock": stock})
    assert (found["ours"], found["stock"], found["reached"]) == (12, 2, True)
    assert found["room"]["ours"] == pytest.approx(12.8) and found["goal"] == pytest.approx(11.52)
    assert results(8192, 3000, 512, 4, {"ours": held, "stock": stock})["room"]["ours"] == 4
