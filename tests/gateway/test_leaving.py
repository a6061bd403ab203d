"""A client that leaves stops its turn upstream, in every stage, and its session is as it was."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.gateway.conftest import Stack, Start, user
from tests.gateway.engine import Answer, Body

BOUND = 5.0


def wait_for(condition: Callable[[], Any]) -> float:
    """Wait until `condition` holds; the time that took. Fails after a bound far above what is right."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < BOUND, "this never happened"
        time.sleep(0.002)
    return time.monotonic() - started


class Client:
    """A raw connection that can be cut at any moment."""

    def __init__(self, stack: Stack, messages: list[Body], *, stream: bool, session: str = "s") -> None:
        self.connection = http.client.HTTPConnection(urlsplit(stack.url).netloc, timeout=20)
        body = json.dumps({"model": "tiny", "messages": messages, "stream": stream})
        headers = {"content-type": "application/json", "x-agentkv-session": session}
        self.connection.request("POST", "/v1/chat/completions", body, headers)

    def read_a_frame(self) -> None:
        self.response = self.connection.getresponse()
        assert self.response.status == 200
        self.response.readline()

    def leave(self) -> None:
        self.connection.sock.close()
        if hasattr(self, "response"):
            self.response.close()
        self.connection.close()


def settled(stack: Stack) -> bool:
    return not stack.engine.running and not stack.runtime.store._leases


@pytest.mark.parametrize("stage", ["prefill", "prefill, not streamed", "stream"])
def test_leaving_aborts_the_turn_and_keeps_the_session(stack: Stack, stage: str) -> None:
    messages = [user("Hi")]
    stack.say(messages, headers={"X-AgentKV-Session": "s"})
    messages.append(user("More"))
    stack.engine.script = lambda body: (
        Answer("a b c d e f", gap=0.2, pieces=100) if stage == "stream" else Answer("x", pause=30)
    )
    client = Client(stack, messages, stream="not streamed" not in stage)
    if stage == "stream":
        client.read_a_frame()
    else:
        wait_for(lambda: len(stack.engine.running) == 1)
    client.leave()
    wait_for(lambda: stack.engine.aborted)
    assert stack.engine.aborted[0] == stack.engine.requests[-1]["rid"]
    wait_for(lambda: settled(stack))
    assert stack.metric("agentkv_turns_uncommitted_total") == 1
    stack.engine.script = lambda body: Answer("fine")
    reply = stack.say(messages, headers={"X-AgentKV-Session": "s"})
    assert reply["agentkv"]["state"] == "resumed"


def test_leaving_while_waiting_for_the_session_sends_nothing_upstream(start: Start) -> None:
    stack = start(sessions={"busy_wait": 30})
    stack.engine.script = lambda body: Answer("slow", pause=1.0)
    first = Client(stack, [user("Hi")], stream=False)
    wait_for(lambda: stack.engine.running)
    waiting = Client(stack, [user("Hi")], stream=False)
    wait_for(lambda: stack.runtime.store._waiting)
    waiting.leave()
    wait_for(lambda: not stack.runtime.store._waiting)
    assert first.connection.getresponse().status == 200
    first.leave()
    assert len(stack.engine.requests) == 1
    assert stack.engine.aborted == []


def test_the_session_stays_taken_until_the_engine_has_ended_the_turn(start: Start) -> None:
    stack = start(upstream={"abort": 1.0}, sessions={"busy_wait": 10})
    stack.engine.deaf = True
    stack.engine.script = lambda body: Answer("x", pause=0.6)
    client = Client(stack, [user("Hi")], stream=True)
    wait_for(lambda: stack.engine.running)
    client.leave()
    wait_for(lambda: stack.engine.aborted)
    assert stack.runtime.store._leases
    wait_for(lambda: settled(stack))


@pytest.mark.parametrize("streamed", [True, False])
def test_a_worker_that_ignores_the_abort_is_cut_off(start: Start, streamed: bool) -> None:
    stack = start(upstream={"abort": 0.3})
    stack.engine.deaf = True
    stack.engine.script = lambda body: Answer("x", pause=4)
    client = Client(stack, [user("Hi")], stream=streamed)
    wait_for(lambda: stack.engine.running)
    client.leave()
    wait_for(lambda: not stack.runtime.store._leases)
    assert stack.runtime.registry.get("w0").inflight == 0  # type: ignore[union-attr]
    assert stack.runtime.registry.get("w0").healthy  # type: ignore[union-attr]


def test_leaving_after_the_last_token_keeps_the_turn(stack: Stack) -> None:
    messages = [user("Hi")]
    client = Client(stack, messages, stream=True)
    client.read_a_frame()
    while b'"finish_reason":"stop"' not in client.response.readline():
        pass
    client.leave()
    wait_for(lambda: settled(stack))
    messages += [{"role": "assistant", "content": "Hello from the model."}, user("More")]
    assert stack.say(messages, headers={"X-AgentKV-Session": "s"})["agentkv"]["state"] == "resumed"


def test_a_client_that_leaves_while_sending_its_body_does_no_harm(stack: Stack) -> None:
    connection = http.client.HTTPConnection(urlsplit(stack.url).netloc)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "1000")
    connection.endheaders(b'{"model":')
    connection.close()
    wait_for(lambda: 'status="499"' in stack.http.get("/metrics").text)
    assert stack.say([user("Hi")])["agentkv"]["state"] == "new"


def test_keep_alives_fill_silences_and_end_with_them(start: Start) -> None:
    stack = start(stream={"ping": 0.15})
    stack.engine.script = lambda body: Answer("done", pause=0.7)
    reply = stack.post([user("Hi")], stream=True)
    frames = [json.loads(f[6:]) for f in reply.text.split("\n\n") if f and "[DONE]" not in f]
    pings = [f for f in frames if f["id"] == "keep-alive"]
    assert len(pings) >= 2
    assert all(ping["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}] for ping in pings)
    assert "".join(f["choices"][0]["delta"].get("content") or "" for f in frames) == "done"


def test_keep_alives_can_be_comments(start: Start) -> None:
    stack = start(stream={"ping": 0.15, "kind": "comment"})
    stack.engine.script = lambda body: Answer("done", pause=0.5)
    assert ": ping\n\n" in stack.post([user("Hi")], stream=True).text


def test_a_refusal_after_keep_alives_is_an_error_frame(start: Start) -> None:
    stack = start(stream={"ping": 0.1}, engines=1)

    async def late(body: Body, answer: Answer, stopped: Any) -> Any:
        await stack.engine._wait(stopped, 0.4)
        raise RuntimeError("late")
        yield b""

    stack.engine._stream = late  # type: ignore[method-assign]
    reply = stack.post([user("Hi")], stream=True)
    assert reply.status_code == 200
    last = [f for f in reply.text.split("\n\n") if f][-1]
    assert json.loads(last[6:])["error"]["code"] == "worker_error"
    assert not stack.runtime.store._leases
