"""The demo's agent loops against a real gateway, with an engine double behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from agentkv_serve.demo.agent import converse
from agentkv_serve.demo.cli import broken_promises, in_langchain, summary
from agentkv_serve.demo.recording import RECORDING, Recording, load_recording
from agentkv_serve.demo.tools import Airline, run_tool, schema
from agentkv_serve.gateway.app import create_app
from agentkv_serve.gateway.settings import Settings
from agentkv_serve.model import default_model
from tests.gateway.engine import Answer, FakeEngine
from tests.gateway.serving import Serving

CLIENTS = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
CALL = ("get_reservation_details", '{"reservation_id": "XEWRD9"}')


@pytest.fixture(scope="module")
def recording() -> Recording:
    return load_recording()


@pytest.fixture
def engine() -> FakeEngine:
    tokenizer = Tokenizer.from_file(str(default_model() / "tokenizer.json"))
    return FakeEngine(tokenizer, model="small", context_length=8192)


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with Serving(engine.app) as worker:
        app = create_app(Settings(model_path=default_model(), workers=({"url": worker.url},)))  # type: ignore[arg-type]
        with Serving(app) as gateway:
            yield gateway.url


def run(client: str, url: str, recording: Recording, budget: str, turns: int) -> list[dict[str, Any]]:
    if client == "openai":
        return list(converse(url, "small", recording, budget, turns))
    return list(in_langchain(CLIENTS, url, "small", budget, turns))


@pytest.mark.parametrize("client", ["openai", "langchain"])
def test_a_model_that_calls_nothing_has_the_recorded_calls_replayed(
    client: str, url: str, engine: FakeEngine, recording: Recording
) -> None:
    small = run(client, url, recording, "512", 13)
    full = run(client, url, recording, "full", 13)
    assert broken_promises(small, 512) == [] and broken_promises(full, None) == []
    assert len(engine.sessions) <= 2
    assert "13 turns" in summary(small, full)
    assert small[0]["did"] == "answered"
    assert small[1]["did"] == "made no tool call; replayed get_reservation_details"
    last = engine.tokenizer.decode(engine.requests[-1]["input_ids"], skip_special_tokens=False)
    assert last.count("Hello from the model.") == 12
    assert "HAT102" in last and "flight HAT030 not available" in last


@pytest.mark.parametrize("client", ["openai", "langchain"])
def test_a_model_that_calls_the_recorded_tool_runs_it_itself(
    client: str, url: str, engine: FakeEngine, recording: Recording
) -> None:
    engine.script = lambda body: Answer("", calls=[CALL]) if len(engine.requests) == 2 else Answer("Well.")
    turns = run(client, url, recording, "512", 3)
    assert [turn["state"] for turn in turns] == ["new", "resumed", "resumed"]
    assert turns[1]["did"] == "called get_reservation_details"
    last = engine.tokenizer.decode(engine.requests[-1]["input_ids"], skip_special_tokens=False)
    assert last.count("james_lee_6136") == 2 and last.count('"reservation_id": "XEWRD9"') >= 2


def test_a_model_that_calls_something_else_gets_its_result_and_the_replay(
    url: str, engine: FakeEngine, recording: Recording
) -> None:
    wrong = ("search_direct_flight", '{"origin": "XXX", "destination": "LAS", "date": "2024-05-21"}')
    engine.script = lambda body: Answer("", calls=[wrong]) if len(engine.requests) == 2 else Answer("Well.")
    turns = run("openai", url, recording, "512", 3)
    assert [turn["state"] for turn in turns] == ["new", "resumed", "resumed"]
    assert turns[1]["did"] == "called another tool; replayed get_reservation_details"
    last = engine.tokenizer.decode(engine.requests[-1]["input_ids"], skip_special_tokens=False)
    assert "Error: not found" in last and "james_lee_6136" in last


def test_every_recorded_call_gives_the_recorded_result(recording: Recording) -> None:
    tools = Airline(recording).tools()
    assert len(recording.calls) == 6
    for call in recording.calls:
        assert run_tool(tools, call.name, call.arguments) == call.result


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("fly", "{}"), ("think", '{"thought": '), ("think", '{"idea": "x"}'), ("think", "[1]"), ("think", "7")],
)
def test_a_wrong_call_is_answered_with_an_error(recording: Recording, name: str, arguments: str) -> None:
    assert run_tool(Airline(recording).tools(), name, arguments).startswith("Error: ")


def test_schemas_name_types_and_required_arguments(recording: Recording) -> None:
    update = schema(Airline(recording).tools()[2])["function"]
    assert update["name"] == "update_reservation_flights"
    assert update["parameters"]["required"] == ["reservation_id", "cabin", "flights", "payment_id"]
    assert update["parameters"]["properties"]["flights"] == {"type": "array", "items": {"type": "object"}}


def turn(**changes: Any) -> dict[str, Any]:
    base = {"state": "resumed", "reason": None, "prompt_tokens": 200, "completion_tokens": 10}
    return {**base, "prefill_tokens": 90, "kv_tokens": 512, **changes}


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ({}, ""),
        ({"state": "rebuilt", "reason": "diverged"}, r"turn 2 is rebuilt \(diverged\)"),
        ({"prefill_tokens": 155}, "155 prompt tokens for 90 new"),
        ({"kv_tokens": 657}, "held 657"),
    ],
)
def test_broken_promises_are_named(later: dict[str, Any], words: str) -> None:
    first = turn(state="new", prompt_tokens=100)
    broken = broken_promises([first, turn(**later)], 512)
    assert len(broken) == bool(words)
    assert all(re.search(words, promise) for promise in broken)


def test_the_recording_names_its_origin_and_licence() -> None:
    data = json.loads(RECORDING.read_text())
    assert "tau-bench" in data["origin"] and data["licence"].startswith("MIT")
