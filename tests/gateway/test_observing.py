"""Metrics, traces and logs: what they say, and what they never say."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentkv_serve.children import free_port
from agentkv_serve.gateway.logs import configure
from agentkv_serve.gateway.settings import LogSettings, TelemetrySettings
from agentkv_serve.gateway.telemetry import Tracing
from tests.gateway.conftest import Stack, Start, user
from tests.gateway.engine import Answer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_metrics_count_turns_and_name_nobody(stack: Stack) -> None:
    messages = [user("Hi")]
    stack.say(messages, headers={"X-AgentKV-Session": "very-secret-id"})
    messages.append(user("More"))
    stack.post(messages, headers={"X-AgentKV-Session": "very-secret-id"}, stream=True)
    text = stack.http.get("/metrics").text
    assert 'agentkv_turns_total{reason="",state="new"} 1.0' in text
    assert 'agentkv_turns_total{reason="",state="resumed"} 1.0' in text
    assert 'agentkv_worker_up{worker="w0"} 1.0' in text
    assert "agentkv_time_to_first_token_seconds_count 1.0" in text
    assert "agentkv_inter_token_seconds_count 1.0" in text
    assert 'agentkv_tokens_total{kind="generated"} 44.0' in text
    assert stack.metric("agentkv_session_kv_tokens") > 0
    assert "very-secret-id" not in text
    for line in text.splitlines():
        for label in ("session", "rid", "request_id"):
            assert f'{label}="' not in line


def test_metrics_may_have_a_port_of_their_own(start: Start) -> None:
    stack = start(metrics={"port": 0})
    stack.say([user("Hi")])
    assert stack.http.get("/metrics").status_code == 404
    assert "/metrics" not in stack.http.get("/openapi.json").json()["paths"]
    port = stack.runtime.metrics_port
    assert port is not None
    with httpx.Client(base_url=f"http://127.0.0.1:{port.port}") as http:
        text = http.get("/metrics").text
        assert 'agentkv_turns_total{reason="",state="new"} 1.0' in text
        assert "agentkv_store_sessions 1.0" in text and 'agentkv_worker_up{worker="w0"} 1.0' in text
        assert "agentkv_store_sessions" in http.get("/metrics?name[]=agentkv_store_sessions").text


def test_counters_never_fall(stack: Stack) -> None:
    before = -1.0
    for i in range(3):
        stack.say([user(f"Hi {i}")])
        now = stack.metric("agentkv_tokens_total")
        assert now > before
        before = now


def test_the_clients_trace_goes_through_to_the_engine(stack: Stack) -> None:
    stack.say([user("Hi")], headers={"traceparent": PARENT, "tracestate": "a=b"})
    assert stack.engine.headers[0]["traceparent"] == PARENT
    assert stack.engine.headers[0]["tracestate"] == "a=b"
    stack.say([user("Hi")], headers={"traceparent": "nonsense"})
    assert "traceparent" not in stack.engine.headers[1]


def test_a_turn_is_a_span_of_the_clients_trace(stack: Stack) -> None:
    exporter = InMemorySpanExporter()
    stack.runtime.tracing = Tracing(TelemetrySettings(), exporter)
    messages = [user("Hi")]
    stack.say(messages, headers={"traceparent": PARENT})
    stack.engine.script = lambda body: Answer(refuse=(500, "no"))
    messages.append(user("More"))
    stack.post(messages, headers={"traceparent": PARENT}, stream=True)
    stack.runtime.tracing.close()
    good, bad = exporter.get_finished_spans()
    assert good.name == "chat tiny" and good.parent is not None
    assert f"{good.context.trace_id:032x}" == PARENT.split("-")[1]
    attributes = dict(good.attributes or {})
    assert attributes["agentkv.state"] == "new" and attributes["gen_ai.usage.output_tokens"] == 22
    assert f"{good.context.span_id:016x}" in stack.engine.headers[0]["traceparent"]
    assert bad.status.is_ok is False


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure(LogSettings(format="json"))
    stream = io.StringIO()
    root.handlers[0].setStream(stream)  # type: ignore[attr-defined]
    yield stream
    root.handlers[:], root.level = handlers, level


def test_logs_are_lines_of_json_without_content(log: io.StringIO, stack: Stack) -> None:
    stack.say([user("a very private question")], headers={"X-AgentKV-Session": "private-id", "x-request-id": "r-1"})
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    turn = next(line for line in lines if line["event"].startswith("turn"))
    assert (turn["event"], turn["request_id"], turn["state"], turn["tenant"]) == ("turn stop", "r-1", "new", "local")
    assert len(turn["session"]) == 16
    assert "private" not in log.getvalue() and "Hello from" not in log.getvalue()


def test_readiness_ends_before_the_process_and_streams_are_finished(start: Start, model_folder: Path) -> None:
    stack = start()
    stack.engine.script = lambda body: Answer("one two three four", gap=0.3, pieces=4)
    port = free_port()
    flags = ["--model-path", str(model_folder), "--worker", stack.servers[0].url, "--port", str(port)]
    command = [sys.executable, "-m", "agentkv_serve", "gateway", *flags, "--set", "shutdown_delay=0.8"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=dict(os.environ))
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/readyz").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.05)
        body = {"model": "tiny", "messages": [user("Hi")], "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=20) as reply:
            frames = reply.iter_lines()
            next(frames)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert httpx.get(f"{url}/readyz").json()["status"] == "stopping"
            assert "data: [DONE]" in list(frames)
        assert process.wait(20) == 0 or process.returncode == -signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
