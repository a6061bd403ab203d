"""Epoch fencing and the memory of lost sessions."""

from __future__ import annotations

import numpy as np
import pytest

from agentkv_serve.engine.sessions import KvState, SessionTable
from agentkv_serve.engine.wire import TurnSpec, WireError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def spec(epoch: int, session: str = "s") -> TurnSpec:
    return TurnSpec(session, epoch, 512, "agentkv", np.zeros(1, dtype=np.int8), "plain", "start")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> SessionTable:
    return SessionTable(tombstone_seconds=100.0, clock=clock)


def test_an_unseen_session_with_a_history_was_lost_in_a_restart(table: SessionTable) -> None:
    assert table.admit(spec(0)).lost is None
    assert table.admit(spec(4, "other")).lost == "restarted"


def test_a_lower_epoch_is_refused_and_an_equal_one_is_not(table: SessionTable) -> None:
    table.admit(spec(5))
    with pytest.raises(WireError) as caught:
        table.fence(spec(4))
    assert caught.value.code == "stale_epoch"
    assert table.fence(spec(5)) is table.get("s")
    assert table.fence(spec(6)) is table.get("s")
    assert table.get("s").epoch == 5  # type: ignore[union-attr]  # fencing alone changes nothing


def test_state_is_found_by_row_until_the_row_is_freed(table: SessionTable) -> None:
    record = table.admit(spec(0))
    kv = KvState(row=7, slot=3, policy="agentkv", start=40)
    table.bind(record, kv)
    assert table.by_row(7) is record
    assert table.by_row(8) is None and table.by_row(None) is None
    assert table.drop_row(7) is kv
    assert table.by_row(7) is None and record.kv is None
    assert table.drop_row(7) is None


@pytest.mark.parametrize(("running", "reason"), [("rid", "aborted"), (None, "evicted")])
def test_a_freed_row_tells_why(table: SessionTable, running: str | None, reason: str) -> None:
    record = table.admit(spec(0))
    record.running = running
    table.bind(record, KvState(row=1, slot=1, policy="agentkv"))
    table.drop_row(1)
    assert record.lost == reason


def test_a_closed_session_still_fences_and_starts_clean(table: SessionTable) -> None:
    record = table.admit(spec(3))
    table.close("s", "idle")
    assert record.lost == "idle"
    table.close("s")
    assert record.lost is None
    with pytest.raises(WireError):
        table.fence(spec(2))
    table.close("unknown")  # nothing to note


def test_tombstones_go_after_their_time_and_live_sessions_stay(table: SessionTable, clock: Clock) -> None:
    live = table.admit(spec(0, "live"))
    table.bind(live, KvState(row=1, slot=1, policy="agentkv"))
    table.admit(spec(0, "dead"))
    table.admit(spec(0, "running")).running = "rid"
    clock.now = 101.0
    table.admit(spec(0, "fresh"))
    table.sweep()
    assert sorted(record.key for record in table) == ["fresh", "live", "running"]
