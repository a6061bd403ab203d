"""The simulated fleet: exact where the answer is known, consistent elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentkv_serve.simulate.cli import app
from agentkv_serve.simulate.fleet import Fleet, Scenario, summary
from agentkv_serve.simulate.parameters import FOLDER, ParameterError, Parameters, Service, Workload, load
from agentkv_serve.simulate.worker import Agent, Worker

SERVICE = Service(0.1, 0.001, 0.02, 0.005, 1e-6, pool_tokens=50_000, max_running=8)
WORKLOAD = Workload((1000, 2000), (200, 600), (50, 150), (2, 20), 8)
KNOWN = Parameters({"model": "test"}, SERVICE, WORKLOAD)


def agent(new: int, output: int) -> Agent:
    return Agent(turns_left=1, new=new, output=output, need=new + output)


def finish(worker: Worker, agents: list[tuple[float, Agent]]) -> list[float]:
    """When each agent's turn ends, by the worker alone."""
    ends: dict[int, float] = {}
    joins = []
    for at, one in agents:
        assert worker.make_room(one) is not None
        joins.append((worker.begin_prefill(at, SERVICE.prefill(one.new)), one))
    for at, one in sorted(joins, key=lambda pair: pair[0]):
        while (end := worker.next_end(worker.seen)) is not None and end <= at:
            ends[id(worker.leave(end))] = end
        worker.join(at, one)
    while (end := worker.next_end(worker.seen)) is not None:
        ends[id(worker.leave(end))] = end
    return [ends[id(one)] for _, one in agents]


def test_a_lone_turn_takes_its_prefill_and_its_steps() -> None:
    one = agent(1000, 100)
    (end,) = finish(Worker(SERVICE, 0), [(0.0, one)])
    assert end == pytest.approx(SERVICE.prefill(1000) + 100 * SERVICE.step(1, 1100))


def test_two_turns_share_the_steps_and_a_prefill_stops_decoding() -> None:
    first, second = agent(1000, 100), agent(2000, 100)
    start, pause = SERVICE.prefill(1000), SERVICE.prefill(2000)
    # Both prefills come before the first step of either; then they share every step to the end.
    ends = finish(Worker(SERVICE, 0), [(0.0, first), (0.0, second)])
    both = SERVICE.step(2, 1100 + 2100)
    assert ends == [pytest.approx(start + pause + 100 * both)] * 2


def test_a_smaller_batch_steps_faster_after_a_turn_has_ended() -> None:
    short, long = agent(1000, 10), agent(1000, 50)
    ends = finish(Worker(SERVICE, 0), [(0.0, short), (0.0, long)])
    begin = 2 * SERVICE.prefill(1000)
    middle = begin + 10 * SERVICE.step(2, 1010 + 1050)
    assert ends == [pytest.approx(middle), pytest.approx(middle + 40 * SERVICE.step(1, 1050))]


def test_idle_sessions_give_way_the_oldest_first_and_running_turns_never() -> None:
    worker = Worker(replace(SERVICE, pool_tokens=1000), 0)
    old, young = (Agent(1, held=400, resident=True) for _ in range(2))
    worker.used = 800
    worker.idle = type(worker.idle)({id(old): old, id(young): young})
    assert worker.make_room(agent(250, 50)) == [old] and not old.resident and young.resident
    assert worker.used == 700
    assert worker.make_room(agent(500, 100)) == [young] and worker.used == 900
    assert worker.make_room(agent(100, 50)) is None and worker.used == 900


@pytest.mark.parametrize("budget", [0, 512])
def test_nothing_is_ever_held_beyond_the_pool(budget: int) -> None:
    fleet = Fleet(KNOWN, Scenario(4, budget, 6.0, 20, seed=3))
    tally = fleet.run()
    assert tally.turns > 100
    assert all(0 <= use <= 1 for _, use, _ in tally.series)
    for worker in fleet._workers:
        running = [a for _, _, a in worker.batch]
        idle = sum(a.held for a in worker.idle.values())
        assert worker.used <= SERVICE.pool_tokens and worker.used >= idle + sum(a.need for a in running)
        assert worker.batch_held == sum(a.need for a in running)


