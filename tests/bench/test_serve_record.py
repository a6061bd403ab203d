"""Runs of `agentkv bench serve` that are kept, so that a benchmark that was cut off goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentkv_serve.bench.serve.client import Reply, Setting
from agentkv_serve.bench.serve.engine import Pressure
from agentkv_serve.bench.serve.load import Run
from agentkv_serve.bench.serve.record import ALONE, Record

STOCK = Setting("stock, streaming sessions, 3 at a time", "session", admitted=3)
OURS = Setting("agentkv 512", "agentkv", "agentkv", 512)
BOTH = (STOCK, OURS)


def a_run(setting: Setting, sent: float = 1.5) -> Run:
    reply = Reply(4, 1, 100, sent, sent + 2, [sent + 1, sent + 2], [7, 8], prompt=300, cached=20, facts={"held": 9})
    return Run(setting, [reply], {4: sent + 2}, Pressure(0.5, 0.9, 2, 1))


def record(folder: Path | None, boot: str = "a", **configuration: Any) -> Record:
    return Record(folder, {"pool": 100, **configuration}, boot)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    runs = {setting.name: a_run(setting) for setting in BOTH}
    first = record(tmp_path / "runs")
    for run in runs.values():
        first.save(0, run)
    first.save(ALONE, a_run(OURS, 9.0))
    again = record(tmp_path / "runs")
    assert again.load(0, BOTH) == runs
    assert again.load(ALONE, [OURS]) == {OURS.name: a_run(OURS, 9.0)}
    assert again.load(1, BOTH) == {}
    assert list(again.machines) == ["a"] and again.machines["a"]["cores"] >= 1
    assert not list((tmp_path / "runs").glob("*.part"))


def test_runs_of_another_configuration_are_not_taken_up(tmp_path: Path) -> None:
    record(tmp_path).save(0, a_run(OURS))
    assert record(tmp_path, pool=200).load(0, [OURS]) == {}


def test_a_repeat_is_never_put_together_from_two_machines(tmp_path: Path) -> None:
    record(tmp_path, "a").save(0, a_run(STOCK))
    other = record(tmp_path, "b")
    assert other.load(0, BOTH) == {} and other.machines == {}
    assert set(record(tmp_path, "a").load(0, BOTH)) == {STOCK.name}
    other.save(0, a_run(STOCK, 3.0))
    other.save(0, a_run(OURS, 5.0))
    third = record(tmp_path, "c")
    assert third.load(0, BOTH)[STOCK.name].replies[0].sent == 3.0
    assert list(third.machines) == ["b"]


def test_without_a_folder_nothing_is_kept() -> None:
    nowhere = record(None)
    nowhere.save(0, a_run(OURS))
    assert nowhere.load(0, [OURS]) == {} and list(nowhere.machines) == ["a"]
