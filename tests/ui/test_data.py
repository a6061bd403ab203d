"""What the page reads: fleet, session, text, events."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Stack, Start, user
from tests.ui.conftest import HEADS, KEY, LAYERS, OPERATOR

Watched = Callable[..., Stack]
DATA = ("/admin/fleet", "/admin/events", "/admin/sessions/0123456789abcdef", "/admin/sessions/0123456789abcdef/texts")


def shown(stack: Stack) -> str:
    """The shown key of the one session."""
    (session,) = stack.http.get("/admin/fleet", headers=OPERATOR).json()["sessions"]
    return str(session["key"])


def view(stack: Stack, query: str = "") -> dict[str, Any]:
    return dict(stack.http.get(f"/admin/sessions/{shown(stack)}{query}", headers=OPERATOR).json())


@pytest.mark.parametrize("path", DATA)
def test_data_needs_the_admin_key(watched: Watched, path: str) -> None:
    stack = watched(api_key="client-key")
    assert stack.http.get(path).status_code == 401
    assert stack.http.get(path, headers={"authorization": "Bearer client-key"}).status_code == 401


@pytest.mark.parametrize("path", DATA)
def test_without_an_admin_key_there_is_no_data(start: Start, path: str) -> None:
    assert start().http.get(path, headers=OPERATOR).status_code == 404


def test_the_fleet_shows_workers_with_their_load_and_sessions(watched: Watched) -> None:
    stack = watched(engines=2)
    said = stack.say([user("Hello")], headers={"x-agentkv-budget": "512"})
    fleet = stack.http.get("/admin/fleet", headers=OPERATOR).json()
    assert [w["id"] for w in fleet["workers"]] == ["w0", "w1"] and fleet["total"] == 1 and fleet["store"] == "up"
    assert sum(w["sessions"] for w in fleet["workers"]) == 1
    assert sum(w["kv_tokens"] for w in fleet["workers"]) == said["agentkv"]["kv_tokens"]
    (session,) = fleet["sessions"]
    assert session["budget"] == "512" and session["turns"] == 1 and session["running"] is False
    assert said["headers"]["x-agentkv-session"] not in json.dumps(fleet)


def test_a_session_shows_its_phases_and_the_engines_map(watched: Watched) -> None:
    stack, chat = watched(), [user("Hello")]
    for question in ("Go on", "And on"):
        said = stack.say(chat)
        chat.append(user(question))
    seen = view(stack)
    assert seen["tokens"] == said["agentkv"]["logical_tokens"] == seen["ends"][-1] and len(seen["ends"]) == 2
    edges = [0, *seen["runs"][1::3]]
    assert seen["runs"][0::3] == edges[:-1] and edges[-1] == seen["tokens"]
    assert {seen["labels"][label] for label in seen["runs"][2::3]} == {"input", "say", "glue"}
    assert {seen["phases"][label] for label in seen["runs"][2::3]} == {"others"}
    engine = seen["engine"]
    assert engine["levels"] == LAYERS * HEADS and len(base64.b64decode(engine["kept"])) == 2 * engine["length"]
    assert view(stack, "?layer=2")["engine"]["levels"] == HEADS


def test_a_worker_that_knows_nothing_of_a_session_is_said(watched: Watched) -> None:
    stack = watched()
    stack.say([user("Hello")])
    stack.engine.restart()
    assert "404" in view(stack)["engine"]["error"]


@pytest.mark.parametrize("query", ["?layer=x", "?layer=-1", "?layer=1234567890"])
def test_a_layer_is_a_small_whole_number(watched: Watched, query: str) -> None:
    stack = watched()
    stack.say([user("Hello")])
    assert stack.http.get(f"/admin/sessions/{shown(stack)}{query}", headers=OPERATOR).status_code == 400


@pytest.mark.parametrize("key", ["0" * 16, "0", "x" * 64])
def test_an_unknown_session_is_not_found(watched: Watched, key: str) -> None:
    stack = watched()
    stack.say([user("Hello")])
    assert stack.http.get(f"/admin/sessions/{key}", headers=OPERATOR).status_code == 404


def test_text_is_hidden_unless_the_settings_show_it(watched: Watched) -> None:
    hiding = watched()
    hiding.say([user("a secret word")])
    assert view(hiding)["content"] is False
    path = f"/admin/sessions/{shown(hiding)}/texts?start=0&end=5"
    assert hiding.http.get(path, headers=OPERATOR).status_code == 403
    assert "secret" not in json.dumps(view(hiding))

    showing = watched(ui={"show_content": True})
    showing.say([user("a secret word")])
    seen = view(showing)
    path = f"/admin/sessions/{shown(showing)}/texts?start=0&end={seen['tokens']}"
    texts = showing.http.get(path, headers=OPERATOR).json()["texts"]
    assert len(texts) == seen["tokens"] and "a secret word" in "".join(texts)
    path = f"/admin/sessions/{shown(showing)}/texts?start=9&end=3"
    assert showing.http.get(path, headers=OPERATOR).status_code == 400


def listen(stack: Stack, query: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    with (
        httpx.Client(base_url=stack.url, timeout=20) as client,
        client.stream("GET", f"/admin/events{query}", headers={"authorization": f"Bearer {KEY}"}) as reply,
    ):
        assert reply.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in reply.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            if line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


def test_events_tell_of_each_turn_and_then_keep_quiet(watched: Watched) -> None:
    stack, chat = watched(), [user("Hello")]
    stack.say(chat)
    heard = listen(stack, f"?session={shown(stack)}")
    first = dict(next(heard) for _ in range(2))
    assert first["session"]["turns"] == first["fleet"]["sessions"][0]["turns"] == 1
    chat.append(user("Go on"))
    stack.say(chat)
    second = dict(next(heard) for _ in range(2))
    assert second["session"]["turns"] == second["fleet"]["sessions"][0]["turns"] == 2
    heard.close()  # type: ignore[attr-defined]


def test_events_end_when_the_gateway_stops(watched: Watched) -> None:
    stack = watched()
    heard = listen(stack)
    assert next(heard)[0] == "fleet"
    stack.runtime.stopping = True
    assert list(heard) == []
