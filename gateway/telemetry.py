"""Traces: the client's trace context goes through to the engine, and each turn is a span when an endpoint is set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentkv_serve.gateway.settings import TelemetrySettings

_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_NAMES = ("traceparent", "tracestate")


class TurnTrace:
    """The trace of one turn. `headers` go to the engine."""

    def __init__(self, headers: Mapping[str, str], span: Span | None = None) -> None:
        self.headers = dict(headers)
        self._span = span

    @property
    def heard(self) -> bool:
        """Whether anybody collects what is said here."""
        return self._span is not None

    def first_token(self) -> None:
        """The first content has come."""
        if self._span:
            self._span.add_event("gen_ai.first_token")

    def end(self, attributes: Mapping[str, Any], error: str | None) -> None:
        """Close the span. Attribute values that are None are left out."""
        if self._span is None:
            return
        self._span.set_attributes({k: v for k, v in attributes.items() if v is not None})
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class Tracing:
    """Makes turn traces. `exporter` stands in for the OTLP exporter in tests."""

    def __init__(self, settings: TelemetrySettings, exporter: SpanExporter | None = None) -> None:
        self._provider: TracerProvider | None = None
        self._propagator = TraceContextTextMapPropagator()
        if settings.otlp_endpoint and exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint)
        if exporter:
            resource = Resource.create({"service.name": settings.service_name})
            self._provider = TracerProvider(resource=resource)
            self._provider.add_span_processor(BatchSpanProcessor(exporter))

    def begin(self, headers: Mapping[str, str], model: str) -> TurnTrace:
        """Begin the trace of a turn from a request's headers."""
        given = {name: headers[name] for name in _NAMES if name in headers}
        if not _PARENT.fullmatch(given.get("traceparent", "")):
            given = {}
        if self._provider is None:
            return TurnTrace(given)
        span = self._provider.get_tracer("agentkv_serve.gateway").start_span(
            f"chat {model}",
            context=self._propagator.extract(given),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": "chat", "gen_ai.request.model": model},
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=set_span_in_context(span))
        return TurnTrace(carrier, span)

    def close(self) -> None:
        """Send what is left."""
        if self._provider:
            self._provider.shutdown()