def test_with_room_for_all_every_turn_finds_its_session() -> None:
    roomy = replace(KNOWN, service=replace(SERVICE, pool_tokens=10**9))
    row = summary(scenario := Scenario(5, 0, 1.0, 30), Fleet(roomy, scenario).run())
    assert row["resumed"] == 1 and row["gave_way"] == row["moved"] == row["refused"] == 0
    assert row["queue_p95"] == 0 and 0 < row["prompt_tokens_saved"] < 1


def test_a_small_budget_keeps_sessions_that_full_ones_push_out() -> None:
    small = replace(KNOWN, service=replace(SERVICE, pool_tokens=20_000))
    rows = {b: summary(s := Scenario(4, b, 5.0, 60, seed=1), Fleet(small, s).run()) for b in (0, 512)}
    assert rows[512]["resumed"] > 0.99 > rows[0]["resumed"]
    assert rows[512]["prompt_tokens_saved"] > rows[0]["prompt_tokens_saved"]
    assert rows[512]["pool_use"] < rows[0]["pool_use"]
    assert rows[512]["first_token_p95"] < rows[0]["first_token_p95"]


def test_sessions_of_lost_workers_go_on_elsewhere() -> None:
    calm, stormy = (Scenario(10, 512, 2.0, 60, leaving=share, seed=2) for share in (0.0, 0.3))
    before, after = summary(calm, Fleet(KNOWN, calm).run()), summary(stormy, Fleet(KNOWN, stormy).run())
    assert before["moved"] == 0 < after["moved"]
    assert after["resumed"] < before["resumed"]
    assert after["turns"] > 0.8 * before["turns"], "the others take over"


def test_a_session_that_outgrows_every_pool_is_refused() -> None:
    tiny = replace(KNOWN, service=replace(SERVICE, pool_tokens=900))
    assert Fleet(tiny, Scenario(2, 0, 5.0, 20)).run().refused > 0
    assert Fleet(tiny, Scenario(2, 512, 5.0, 20)).run().refused == 0


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [summary(s := Scenario(3, 512, 2.0, 20, seed=seed), Fleet(KNOWN, s).run()) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_parameters_name_their_source(file: Path) -> None:
    known = load(file)
    assert {"model", "machine", "command", "date"} <= set(known.source)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"service": {"step_base": 0}}, "step_base"),
        ({"service": {"pool_tokens": -1}}, "pool_tokens"),
        ({"service": {"speed": 1}}, "speed"),
        ({"workload": {"pause": [5, 2]}}, "pause"),
        ({"workload": {"turns": "many"}}, "turns"),
    ],
)
def test_wrong_parameters_are_named(tmp_path: Path, change: dict[str, dict[str, object]], named: str) -> None:
    data = json.loads(KNOWN.dump())
    for part, values in change.items():
        data[part] |= values
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(ParameterError, match=named):
        load(tmp_path / "p.json")


def test_parameters_are_read_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(KNOWN.dump())
    assert load(tmp_path / "p.json") == KNOWN


def test_the_command_prints_one_row_for_each_fleet_and_plots(tmp_path: Path) -> None:
    words = ["fleet", "--workers", "2,4", "--budget", "full,512", "--minutes", "5", "--arrivals", "2"]
    said = CliRunner().invoke(app, [*words, "--json"])
    assert said.exit_code == 0
    runs = json.loads(said.stdout)["runs"]
    assert [(r["workers"], r["budget"]) for r in runs] == [(2, "full"), (2, 512), (4, "full"), (4, 512)]
    plotted = CliRunner().invoke(app, [*words, "--plot", str(tmp_path / "fleet.png")])
    assert plotted.exit_code == 0 and "Simulated fleet" in plotted.stdout
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["--workers", "0"], ["--budget", "some"], ["--parameters", "/none.json"]])
def test_wrong_flags_are_named(words: list[str]) -> None:
    said = CliRunner().invoke(app, ["fleet", *words])
    assert said.exit_code == 2 and "error:" in said.output


@pytest.mark.long
def test_ten_thousand_workers_can_be_simulated() -> None:
    scenario = Scenario(10_000, 512, 0.5, 10)
    assert summary(scenario, Fleet(KNOWN, scenario).run())["turns"] > 100_000
