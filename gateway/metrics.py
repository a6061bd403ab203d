"""Prometheus metrics of one gateway. No label ever carries a session, a key or a client's free text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import RestrictedRegistry

_BUSY = 1.0  # seconds
Labelled = TypeVar("Labelled", Counter, Histogram)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._children: dict[tuple[Any, ...], Any] = {}
        self.requests = Counter(
            "agentkv_requests_total", "Replies by route and status.", ["route", "status"], registry=registry
        )
        self.inflight = Gauge("agentkv_requests_in_flight", "Requests being served.", registry=registry)
        self.duration = Histogram(
            "agentkv_request_duration_seconds",
            "Time from request to the last byte.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.ttft = Histogram(
            "agentkv_time_to_first_token_seconds",
            "Time from request to the first content frame.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.itl = Histogram(
            "agentkv_inter_token_seconds",
            "Mean time between output tokens of a streamed turn.",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2),
            registry=registry,
        )
        self.budgets = Histogram(
            "agentkv_budget_tokens",
            "KV budgets of turns; full ones count as infinite.",
            buckets=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
            registry=registry,
        )
        self.held = Histogram(
            "agentkv_turn_held_tokens",
            "KV tokens that a session holds after a turn.",
            buckets=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
            registry=registry,
        )
        self.store_seconds = Histogram(
            "agentkv_store_seconds",
            "Time of a call to the shared session store.",
            ["outcome"],
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
            registry=registry,
        )
        self.turns = Counter(
            "agentkv_turns_total",
            "Turns by the state that the engine reported.",
            ["state", "reason"],
            registry=registry,
        )
        self.mismatches = Counter(
            "agentkv_state_mismatches_total",
            "Turns whose state was not the one announced in the header.",
            ["expected", "state"],
            registry=registry,
        )
        self.tokens = Counter("agentkv_tokens_total", "Tokens by kind.", ["kind"], registry=registry)
        self.uncommitted = Counter(
            "agentkv_turns_uncommitted_total",
            "Turns that left no trace in their session.",
            ["reason"],
            registry=registry,
        )
        self.upstream_errors = Counter(
            "agentkv_upstream_errors_total", "Failures of workers.", ["worker", "kind"], registry=registry
        )
        self.aborts = Counter(
            "agentkv_aborts_total",
            "Turns aborted upstream because the client left.",
            ["delivered"],
            registry=registry,
        )
        self.workers = Gauge("agentkv_worker_up", "1 when the worker is healthy.", ["worker"], registry=registry)
        self.store_down = Gauge(
            "agentkv_store_down", "1 while sessions are not shared since Redis is down.", registry=registry
        )
        self.sessions = Gauge("agentkv_store_sessions", "Sessions in the store.", registry=registry)
        self.resident = Gauge(
            "agentkv_session_kv_tokens", "KV tokens that sessions hold.", ["worker"], registry=registry
        )

    def of(self, metric: Labelled, *labels: str) -> Labelled:
        """The child of a metric for these labels, found without the metric's own lock and checks. Not for metrics that
        are cleared."""
        key = (metric, *labels)
        child: Labelled | None = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)


class MetricsPort:
    """Metrics on a port and a thread of their own: a busy gateway answers too, and clients need not see them."""

    def __init__(self, metrics: Metrics, sample: Callable[[], Coroutine[Any, Any, None]], host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, host, _Sampled(metrics, sample))
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop answering; not to be called by the event loop's own thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Sampled(CollectorRegistry):
    """A gateway's metrics, its gauges brought up to date by the event loop when they are collected."""

    def __init__(self, metrics: Metrics, sample: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._metrics = metrics
        self._sample = sample
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        self._bring_up_to_date()
        return self._metrics.registry.collect()

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        self._bring_up_to_date()
        return self._metrics.registry.restricted_registry(names)

    def _bring_up_to_date(self) -> None:
        # A loop that is busy for longer than this leaves the gauges as they were.
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._sample(), self._loop).result(_BUSY)
