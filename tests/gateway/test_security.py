"""What strangers and foreign tenants cannot do, and what broken input cannot break."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.routing import Route

from agentkv_serve.gateway.sessions.identity import Keys
from tests.gateway.conftest import WEATHER, Stack, Start, user
from tests.gateway.engine import FakeEngine

# The page holds no data: what it shows comes from the admin API.
OPEN = {"/healthz", "/readyz", "/metrics", "/openapi.json", "/ui", "/ui/{file}"}


def test_every_route_but_the_probes_needs_a_key(start: Start) -> None:
    stack = start(api_key="client", admin_key="operator", join_token="joining-secret-of-engines")
    asked = 0
    for route in stack.app.router.routes:
        assert isinstance(route, Route), route
        path = re.sub(r"{[^}]+}", "w0", route.path.replace("{file}", "app.js"))
        for method in sorted((route.methods or set()) - {"HEAD"}):
            reply = stack.http.request(method, path)
            if route.path in OPEN:
                assert reply.status_code == 200, path
            else:
                assert reply.status_code == 401, (method, path, reply.text)
                asked += 1
    assert asked >= 20
    assert stack.engine.requests == []


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("org_1", "2345", "m"), ("org_12345", "", "m")),
        (("a", "b", "cm"), ("a", "bc", "m")),
        (("ab", "c", "m"), ("a", "bc", "m")),
        (("a", "b\x00c", "m"), ("a\x00b", "c", "m")),
        (("a", "b", ""), ("a", "", "b")),
        (("a", "x" * 256, "m"), ("a", "x" * 255, "xm")),
    ],
)
def test_no_two_owners_have_one_key(one: tuple[str, str, str], two: tuple[str, str, str]) -> None:
    keys = Keys(b"secret")
    assert keys.session(*one) != keys.session(*two)


def test_keys_of_different_purposes_differ_and_depend_on_the_secret() -> None:
    keys, other = Keys(b"secret"), Keys(b"other")
    assert len({keys.cache_salt("t"), keys.session("t", "", ""), keys.response("t", ""), keys.engine("t", "")}) == 4
    assert keys.session("t", "s", "m") != other.session("t", "s", "m")
    assert keys.sessions("t", "s", "m") == [keys.session("t", "s", "m")]
    rotated = Keys(b"new", b"secret")
    assert rotated.sessions("t", "s", "m")[1] == keys.session("t", "s", "m")


def test_sessions_survive_a_changed_secret(start: Start) -> None:
    stack = start(secret="the-first-secret")
    messages = [user("Hi")]
    stack.say(messages, headers={"X-AgentKV-Session": "s"})
    rotated = Keys(b"the-second-secret", b"the-first-secret")
    stack.runtime.keys = stack.runtime.services.keys = stack.runtime.planner._keys = rotated
    messages.append(user("More"))
    # The engine's key is made of the session's own and the new secret: the state is rebuilt, the tokens stay.
    assert stack.say(messages, headers={"X-AgentKV-Session": "s"})["headers"]["x-agentkv-session-source"] == "header"
    ids = [request["input_ids"] for request in stack.engine.requests]
    assert ids[1][: len(ids[0])] == ids[0]


def test_nothing_of_a_clients_headers_reaches_the_engine(shared: Stack) -> None:
    headers = {
        "x-smg-routing-key": "a",
        "x-smg-target-worker": "0",
        "x-data-parallel-rank": "3",
        "x-dynamo-session-id": "d",
        "x-sglext-return-input-ids": "1",
        "x-forwarded-for": "1.2.3.4",
        "cookie": "c=1",
        "x-agentkv-internal-thing": "1",
        "authorization": "Bearer client",
    }
    shared.say([user("Hi")], headers=headers)
    sent = set(shared.engine.headers[0])
    assert sent <= {
        "host",
        "content-type",
        "content-length",
        "x-sglext-ids-framed",
        "accept",
        "accept-encoding",
        "user-agent",
    }


def test_a_client_cannot_choose_its_salt_or_worker(shared: Stack) -> None:
    shared.say([user("Hi")], cache_salt="mine", rid="0" * 32, extra={"worker": "http://evil"})
    sent = shared.engine.requests[0]
    assert sent["cache_salt"] == shared.runtime.keys.cache_salt("local")
    assert sent["rid"] != "0" * 32 and "extra" not in sent
    shared.say([user("Hi")], headers={"X-AgentKV-Worker": "http://169.254.169.254/"})
    assert len(shared.engine.requests) == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /admin/config HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_malformed_requests_are_closed_and_smuggle_nothing(shared: Stack, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(shared.url).port or 0), 5) as connection:
        connection.settimeout(5)
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        reply = b""
        while piece := connection.recv(65536):
            reply += piece
    assert not reply or reply.startswith(b"HTTP/1.1 4")
    assert b'"budget"' not in reply
    assert shared.engine.requests == []
    assert shared.http.get("/healthz").status_code == 200


# ---- fuzz ---------------------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**63, 2**64, 1e308, -0.0, "", " ", "x", "\u0000", "𝒳" * 10, "x" * 5000),
    *([], {}, [[]], [None], {"a": None}, [{}], {"type": "text"}, {"role": "user"}, [1, "a", None], {"": ""}),
    *("user", "assistant", "tool", "tiny", "auto", "required", "full", "<|im_end|>", "</think>", "\ud7ff", "‮"),
]
CHAT = "/v1/chat/completions"
PATHS = (CHAT, CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1/messages/count_tokens")


def bodies() -> list[Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "X"}'}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    chat = {"model": "tiny", "messages": messages, "tools": [WEATHER], "tool_choice": "auto", "max_tokens": 9}
    more = {"stream_options": {"include_usage": True}, "reasoning_effort": "low", "agentkv": {"budget": 256}}
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
    ]
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    return [
        {**chat, **more},
        {**chat, "stream": True, "metadata": {"session_id": "s"}, "n": 1},
        {"model": "tiny", "prompt": "Once", "n": 1, "echo": False, "stream": True},
        {
            "model": "tiny",
            "max_tokens": 5,
            "messages": blocks,
            "system": "S",
            "tools": [tool],
            "tool_choice": {"type": "any"},
        },
        {
            "model": "tiny",
            "input": items,
            "instructions": "I",
            "tools": [{"type": "function", **tool}],
            "text": {"format": {}},
        },
    ]


def mutate(value: Any, rng: random.Random) -> Any:
    """The value with one random place in it replaced, doubled or left out."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        i = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:i] + value[i:] + value[i:]
        return [*value[:i], mutate(value[i], rng), *value[i + 1 :]]
    return rng.choice(JUNK)


