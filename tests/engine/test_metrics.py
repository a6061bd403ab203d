"""A worker's metrics: sums over its sessions by phase, without a session's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentkv_serve.engine.metrics import WorkerMetrics
from agentkv_serve.engine.sessions import SessionRecord
from agentkv_serve.engine.wire import Facts
from agentkv_serve.phase_tagger import Label


def record(key: str, running: str | None = None, **tokens: int) -> SessionRecord:
    """A session whose tokens have these labels."""
    labels = np.concatenate([np.full(count, Label[name.upper()]) for name, count in tokens.items()])
    return SessionRecord(key, epoch=0, last_used=0.0, running=running, labels=labels.astype(np.int8))


def facts(held: int, evicted: int, **phases: float) -> Facts:
    every = {"others": 0.0, "think": 0.0, "act": 0.0, "tool": 0.0, **phases}
    return Facts("resumed", None, held + evicted + 1, held, evicted, 0, every)


def worker(*records: SessionRecord) -> Any:
    slots = {record.key: SimpleNamespace(kv=SimpleNamespace(holds_kv=True)) for record in records}
    return SimpleNamespace(tree=SimpleNamespace(session=SimpleNamespace(slots=slots)), sessions=list(records))


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_held_and_evicted_are_sums_over_sessions_by_phase() -> None:
    metrics = WorkerMetrics(reports=True)
    one, two = record("one", think=100, tool=300), record("two", running="rid", act=50, input=50)
    runtime = worker(one, two)
    metrics.turn_ended(one, facts(128, 272, think=28.5, tool=99.5))
    metrics.turn_ended(two, facts(100, 0, act=50.0, others=50.0))
    metrics.refresh(runtime)
    held = {phase: value(metrics, "agentkv_held_tokens", phase=phase) for phase in ("others", "think", "act", "tool")}
    lost = {
        phase: value(metrics, "agentkv_evicted_tokens", phase=phase) for phase in ("others", "think", "act", "tool")
    }
    assert held == {"others": 50.0, "think": 28.5, "act": 50.0, "tool": 99.5}
    assert lost == {"others": 0.0, "think": 71.5, "act": 0.0, "tool": 200.5}
    assert value(metrics, "agentkv_sessions", state="live") == 1.0
    assert value(metrics, "agentkv_sessions", state="idle") == 1.0


def test_a_session_that_lost_its_state_is_no_longer_counted() -> None:
    metrics = WorkerMetrics(reports=True)
    one, two = record("one", think=10), record("two", tool=20)
    runtime = worker(one, two)
    for session, phase, count in ((one, "think", 10), (two, "tool", 20)):
        metrics.turn_ended(session, facts(count, 0, **{phase: float(count)}))
    metrics.refresh(runtime)
    del runtime.tree.session.slots["two"]
    metrics.closed(runtime)
    assert value(metrics, "agentkv_held_tokens", phase="tool") == 0.0
    assert value(metrics, "agentkv_held_tokens", phase="think") == 10.0
    assert value(metrics, "agentkv_sessions", state="idle") == 1.0


def test_what_happens_is_counted() -> None:
    metrics = WorkerMetrics(reports=True)
    metrics.started(4096)
    for _ in range(3):
        metrics.compacted(metrics.mark(torch.device("cpu")))
    metrics.rebuilt("evicted")
    metrics.rebuilt("evicted")
    metrics.rebuilt("aborted")
    metrics.gave_way()
    assert value(metrics, "agentkv_auxiliary_bytes") == 4096
    assert value(metrics, "agentkv_compactions_total") == 3
    assert value(metrics, "agentkv_compaction_seconds_count") == 3
    assert value(metrics, "agentkv_rebuilds_total", reason="evicted") == 2
    assert value(metrics, "agentkv_rebuilds_total", reason="aborted") == 1
    assert value(metrics, "agentkv_sessions_reclaimed_total") == 1


def test_gauges_are_counted_anew_at_most_once_a_second_unless_something_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("agentkv_serve.engine.metrics.time", SimpleNamespace(monotonic=lambda: now))
    metrics = WorkerMetrics(reports=True)
    one = record("one", think=10)
    runtime = worker(one)
    metrics.refresh(runtime)
    one.running = "rid"
    metrics.refresh(runtime)
    assert value(metrics, "agentkv_sessions", state="live") == 0.0
    now += 1.5
    metrics.refresh(runtime)
    assert value(metrics, "agentkv_sessions", state="live") == 1.0


def test_a_rank_that_does_not_report_counts_nothing() -> None:
    metrics = WorkerMetrics(reports=False)
    metrics.started(1)
    metrics.rebuilt("evicted")
    metrics.gave_way()
    metrics.compacted(metrics.mark(torch.device("cpu")))
    metrics.turn_ended(record("one", think=1), facts(1, 0, think=1.0))
    metrics.closed(worker())
    assert not hasattr(metrics, "registry")
