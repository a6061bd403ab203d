"""What a turn reserves is given back however it ends, and aborts are told to the right worker and counted."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.gateway.conftest import Stack, Start, user
from tests.gateway.engine import Answer
from tests.gateway.test_leaving import Client, settled, wait_for

HEADERS = {"X-AgentKV-Session": "s", "X-AgentKV-Session-Token-Limit": "4000"}
ENDS = {
    "refused": Answer(refuse=(500, "no")),
    "refused by its input": Answer(refuse=(400, "no")),
    "an error in the stream": Answer("one two", error_frame=(500, "no")),
    "a stream that breaks": Answer("one two three", die_after=1),
    "a client that leaves before": Answer("x", pause=30),
    "a client that leaves amid": Answer("a b c d e f", gap=0.1, pieces=100),
}


def reserved(stack: Stack) -> list[tuple[int, int]]:
    return [(worker.inflight, worker.reserved) for worker in stack.runtime.registry]


@pytest.mark.parametrize("how", ENDS)
def test_a_turn_that_fails_gives_back_what_it_reserved(stack: Stack, how: str) -> None:
    messages = [user("Hi")]
    used = stack.say(messages, headers=HEADERS)["usage"]["total_tokens"]
    messages.append(user("More"))
    stack.engine.script = lambda body: ENDS[how]
    if "client" in how:
        client = Client(stack, messages, stream="amid" in how)
        wait_for(lambda: stack.engine.running)
        if "amid" in how:
            client.read_a_frame()
        client.leave()
        wait_for(lambda: settled(stack) and not stack.runtime.services.running)
    else:
        stack.post(messages, headers=HEADERS, stream="stream" in how)
    wait_for(lambda: reserved(stack) == [(0, 0)])
    shown = stack.http.get("/v1/agentkv/sessions/s").json()
    assert (shown["tokens_used"], shown["turns"]) == (used, 1)
    stack.engine.script = lambda body: Answer("fine")
    assert stack.say(messages, headers=HEADERS)["agentkv"]["state"] in ("resumed", "rebuilt")


@pytest.mark.parametrize("known", [True, False])
def test_an_abort_goes_to_the_worker_of_the_turn_and_is_counted(start: Start, known: bool) -> None:
    stack = start(engines=2, upstream={"abort": 1})
    messages = [user("Hi")]
    home = stack.say(messages, headers=HEADERS)["headers"]["x-agentkv-worker"]
    messages.append(user("More"))
    engine = stack.engines[int(home[1])]
    told: list[str] = []
    if not known:

        async def unknown(request: Request) -> Response:
            told.append((await request.json())["rid"])
            return JSONResponse({"error": "not found"}, 404)

        route: Any = next(r for r in engine.app.routes if r.path == "/abort_request")  # type: ignore[attr-defined]
        route.app = lambda scope, receive, send: answer(unknown, scope, receive, send)
    engine.script = lambda body: Answer("x", pause=30)
    client = Client(stack, messages, stream=False)
    wait_for(lambda: engine.running)
    rid = engine.requests[-1]["rid"]
    client.leave()
    wait_for(lambda: not stack.runtime.services.running)
    assert (told or engine.aborted)[0] == rid
    assert stack.engines[1 - int(home[1])].aborted == []
    assert stack.metric(f'agentkv_aborts_total{{delivered="{str(known).lower()}"}}') >= 1


async def answer(endpoint: Any, scope: Any, receive: Any, send: Any) -> None:
    await (await endpoint(Request(scope, receive)))(scope, receive, send)
