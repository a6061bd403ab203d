"""Several workers: placement, pins, and what happens when one is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.gateway.conftest import Stack, Start, user
from tests.gateway.engine import Answer
from tests.gateway.serving import Serving


def test_sessions_stay_where_they_are_and_spread_by_what_they_hold(start: Start) -> None:
    stack = start(engines=2)
    conversations = {name: [user(f"{name} " * size)] for name, size in (("a", 100), ("b", 10), ("c", 10), ("d", 10))}
    where: dict[str, list[str]] = {}
    for _ in range(3):
        for name, messages in conversations.items():
            reply = stack.say(messages, headers={"X-AgentKV-Session": name})
            where.setdefault(name, []).append(reply["headers"]["x-agentkv-worker"])
            messages.append(user("more"))
    assert all(len(set(places)) == 1 for places in where.values())
    # The big one has a worker for itself.
    assert {where[name][0] for name in "bcd"} == {"w0", "w1"} - set(where["a"])


def test_a_lost_worker_hands_its_sessions_on(start: Start) -> None:
    stack = start(engines=2, routing={"health_interval": 60})
    messages = [user("Hi")]
    first = stack.say(messages, headers={"X-AgentKV-Session": "s"})
    home = int(first["headers"]["x-agentkv-worker"][1])
    stack.servers[home].stop()
    messages.append(user("More"))
    reply = stack.say(messages, headers={"X-AgentKV-Session": "s"})
    assert reply["headers"]["x-agentkv-worker"] == f"w{1 - home}"
    assert (reply["agentkv"]["state"], reply["agentkv"]["reason"]) == ("moved", "worker_changed")
    messages.append(user("Again"))
    reply = stack.say(messages, headers={"X-AgentKV-Session": "s"})
    assert reply["agentkv"]["state"] == "resumed"


def test_a_restarted_worker_rebuilds(stack: Stack) -> None:
    messages = [user("Hi")]
    stack.say(messages, headers={"X-AgentKV-Session": "s"})
    stack.engine.restart()
    messages.append(user("More"))
    reply = stack.say(messages, headers={"X-AgentKV-Session": "s"})
    assert (reply["agentkv"]["state"], reply["agentkv"]["reason"]) == ("rebuilt", "restarted")
    messages.append(user("More"))
    assert stack.say(messages, headers={"X-AgentKV-Session": "s"})["agentkv"]["state"] == "resumed"


def test_a_session_whose_epochs_the_store_lost_begins_a_new_life(stack: Stack) -> None:
    messages = [user("Hi")]
    stack.say(messages, headers={"X-AgentKV-Session": "s"})
    (key,) = stack.engine.epochs
    stack.engine.epochs[key] = 99
    messages.append(user("More"))
    reply = stack.say(messages, headers={"X-AgentKV-Session": "s"})
    assert reply["agentkv"]["state"] == "rebuilt"
    messages.append(user("Again"))
    assert stack.say(messages, headers={"X-AgentKV-Session": "s"})["agentkv"]["state"] == "resumed"


def test_a_worker_dying_in_a_stream_is_an_error_frame_and_nothing_is_recorded(start: Start) -> None:
    stack = start(engines=2)
    messages = [user("Hi")]
    stack.say(messages, headers={"X-AgentKV-Session": "s"})
    messages.append(user("More"))
    for engine in stack.engines:
        engine.script = lambda body: Answer("one two three four", die_after=2)
    reply = stack.post(messages, headers={"X-AgentKV-Session": "s"}, stream=True)
    frames = [f for f in reply.text.split("\n\n") if f]
    assert json.loads(frames[-1][6:])["error"]["code"] == "worker_lost"
    assert "[DONE]" not in reply.text
    assert sum(len(engine.requests) for engine in stack.engines) == 2  # never sent again after the first token
    for engine in stack.engines:
        engine.script = lambda body: Answer("fine")
    assert stack.say(messages, headers={"X-AgentKV-Session": "s"})["agentkv"]["state"] == "resumed"


def test_an_error_frame_of_the_engine_is_told_in_our_shape(stack: Stack) -> None:
    stack.engine.script = lambda body: Answer("one", error_frame=(500, "CUDA out of memory at /opt/x"))
    reply = stack.post([user("Hi")], stream=True)
    frames = [f for f in reply.text.split("\n\n") if f]
    error = json.loads(frames[-1][6:])["error"]
    assert error["code"] == "worker_error" and "CUDA" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_cannot_be_read_is_the_workers_fault(stack: Stack, stream: bool) -> None:
    messages = [user("Hi")]
    headers = {"X-AgentKV-Session": "s"}
    whole, details = stack.engine._reply, stack.engine._details
    stack.engine._reply = lambda *_: {"choices": []}  # type: ignore[method-assign]
    stack.engine._details = lambda *_: {"storage_backend": "agentkv:{"}  # type: ignore[method-assign]
    reply = stack.post(messages, headers=headers, stream=stream)
    if stream:
        error = json.loads([frame for frame in reply.text.split("\n\n") if frame][-1][6:])["error"]
    else:
        assert reply.status_code == 502
        error = reply.json()["error"]
    assert error["code"] == "worker_lost"
    stack.engine._reply, stack.engine._details = whole, details  # type: ignore[method-assign]
    assert stack.say(messages, headers=headers)["agentkv"]["state"] in ("new", "rebuilt", "resumed")


def test_a_turn_that_cannot_be_recorded_frees_its_session(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = start(sessions={"busy_wait": 0})
    headers = {"X-AgentKV-Session": "s"}

    def fails(*_: Any) -> None:
        raise RuntimeError("no entry")

    with monkeypatch.context() as patch:
        patch.setattr("agentkv_serve.gateway.turns.turn.ledger_entry", fails)
        assert stack.post([user("Hi")], headers=headers).status_code == 500
    stack.say([user("Hi")], headers=headers)


def test_whatever_answers_as_a_worker_does_not_disturb_the_others(start: Start) -> None:
    def answer(request: Request) -> JSONResponse:
        return JSONResponse([1, 2])

    with Serving(Starlette(routes=[Route("/{path:path}", answer)])) as stranger:
        stack = start(admin_key="operator", workers=[{"url": stranger.url, "id": "stranger"}])
        assert stack.http.get("/readyz").status_code == 503
        body = {"url": stranger.url, "id": "again"}
        reply = stack.http.post("/admin/workers", json=body, headers={"authorization": "Bearer operator"})
        assert reply.status_code == 201 and reply.json()["healthy"] is False


def test_without_a_worker_the_gateway_says_so(start: Start) -> None:
    stack = start(engines=1, routing={"health_interval": 60})
    stack.servers[0].stop()
    assert stack.post([user("Hi")]).status_code == 502
    reply = stack.post([user("Hi")])
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "no_worker_available"
    assert reply.headers["retry-after"]
    assert stack.http.get("/readyz").status_code == 503
    assert stack.http.get("/healthz").status_code == 200


def test_the_workers_key_is_sent_and_the_clients_is_not(start: Start) -> None:
    stack = start(worker_key="engine-secret", api_key="client-secret")
    stack.engine.key = "engine-secret"
    stack.say([user("Hi")], headers={"authorization": "Bearer client-secret"})
    assert stack.engine.headers[0]["authorization"] == "Bearer engine-secret"
    assert "client-secret" not in str(stack.engine.headers) + str(stack.engine.requests)


def test_api_routes_need_the_right_key(start: Start) -> None:
    stack = start(api_key="client-secret")
    for key in (None, "Bearer wrong", "Basic client-secret", "Bearer"):
        for path in ("/v1/models", "/v1/models/tiny", "/v1/chat/completions"):
            headers = {"authorization": key} if key else {}
            reply = stack.http.request("POST" if "chat" in path else "GET", path, headers=headers)
            assert reply.status_code == 401, (key, path)
            assert reply.json()["error"]["code"] == "invalid_api_key"
