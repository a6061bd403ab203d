"""Bad input: an OpenAI-shaped error with the right status, and a session that is as it was."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from agentkv_serve.gateway.turns.plan import unique_calls
from tests.gateway.conftest import Stack, Start, user
from tests.gateway.engine import Answer

M = [user("Hi")]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": M, **fields}


BODIES: list[tuple[str, Any, int, str]] = [
    ("unknown model", chat(model="gpt-9"), 404, "model_not_found"),
    ("no model", {"messages": M}, 400, "invalid_request"),
    ("model of a wrong type", chat(model=["tiny"]), 400, "invalid_request"),
    ("not an object", [1, 2], 400, "invalid_request"),
    ("no messages", {"model": "tiny"}, 400, "invalid_request"),
    ("empty messages", chat(messages=[]), 400, "invalid_request"),
    ("a message that is no object", chat(messages=["hi"]), 400, "invalid_request"),
    ("an unknown role", chat(messages=[{"role": "robot", "content": "x"}]), 400, "invalid_request"),
    ("a role of a wrong type", chat(messages=[{"role": {}, "content": "x"}]), 400, "invalid_request"),
    ("content of a wrong type", chat(messages=[{"role": "user", "content": 3}]), 400, "invalid_request"),
    ("a part without a type", chat(messages=[{"role": "user", "content": [{"text": "x"}]}]), 400, "invalid_request"),
    (
        "a part with a wrong text",
        chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        400,
        "invalid_request",
    ),
    ("tool calls of a wrong type", chat(messages=[{"role": "assistant", "tool_calls": {}}]), 400, "invalid_request"),
    ("a tool call without function", chat(messages=[{"role": "assistant", "tool_calls": [1]}]), 400, "invalid_request"),
    ("tools of a wrong type", chat(tools={"a": 1}), 400, "invalid_request"),
    ("a tool without a name", chat(tools=[{"type": "function", "function": {}}]), 400, "invalid_request"),
    ("stream of a wrong type", chat(stream="yes"), 400, "invalid_request"),
    ("stream_options of a wrong type", chat(stream_options=[1]), 400, "invalid_request"),
    ("max_tokens zero", chat(max_tokens=0), 400, "invalid_request"),
    ("max_tokens of a wrong type", chat(max_tokens="many"), 400, "invalid_request"),
    ("n zero", chat(n=0), 400, "invalid_request"),
    ("n of a wrong type", chat(n=True), 400, "invalid_request"),
    ("too long a completion", chat(max_tokens=4096), 400, "context_length_exceeded"),
    ("a prompt over the limit", chat(messages=[user("x" * 5000)]), 400, "context_length_exceeded"),
    ("the engine's own fields", chat(input_ids=[1, 2]), 400, "field_not_allowed"),
    ("a logit processor", chat(custom_logit_processor="code"), 400, "field_not_allowed"),
    ("a chat template", chat(chat_template_kwargs={"chat_template": "x"}), 400, "invalid_request"),
    ("template arguments of a wrong type", chat(chat_template_kwargs=3), 400, "invalid_request"),
    ("agentkv of a wrong type", chat(agentkv=7), 400, "invalid_request"),
    ("an unknown agentkv field", chat(agentkv={"bugdet": 512}), 400, "invalid_request"),
    ("two session ids in the body", chat(session_id="a", metadata={"session_id": "b"}), 400, "session_id_conflict"),
    ("a session id of a wrong type", chat(session_id=5), 400, "invalid_session_id"),
    ("a budget in the body", chat(agentkv={"budget": 96}), 400, "invalid_budget"),
]

HEADERS: list[tuple[str, dict[str, str], int, str]] = [
    ("budget -1", {"X-AgentKV-Budget": "-1"}, 400, "invalid_budget"),
    ("budget abc", {"X-AgentKV-Budget": "abc"}, 400, "invalid_budget"),
    ("budget 96", {"X-AgentKV-Budget": "96"}, 400, "invalid_budget"),
    ("budget 127", {"X-AgentKV-Budget": "127"}, 400, "invalid_budget"),
    ("budget above the cap", {"X-AgentKV-Budget": "1025"}, 400, "invalid_budget"),
    ("full above the cap", {"X-AgentKV-Budget": "full"}, 400, "invalid_budget"),
    ("an empty budget", {"X-AgentKV-Budget": ""}, 400, "invalid_budget"),
    ("a huge budget", {"X-AgentKV-Budget": "9" * 400}, 400, "invalid_budget"),
    ("a malformed session id", {"X-AgentKV-Session": "no spaces please"}, 400, "invalid_session_id"),
    ("an empty session id", {"X-AgentKV-Session": ""}, 400, "invalid_session_id"),
    ("a long session id", {"X-AgentKV-Session": "x" * 257}, 400, "invalid_session_id"),
    ("two session ids", {"X-AgentKV-Session": "a", "X-Session-Id": "b"}, 400, "session_id_conflict"),
    ("a malformed policy", {"X-AgentKV-Policy": "Not A Policy"}, 400, "invalid_request"),
    ("a malformed flag", {"X-AgentKV-Session-Final": "perhaps"}, 400, "invalid_request"),
    ("a malformed way to retain", {"X-AgentKV-Retain": "some"}, 400, "invalid_request"),
    ("a malformed affinity", {"X-AgentKV-Affinity": "warm"}, 400, "invalid_request"),
    ("a malformed limit", {"X-AgentKV-Session-Token-Limit": "0"}, 400, "invalid_request"),
]


@pytest.fixture
def capped(start: Start) -> Stack:
    return start(budget={"cap": 1024, "auto": 1024})


def expect(reply: Any, status: int, code: str) -> None:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["code"] == code
    assert error["message"]
    assert reply.headers["x-agentkv-error-code"] == code


def test_every_bad_body_is_refused_and_changes_nothing(capped: Stack) -> None:
    messages = [user("Hi")]
    capped.say(messages, headers={"X-AgentKV-Session": "s"})
    for what, body, status, code in BODIES:
        headers = {} if "session" in what else {"X-AgentKV-Session": "s"}
        reply = capped.http.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == status, f"{what}: {reply.status_code} {reply.text}"
        expect(reply, status, code)
    assert len(capped.engine.requests) == 1
    messages.append(user("More"))
    assert capped.say(messages, headers={"X-AgentKV-Session": "s"})["agentkv"]["state"] == "resumed"


def test_every_bad_header_is_refused_and_changes_nothing(capped: Stack) -> None:
    messages = [user("Hi")]
    capped.say(messages, headers={"X-AgentKV-Session": "s"})
    for what, headers, status, code in HEADERS:
        reply = capped.post(messages, headers={"X-AgentKV-Session": "s", **headers})
        assert reply.status_code == status, f"{what}: {reply.status_code} {reply.text}"
        expect(reply, status, code)
    messages.append(user("More"))
    assert capped.say(messages, headers={"X-AgentKV-Session": "s"})["agentkv"]["state"] == "resumed"


def test_a_wrong_budget_names_both_bounds(capped: Stack) -> None:
    message = capped.post(M, headers={"X-AgentKV-Budget": "96"}).json()["error"]["message"]
    assert "128" in message and "1024" in message


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b'{"model": "tiny", ', {}, 400, "invalid_json"),
        (b"", {}, 400, "invalid_json"),
        (b"\xff\xfe", {}, 400, "invalid_json"),
        (b'{"model": "\\ud800"}', {}, 400, "invalid_json"),
        (b"[" * 100_000, {}, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b"{}", {"content-encoding": "gzip"}, 415, "unsupported_encoding"),
        (b" " * 5000, {}, 413, "body_too_large"),
    ],
)
def test_malformed_bodies(start: Start, content: bytes, headers: dict[str, str], status: int, code: str) -> None:
    stack = start(limits={"body_bytes": 200_000 if content.startswith(b"[") else 4096})
    reply = stack.http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json", **headers}
    )
    expect(reply, status, code)


def test_a_body_without_a_length_is_bounded_too(start: Start) -> None:
    stack = start(limits={"body_bytes": 4096})

    def chunks() -> Any:
        for _ in range(100):
            yield b" " * 1000

    reply = stack.http.post("/v1/chat/completions", content=chunks(), headers={"content-type": "application/json"})
    expect(reply, 413, "body_too_large")


def test_several_choices_run_without_a_session_or_are_refused_in_one(shared: Stack) -> None:
    expect(shared.post(M, headers={"X-AgentKV-Session": "s"}, n=2), 400, "n_not_supported_in_session")
    reply = shared.post(M, n=2)
    assert reply.status_code == 200
    assert len(reply.json()["choices"]) == 2
    assert reply.headers["x-agentkv-session-state"] == "stateless"
    assert reply.headers["x-agentkv-stateless-reason"] == "n"
    sent = shared.engine.requests[0]
    assert sent["messages"] == M and "input_ids" not in sent and "custom_params" not in sent
    assert sent["cache_salt"]


@pytest.mark.parametrize("name", ["rid", "cache_salt", "priority", "return_token_ids", "made_up"])
def test_other_control_fields_are_dropped(shared: Stack, name: str) -> None:
    shared.say([user("Hi")], **{name: "mine"})
    assert shared.engine.requests[0].get(name) != "mine"


def test_unknown_paths_and_methods_are_answered_in_the_same_shape(shared: Stack) -> None:
    expect(shared.http.get("/v1/nothing"), 404, "not_found")
    expect(shared.http.get("/v1/chat/completions"), 405, "method_not_allowed")
    expect(shared.http.post("/abort_request", json={"rid": ""}), 404, "not_found")
    expect(shared.http.get("/v1/models/gpt-9"), 404, "model_not_found")


@pytest.mark.parametrize(
    ("refuse", "status", "code"),
    [
        ((400, "agentkv:stale_epoch: behind"), 409, "session_conflict"),
        ((400, "agentkv:session_busy: busy"), 409, "session_busy"),
        ((400, "agentkv:budget: too small"), 400, "invalid_budget"),
        (
            (400, "The input (9 tokens) is longer than the model's context length (8 tokens)."),
            400,
            "context_length_exceeded",
        ),
        ((400, "temperature must be non-negative"), 400, "invalid_request"),
        ((500, "Traceback: /secret/path"), 502, "worker_error"),
        ((401, "no"), 502, "worker_refused"),
        ((429, "busy"), 503, "worker_overloaded"),
        ((503, "loading"), 503, "worker_overloaded"),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_refusals_of_the_engine(shared: Stack, refuse: tuple[int, str], status: int, code: str, streamed: bool) -> None:
    from tests.gateway.engine import Answer

    messages = [user("Hi")]
    shared.say(messages, headers={"X-AgentKV-Session": "s"})
    messages.append(user("More"))
    shared.engine.script = lambda body: Answer(refuse=refuse)
    reply = shared.post(messages, headers={"X-AgentKV-Session": "s"}, stream=streamed)
    expect(reply, status, code)
    assert "secret" not in reply.text
    shared.engine.script = lambda body: Answer("fine")
    assert shared.say(messages, headers={"X-AgentKV-Session": "s"})["agentkv"]["state"] == "resumed"


def test_a_long_call_id_holds_nobody_up() -> None:
    """Ids are the client's to choose: reading one takes no more time the longer it is."""
    unique = "call_" + "0123456789abcdef" * 2
    calls = [{"id": "a" * 100_000 + "!"}, {"id": "functions.f:0"}, {"id": unique}]
    began = time.perf_counter()
    assert unique_calls({"role": "assistant", "tool_calls": calls}) == [unique]
    assert time.perf_counter() - began < 0.5


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def test_what_is_nested_too_deeply_is_refused(stack: Stack) -> None:
    """Deeper than JSON can be written, though not too deep to be read."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested(400)}}]
    for fields in ({}, {"n": 2}, {"stream": True}):
        expect(stack.post(M, tools=tools, **fields), 400, "invalid_request")
    block = {"type": "tool_use", "id": "t", "name": "f", "input": nested(400)}
    body = {"model": "tiny", "max_tokens": 5, "messages": [*M, {"role": "assistant", "content": [block]}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = stack.http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), path
    assert stack.engine.requests == []


def test_a_reply_with_deep_arguments_leaves_its_session_usable(stack: Stack) -> None:
    messages, headers = [user("Hi")], {"X-AgentKV-Session": "s"}
    stack.engine.script = lambda body: Answer(calls=[("f", json.dumps(nested(400)))])
    stack.say(messages, headers=headers)
    stack.engine.script = lambda body: Answer("fine")
    assert stack.say([user("Hi")], headers=headers)["choices"][0]["message"]["content"] == "fine"
