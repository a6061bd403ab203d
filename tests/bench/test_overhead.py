"""The arithmetic of `agentkv bench overhead`, and the clock it reads."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import aiohttp
import pytest

from agentkv_serve.bench.overhead import compaction_seconds, share, shares
from agentkv_serve.bench.serve.client import Reply
from agentkv_serve.bench.serve.engine import cpu_seconds

from .fake_engine import served


def turn(gaps: list[float], ttft: float = 2.0) -> Reply:
    arrivals = [ttft]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    return Reply(0, 0, 10, 0.0, arrivals[-1], arrivals, list(range(len(arrivals))))


def test_shares_are_of_the_turns_that_the_compressions_fell_into() -> None:
    gaps = ([0.1] * 127 + [0.4]) * 2
    found = shares(turn([0.1]), turn(gaps, ttft=0.8), (1.0, 2), (1.5, 8), (2.1, 10))
    seconds = 0.8 + 2 * (12.7 + 0.4)
    assert found["compaction_share"] == pytest.approx(0.6 / seconds)
    told = found["compaction"]
    assert (told["number"], told["prefill_number"]) == (2, 6)
    assert told["prefill_share"] == pytest.approx(0.5 / 2.0)
    assert told["longest_gaps_over_the_median_share"] == pytest.approx(0.6 / 26.2)


def test_a_share_is_over_all_turns_and_its_interval_over_pairs() -> None:
    theirs = [0.1] * 40
    ours = [0.1 * factor for factor in (1.01, 1.03) * 20]
    found = share("x", ours, theirs)
    assert found["x"] == pytest.approx(0.02)
    low, high = found["x_interval"]
    assert 0.015 < low < 0.02 < high < 0.025
    assert share("x", theirs, theirs) == {"x": 0.0, "x_interval": [0.0, 0.0]}


async def test_the_engines_seconds_come_from_its_metrics(tmp_path: Path) -> None:
    text = (
        '# TYPE agentkv_compaction_seconds histogram\nagentkv_compaction_seconds_bucket{le="0.1"} 3.0\n'
        'agentkv_compaction_seconds_sum{model_name="m",tp_rank="0"} 0.75\n'
        'agentkv_compaction_seconds_count{model_name="m",tp_rank="0"} 6.0\n'
    )
    async with served(tmp_path) as (state, engine), aiohttp.ClientSession() as http:
        state.metrics = text
        assert await compaction_seconds(engine, http) == (0.75, 6)
        state.metrics = ""
        assert await compaction_seconds(engine, http) == (0.0, 0)


def test_cpu_time_counts_work_and_not_waiting() -> None:
    before = cpu_seconds(os.getpid())
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    worked = cpu_seconds(os.getpid()) - before
    child = subprocess.Popen(["sleep", "30"])
    try:
        time.sleep(0.5)
        slept = cpu_seconds(child.pid)
    finally:
        child.kill()
        child.wait()
    assert worked > 0.15 and slept < 0.15
    assert cpu_seconds(child.pid) == 0
