"""`agentkv bench sessions` against an engine on a real port."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentkv_serve.bench.serve.client import Setting
from agentkv_serve.bench.sessions import Held, measure, results

from .fake_engine import served
from .test_serve_load import plan


@pytest.mark.parametrize("way", ["agentkv", "session"])
async def test_sessions_that_find_their_state_were_held(tmp_path: Path, way: str) -> None:
    setting = Setting(way, way, "agentkv", 100)  # type: ignore[arg-type]
    async with served(tmp_path, setting.kind) as (state, engine):
        state.stuck = {2100}  # the third session waits for memory
        state.forgetful = {1}
        found = await measure(engine, setting, plan(4, 2), "plain", 3.0)
    assert (found.first_turns, found.given_up, found.finished, found.held) == (3, 1, 3, 2)
    assert found.states == {"resumed": 2, "rebuilt": 1}
    order = [body["input_ids"][-10] // 1000 for body in state.bodies]
    assert sorted(order[:4]) == [0, 1, 2, 3]
    ended_first = [number for number in order[:4] if number != 2]
    assert sorted(order[4:]) == sorted(ended_first), "the one that waited has no second turn"
    assert len(state.closed) == 4


def test_the_goal_is_a_share_of_what_arithmetic_allows() -> None:
    held = Held(held=12, finished=16, first_turns=16, given_up=0, seconds=1.0, states={"resumed": 12, "rebuilt": 4})
    stock = Held(held=2, finished=2, first_turns=2, given_up=14, seconds=1.0, states={"resumed": 2})
    found = results(8192, 3000, 512, 16, {"ours": held, "stock": stock})
    assert (found["ours"], found["stock"], found["reached"]) == (12, 2, True)
    assert found["room"]["ours"] == pytest.approx(12.8) and found["goal"] == pytest.approx(11.52)
    assert results(8192, 3000, 512, 4, {"ours": held, "stock": stock})["room"]["ours"] == 4
