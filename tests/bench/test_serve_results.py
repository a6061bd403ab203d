"""Workloads, presets and figures of `agentkv bench serve`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer

from agentkv_serve.bench.serve import results
from agentkv_serve.bench.serve.cli import headline
from agentkv_serve.bench.serve.client import Reply, Setting
from agentkv_serve.bench.serve.engine import EngineSettings, Pressure
from agentkv_serve.bench.serve.job import changed, named, ready, run_configuration
from agentkv_serve.bench.serve.load import Run
from agentkv_serve.bench.serve.plots import curves, plot, points
from agentkv_serve.bench.serve.presets import PRESETS
from agentkv_serve.bench.serve.shapes import SHAPES, write_shape
from agentkv_serve.bench.serve.workload import Workload, full_length
from agentkv_serve.demo.recording import RECORDING
from agentkv_serve.model import default_model
from agentkv_serve.phase_tagger import Label, Vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(default_model())


def test_the_pressured_preset_is_what_its_name_promises(vocabulary: Vocabulary) -> None:
    preset = PRESETS["cpu-pressured"]
    plan = preset.work.plan(vocabulary)
    assert [len(plan), {len(session) for session in plan}] == [9, {5}]
    assert {len(session[0].ids) for session in plan} == {3000}
    assert {len(turn.ids) for session in plan for turn in session[1:]} == {400}
    assert {turn.output for session in plan for turn in session} == {48}
    assert {full_length(session) for session in plan} == {3000 + 4 * 400 + 5 * 48}
    assert (preset.work.seed, preset.work.concurrency, preset.chunk, preset.repeats) == (7, 3, 512, 3)
    assert preset.pool_share == 1 / 3 and 512 in preset.budgets
    other = PRESETS["cpu-unpressured"]
    assert other.work == preset.work and other.pool_share == 1


def test_sessions_are_the_same_for_a_seed_and_share_no_prefix(vocabulary: Vocabulary) -> None:
    work = Workload(sessions=3, turns=2, prompt=500, tool=70)
    plan = work.plan(vocabulary)
    assert plan == work.plan(vocabulary)
    assert plan != Workload(seed=8, sessions=3, turns=2, prompt=500, tool=70).plan(vocabulary)
    heads = {session[0].ids[:8] for session in plan}
    assert len(heads) == 3
    for turn in (turn for session in plan for turn in session):
        assert sum(count for count, _ in turn.runs) == len(turn.ids)


def test_a_recorded_run_gives_the_turns_their_lengths(vocabulary: Vocabulary) -> None:
    work = Workload(sessions=2, turns=6, output=40, trace=RECORDING, pause_s=0.5)
    first, second = work.plan(vocabulary)
    assert 2 <= len(first) <= 6 and len({len(turn.ids) for turn in first}) > 1
    assert all(2 <= turn.output <= 40 for turn in first)
    assert first[0].pause_s == 0 and all(turn.pause_s > 0 for turn in first[1:])
    assert {label for turn in first for _, label in turn.runs} == {Label.INPUT, Label.TOOL}
    assert first[0].ids != second[0].ids and first[1].ids == second[1].ids


@pytest.mark.parametrize(("fitting", "rows"), [(9, 2), (3, 3)])
def test_stock_is_also_run_with_no_more_sessions_than_fit(fitting: int, rows: int) -> None:
    settings = [row for row in PRESETS["cpu-pressured"].settings(fitting) if row.kind == "stock"]
    assert len(settings) == rows
    assert [row.admitted for row in settings][2:] == [3][: rows - 2]


def test_what_was_changed_in_a_preset_is_told() -> None:
    preset = changed(named("cpu-pressured"), {"sessions": 3, "turns": 5, "seed": None}, {"repeats": 1, "chunk": None})
    assert (preset.work.sessions, preset.repeats, preset.chunk) == (3, 1, 512)
    assert preset.changed == {"sessions": 3, "repeats": 1}
    with pytest.raises(typer.BadParameter, match="no preset 'x'"):
        named("x")


def test_more_repeats_go_on_from_the_runs_of_fewer(tmp_path: Path) -> None:
    def of(**own: Any) -> dict[str, Any]:
        work = {"sessions": 2, "turns": 1, "prompt": 64, **{name: own.pop(name) for name in ("output",) if name in own}}
        return run_configuration(ready(changed(named("cpu-pressured"), work, own), default_model(), None, tmp_path))

    assert of(repeats=1) == of(repeats=5)
    assert of(repeats=1) != of(repeats=1, chunk=64) and of(repeats=1) != of(repeats=1, output=7)


def reply(session: int, turn: int, sent: float, tokens: int = 5, gap: float = 0.1, **more: Any) -> Reply:
    arrivals = [sent + 1 + gap * place for place in range(tokens)]
    given: dict[str, Any] = {"prompt": 1000, "cached": 0, **more}
    return Reply(session, turn, 100, sent, arrivals[-1], arrivals, list(range(tokens)), **given)


def a_run(setting: Setting, replies: list[Reply], ended: dict[int, float] | None = None) -> Run:
    return Run(setting, replies, ended or {}, Pressure(0.5, 0.9, 2, 1))


STOCK = Setting("stock, radix cache", "prefix")
OURS = Setting("agentkv 512", "agentkv", "agentkv", 512)


def test_a_row_counts_tokens_of_good_turns_over_the_whole_wall_time() -> None:
    failed = Reply(1, 0, 100, 0.0, 10.0, [1.0, 2.0], [1, 2], error="given up")
    run = a_run(STOCK, [reply(0, 0, 0.0), failed], {0: 1.4})
    row = results.row([run], [[], []])
    assert row["output_tok_s"]["median"] == pytest.approx(5 / 10)
    assert row["turns_failed"] == [-1] and row["sessions_finished"] == [1] and row["errors"] == ["given up"]
    assert row["sessions_per_minute"]["median"] == pytest.approx(6)
    assert row["ttft_s"]["p50"] == pytest.approx(1) and row["ms_between_tokens"]["p99"] == pytest.approx(100)
    assert row["turns_in_flight_mean"]["median"] == pytest.approx((1.4 + 10) / 10)
    assert row["pool"]["retractions"]["max"] == 1


def test_what_is_computed_again_is_what_goes_beyond_the_new_tokens() -> None:
    first, kept, lost = reply(0, 0, 0.0), reply(0, 1, 2.0, cached=899), reply(0, 1, 4.0)
    run = a_run(STOCK, [first, kept, lost])
    assert results.recomputed(run) == (1000 - 100) + 0 + (1000 - 101)


@pytest.mark.parametrize(("evicted", "role"), [(0, "control"), (300, "measurement")])
def test_a_row_that_compressed_next_to_nothing_calls_itself_a_control(evicted: int, role: str) -> None:
    facts = {"prefill": 100, "state": "new", "evicted": 0, "held": 1000}
    replies = [reply(0, number, float(number), facts=dict(facts)) for number in range(10)]
    for told in replies[:2]:
        told.facts["evicted"] = evicted
    row = results.row([a_run(OURS, replies)], [[]])
    assert (row["role"], row["compressed_share"]) == (role, 0.2 if evicted else 0.0)
    assert row["states"] == {"new": 10, "resumed": 0, "rebuilt": 0}


def test_ratios_are_made_repeat_by_repeat_with_students_interval() -> None:
    found = results.ratio([2.0, 4.0, 8.0], [1.0, 2.0, 2.0])
    logs = [math.log(2), math.log(2), math.log(4)]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / 2)
    half = 4.303 * deviation / math.sqrt(3)
    assert found["median"] == pytest.approx(2) and found["n"] == 3
    assert found["interval"] == pytest.approx([math.exp(mean - half), math.exp(mean + half)])
    assert results.ratio([2.0], [1.0]) == {"median": pytest.approx(2), "interval": None, "n": 1}


def test_a_gain_is_split_into_prefill_and_decode() -> None:
    """One turn at a time: 2 x 4 steps of 0.5 s on stock, of 0.1 s on ours; the rest of 40 s and of 10 s is prefill."""
    slow = [reply(0, 0, 0.0, gap=0.5), reply(0, 1, 37.0, gap=0.5)]
    fast = [reply(0, 0, 0.0, facts={"prefill": 400}), reply(0, 1, 8.6, facts={"prefill": 100})]
    stock, ours = a_run(STOCK, slow), a_run(OURS, fast)
    found = results.split([stock], [ours], results.Costs(prefill=0.001, token=0.05, held=128))
    assert found["stock_s"] == pytest.approx({"prefill": 36.0, "decode": 4.0})
    assert found["ours_s"] == pytest.approx({"prefill": 9.2, "decode": 0.8})
    assert found["prefill_tokens_avoided"] == 2000 - 500
    parts = {"all": 30.0, "prefill_avoided": 1500 * 36 / 2000, "prefill_cheaper": 26.8 - 27.0, "decode_faster": 3.2}
    assert found["saved_s"] == pytest.approx(parts)
    again = 900 + 899
    assert found["limit_nothing_recomputed"] == pytest.approx(40 / (40 - again * 36 / 2000))
    assert found["limit_nor_any_context"] == pytest.approx(40 / (201 * 0.001 + 8 * 0.05))


def test_turns_in_flight_share_the_steps_of_decode() -> None:
    together = [reply(0, 0, 0.0), reply(1, 0, 0.0)]
    found = results.split([a_run(STOCK, together)], [a_run(OURS, together)], results.Costs(0.001, 0.05, 128))
    assert found["stock_s"] == pytest.approx({"prefill": 1.0, "decode": 0.4})


def test_costs_come_from_a_session_alone() -> None:
    run = a_run(STOCK, [reply(0, 0, 0.0), reply(0, 1, 5.0, cached=900, gap=0.2)])
    costs = results.Costs.of(run)
    assert costs.prefill == pytest.approx(1 / 1000)
    assert costs.token == pytest.approx(0.15) and costs.held == pytest.approx(1002.5)


def test_the_faster_stock_setting_is_the_denominator() -> None:
    slow = [a_run(STOCK, [reply(0, 0, 0.0, gap=1.0)])]
    fast = [a_run(STOCK, [reply(0, 0, 0.0, gap=0.5)])]
    assert results.fastest([slow, fast]) is fast


def test_every_regime_has_its_headline() -> None:
    presets = [
        {"regime": "pressured", "ratios": {"agentkv 512": {"median": 2.0}, "agentkv 128": {"median": 3.0}}},
        {"regime": "unpressured", "ratios": {"agentkv 512": {"median": 1.1}}},
        {"regime": "gpu"},
    ]
    assert headline(presets) == {"ratio_pressured": {"median": 2.0}, "ratio_unpressured": {"median": 1.1}}


def drawn(concurrency: int, speed: float, policy: str | None = "agentkv") -> dict[str, Any]:
    row = {"setting": "agentkv 512", "policy": policy, "budget": 512, "output_tok_s": {"median": speed}}
    return {
        "regime": "pressured",
        "configuration": {"concurrency": concurrency, "full_length_max": 4840},
        "rows": [row],
    }


def test_plots_need_more_than_one_point_and_measured_quality(tmp_path: Path) -> None:
    result = {"presets": [drawn(4, 20.0), drawn(1, 8.0)]}
    assert curves(result["presets"]) == {("pressured", "agentkv 512"): [(1, 8.0), (4, 20.0)]}
    quality = tmp_path / "quality.json"
    measured = {"agentkv": {"copy_acc": 0.7}, "rkv": {"copy_acc": None}}
    summary = {"budgets": {"12.5%": {"policies": measured}, "50%": {"policies": {"agentkv": {"copy_acc": 0.9}}}}}
    quality.write_text(json.dumps(summary))
    name = "agentkv 512, pressured (quality at 12.5%)"
    assert points(result["presets"], summary) == [(name, 20.0, 0.7), (name, 8.0, 0.7)]
    summary["budgets"]["512"] = {"policies": {"agentkv": {"copy_acc": 0.6}}}
    assert points(result["presets"], summary)[0] == ("agentkv 512, pressured (quality at 512)", 20.0, 0.6)
    assert points([drawn(1, 8.0)], {"budgets": {"50%": {"policies": measured}}}) == []
    measured["agentkv"]["copy_acc_full"] = 0.95
    stock = drawn(1, 3.0, policy=None)
    stock["rows"][0] |= {"setting": "stock, radix cache", "budget": None}
    assert points([stock], summary) == [("stock, radix cache, pressured (all kept)", 3.0, 0.95)]
    made = plot(result, tmp_path, quality)
    assert [path.name for path in made] == ["throughput-concurrency.png", "quality-throughput.png"]
    assert all(path.stat().st_size > 1000 for path in made)
    assert plot({"presets": [drawn(1, 8.0)]}, tmp_path, tmp_path / "none.json") == []


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_shapes_are_configurations_that_transformers_can_read(shape: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = write_shape(shape, default_model(), tmp_path)
    config = AutoConfig.from_pretrained(folder)
    assert config.num_attention_heads * 128 == (4096 if shape == "qwen3-8b" else 8192)
    assert (config.head_dim, config.num_key_value_heads) == (128, 8)
    assert Vocabulary(folder).size <= config.vocab_size


@pytest.mark.parametrize("gpu", [False, True])
def test_the_stock_server_is_stock(gpu: bool) -> None:
    settings = EngineSettings("stock", Path("/m"), 4096, 512, ("--dtype", "auto"))
    command = settings.command(1234, "k", gpu)
    assert "sglang.launch_server" in command and ("--attention-backend" in command) is not gpu
    assert command[command.index("--max-total-tokens") + 1] == "4096"
    assert settings.environment(gpu)["SGLANG_PLUGINS"] == "agentkv_cpu"
    assert ("SGLANG_PLATFORM" in settings.environment(gpu)) is not gpu
    ours = EngineSettings("agentkv", Path("/m")).command(1234, "k", gpu)
    assert "engine" in ours and "--max-total-tokens" not in ours
