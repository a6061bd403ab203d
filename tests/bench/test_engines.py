"""The serving benchmarks on real servers, with loads small enough for a test. No figure of speed is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.timeout(2500)]


def bench(*arguments: str) -> dict[str, Any]:
    """What a benchmark prints with --json."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("agentkv")), "bench", *arguments, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=2400,  # of a run that hangs: a slow machine takes ten minutes for its two servers and this load
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))


def test_serve_under_pressure(tmp_path: Path) -> None:
    load = ("--sessions", "6", "--turns", "3", "--prompt", "700", "--tool", "60", "--output", "8", "--chunk", "256")
    # A pool that holds two whole sessions and a half, and all of ours (6 x (128 + 128), and a chunk).
    more = ("--pool", "2110", "--budget", "128", "--repeats", "1", "--stall", "90", "--out", str(tmp_path))
    result = bench("serve", "--preset", "cpu-pressured", *load, *more)
    (preset,) = result["presets"]
    rows = {row["setting"]: row for row in preset["rows"]}
    assert list(rows) == [
        "stock, radix cache",
        "stock, streaming sessions",
        "stock, streaming sessions, 2 at a time",
        "agentkv 128",
    ]
    assert rows["stock, radix cache"]["turns_failed"] == [0]
    assert rows["stock, radix cache"]["recomputed_tokens"]["median"] > 0, "a pool too small makes it compute again"
    assert rows["stock, streaming sessions, 2 at a time"]["sessions_finished"] == [6]
    assert rows["stock, streaming sessions, 2 at a time"]["recomputed_tokens"]["median"] == 0
    ours = rows["agentkv 128"]
    assert (ours["turns_failed"], ours["sessions_finished"], ours["role"]) == ([0], [6], "measurement")
    assert ours["states"] == {"new": 6, "resumed": 12, "rebuilt": 0} and ours["recomputed_tokens"]["median"] == 0
    # But for the two tokens that all prompts start with, and find in the radix cache.
    assert 0 <= 6 * (700 + 2 * 61) - ours["prefill_tokens"]["median"] <= 5 * 2
    assert preset["denominator"] in rows and result["ratio_pressured"]["n"] == 1
    assert preset["split"]["prefill_tokens_avoided"] > 0
    assert (tmp_path / "runs" / "cpu-pressured-3" / "0-agentkv-128.json").is_file()
    again = bench("serve", "--preset", "cpu-pressured", *load, *more)
    assert again["presets"] == result["presets"], "what is done is not run again"


def test_sessions_that_one_pool_holds() -> None:
    result = bench(
        "sessions", "--pool", "2048", "--context", "600", "--budget", "128", "--sessions", "9", "--stall", "90"
    )
    assert result["stock"] == 3 and result["details"]["stock"]["given_up"] == 6
    assert result["ours"] >= result["goal"] == pytest.approx(0.9 * 2048 / 256)
    assert result["details"]["ours"]["finished"] == 9


def test_overhead_prints_its_shares() -> None:
    result = bench("overhead", "--context", "1024", "--budget", "256", "--periods", "1", "--pairs", "4", "--steps", "8")
    assert 0 < result["compaction_share"] < 1
    # After the prompt, at the turn's end; then after the short prompt, after 128 sampled tokens, at that turn's end.
    assert (result["compaction"]["prefill_number"], result["compaction"]["number"]) == (2, 3)
    low, high = result["below_budget_share_interval"]
    assert low <= result["below_budget_share"] <= high and result["steps_a_side"] == 4 * 7
    assert set(result["cpu_ms_per_step"]) == {"on", "off", "stock"}