def fuzz(stack: Stack, count: int, seed: int) -> dict[int, int]:
    rng = random.Random(seed)
    names = (
        "X-AgentKV-Session",
        "X-AgentKV-Budget",
        "X-Session-Id",
        "X-AgentKV-Session-Final",
        "x-request-id",
        "traceparent",
    )
    values = ("", "s", "a b", "512", "-1", "full", "true", "x" * 300, "é", "%00", "../..", "0" * 64)
    connection = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=20)
    seen: dict[int, int] = {}
    for _ in range(count):
        place = rng.randrange(5)
        body = bodies()[place]
        for _ in range(rng.choice([1, 1, 2, 5])):
            body = mutate(body, rng)
        data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        if rng.random() < 0.05:
            cut = rng.randrange(len(data) + 1)
            data = data[:cut] + bytes(rng.randrange(256) for _ in range(3)) + data[cut:]
        headers = {"content-type": "application/json"}
        headers |= {rng.choice(names): rng.choice(values) for _ in range(rng.choice([0, 0, 1, 2]))}
        path = PATHS[place] if rng.random() < 0.9 else rng.choice(PATHS)
        connection.request("POST", path, data, {k: v.encode("utf-8") for k, v in headers.items()})  # type: ignore[misc]
        reply = connection.getresponse()
        text = reply.read()
        seen[reply.status] = seen.get(reply.status, 0) + 1
        assert reply.status < 500, (path, data[:2000], headers, text)
        if reply.status != 200:
            assert json.loads(text)["error"]["message"]
    connection.close()
    return seen


def lenient(stack: Stack) -> None:
    """The double refuses what SGLang would refuse, instead of failing."""
    stack.engine.tolerant = True


def test_broken_bodies_and_headers_never_break_the_gateway(stack: Stack) -> None:
    lenient(stack)
    seen = fuzz(stack, 400, seed=1)
    assert seen[200] > 5 and seen[400] > 100
    assert stack.say([user("Hi")])["agentkv"]["state"] == "new"
    assert not stack.runtime.services.running and not stack.runtime.store._leases  # type: ignore[attr-defined]


@pytest.mark.long
def test_ten_thousand_broken_bodies_and_headers(stack: Stack) -> None:
    lenient(stack)
    seen = fuzz(stack, 10_000, seed=2)
    print(seen)
    assert stack.say([user("Hi")])["agentkv"]["state"] == "new"
    assert FakeEngine.control(stack.engine.requests[-1]) is not None
