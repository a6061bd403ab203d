"""What a worker tells Prometheus about its sessions, on SGLang's own `/metrics` (on unless `--no-agentkv-metrics`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from agentkv_serve.phase_tagger import Label, Phase, fold

if TYPE_CHECKING:
    from agentkv_serve.engine.runtime import Runtime
    from agentkv_serve.engine.sessions import SessionRecord
    from agentkv_serve.engine.wire import Facts

REFRESH_SECONDS = 1.0
"""Gauges are counted anew this often at most, unless a session's turn ended or its state went."""
PHASE_OF_LABEL = np.asarray([int(fold(label)) for label in Label], dtype=np.int64)


class WorkerMetrics:
    """The one owner of a worker's metrics. Labels never name a session.

    All ranks of a tensor-parallel worker hold the same sessions, so one of them reports. SGLang's processes share
    their numbers through files (prometheus_client's multiprocess mode), and the library chooses that mode when it is
    imported: hence no import of it before the server has set the folder.
    """

    def __init__(self, *, reports: bool) -> None:
        self._reports = reports
        self._seen: dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = {}  # held, evicted [phases]
        self._changed = True
        self._counted = 0.0
        self._unread: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if not reports:
            return
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        # SGLang reads the shared files: this registry is for who looks from inside.
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"registry": self.registry}
        newest: dict[str, Any] = {**common, "multiprocess_mode": "mostrecent"}
        self.held = Gauge(
            "agentkv_held_tokens",
            "KV tokens per layer and KV head that sessions hold, as of each one's last finished turn.",
            ["phase"],
            **newest,
        )
        self.evicted = Gauge(
            "agentkv_evicted_tokens",
            "Tokens of the same sessions whose keys and values were evicted, per layer and KV head.",
            ["phase"],
            **newest,
        )
        self.sessions = Gauge(
            "agentkv_sessions", "Sessions that run a turn (live), or only hold KV (idle).", ["state"], **newest
        )
        self.auxiliary = Gauge(
            "agentkv_auxiliary_bytes", "Query rings and automaton state of one rank, allocated at start.", **newest
        )
        self.compactions = Counter("agentkv_compactions", "Compressions of a session's KV.", **common)
        self.seconds = Histogram(
            "agentkv_compaction_seconds",
            "Time of one compression of all layers, on the device.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
            **common,
        )
        self.reclaimed = Counter(
            "agentkv_sessions_reclaimed", "Idle sessions whose KV gave way to running turns.", **common
        )
        self.rebuilds = Counter(
            "agentkv_rebuilds", "Turns that had to compute their whole prompt anew.", ["reason"], **common
        )

    def started(self, auxiliary_bytes: int) -> None:
        """The pools are allocated."""
        if self._reports:
            self.auxiliary.set(auxiliary_bytes)

    def mark(self, device: torch.device) -> torch.cuda.Event | float:
        """A point in time on the device, for `compacted`."""
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def compacted(self, began: torch.cuda.Event | float) -> None:
        """A compression whose work was queued since `began`. On a GPU its time is read when it is known."""
        if not self._reports:
            return
        self.compactions.inc()
        if isinstance(began, float):
            self.seconds.observe(time.perf_counter() - began)
        else:
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended.record()
            self._unread.append((began, ended))

    def rebuilt(self, reason: str) -> None:
        """A turn starts over."""
        if self._reports:
            self.rebuilds.labels(reason).inc()

    def gave_way(self) -> None:
        """An idle session was released for others."""
        if self._reports:
            self.reclaimed.inc()

    def turn_ended(self, record: SessionRecord, facts: Facts) -> None:
        """A turn finished; what its session holds and has lost is known by phase."""
        if not self._reports:
            return
        assert record.labels is not None
        held = np.asarray([facts.phases[phase.name.lower()] for phase in Phase])
        labels = record.labels[: facts.held + facts.evicted]
        total = np.bincount(PHASE_OF_LABEL[labels], minlength=len(Phase))
        self._seen[record.key] = (held, total - held)
        self._changed = True

    def closed(self, runtime: Runtime) -> None:
        """A session's KV was released."""
        self._changed = True
        self.refresh(runtime)

    def refresh(self, runtime: Runtime) -> None:
        """Counts the gauges anew if something changed, or if the last time was long ago."""
        now = time.monotonic()
        if not self._reports or (not self._changed and now - self._counted < REFRESH_SECONDS):
            return
        self._changed, self._counted = False, now
        holding = {key for key, slot in runtime.tree.session.slots.items() if slot.kv.holds_kv}
        self._seen = {key: value for key, value in self._seen.items() if key in holding}
        live = {record.key for record in runtime.sessions if record.running is not None}
        self.sessions.labels("live").set(len(live))
        self.sessions.labels("idle").set(len(holding - live))
        zero = np.zeros(len(Phase))
        held = sum((held for held, _ in self._seen.values()), zero)
        evicted = sum((evicted for _, evicted in self._seen.values()), zero)
        for phase in Phase:
            self.held.labels(phase.name.lower()).set(float(held[phase]))
            self.evicted.labels(phase.name.lower()).set(float(evicted[phase]))
        while self._unread and self._unread[0][1].query():  # type: ignore[no-untyped-call]
            began, ended = self._unread.pop(0)
            self.seconds.observe(began.elapsed_time(ended) / 1e3)
