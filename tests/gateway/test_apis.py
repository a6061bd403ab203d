"""The APIs around chat turns: completions, messages, responses, sessions, and the operator's."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.gateway.conftest import WEATHER, Stack, Start, user
from tests.gateway.engine import Answer, FakeEngine
from tests.gateway.test_bad_input import expect
from tests.gateway.test_leaving import wait_for

ADMIN = {"authorization": "Bearer admin-secret"}


def complete(stack: Stack, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": "Once", **fields}
    return stack.http.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "raw_prompt"),
        ({"prompt": ["a", "b"]}, "prompt_list"),
        ({"prompt": [1, 2, 3]}, "prompt_list"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "beam_search"),
    ],
)
def test_completions_run_without_a_session(shared: Stack, fields: dict[str, Any], reason: str) -> None:
    reply = complete(shared, logprobs=1, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-agentkv-session-state"] == "stateless"
    assert reply.headers["x-agentkv-stateless-reason"] == reason
    usage = reply.json()["usage"]
    assert usage["agentkv"] == {"state": "stateless", "reason": reason}
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    sent = shared.engine.requests[0]
    assert sent["prompt"] == fields.get("prompt", "Once") and "messages" not in sent
    with_session = complete(shared, {"X-AgentKV-Session": "s"}, **fields)
    if reason == "raw_prompt":
        assert with_session.status_code == 200
    else:
        expect(with_session, 400, f"{reason}_not_supported_in_session")


def test_streamed_completions(shared: Stack) -> None:
    reply = complete(shared, stream=True, stream_options={"include_usage": True})
    frames = [f for f in reply.text.split("\n\n") if f]
    assert frames[-1] == "data: [DONE]"
    assert json.loads(frames[0][6:])["choices"][0]["text"] == "ok"
    assert json.loads(frames[-2][6:])["usage"]["agentkv"]["state"] == "stateless"
    assert "sglext" not in reply.text


@pytest.mark.parametrize("prompt", [None, "", [], 3, {"a": 1}])
def test_prompts_of_a_wrong_type(shared: Stack, prompt: Any) -> None:
    reply = shared.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
    if prompt == "":
        assert reply.status_code == 200
    else:
        expect(reply, 400, "invalid_request")


def test_embeddings_are_refused_clearly(shared: Stack) -> None:
    expect(shared.http.post("/v1/embeddings", json={"model": "tiny", "input": "x"}), 501, "not_supported")


def test_messages_errors_have_anthropics_shape(shared: Stack) -> None:
    body: dict[str, Any] = {"model": "gpt-9", "max_tokens": 5, "messages": [user("Hi")]}
    reply = shared.http.post("/v1/messages", json=body)
    assert reply.status_code == 404
    assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == "not_found_error"
    for broken in (
        {**body, "model": "tiny", "max_tokens": None},
        {**body, "model": "tiny", "messages": "Hi"},
        {**body, "model": "tiny", "messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {**body, "model": "tiny", "tools": [{"type": "web_search_20250305", "name": "w"}]},
        {**body, "model": "tiny", "tools": [{"name": "w"}], "tool_choice": {"type": "some"}},
        [1],
    ):
        reply = shared.http.post("/v1/messages", json=broken)
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        (Answer("x"), "end_turn"),
        (Answer("x", stop=False), "max_tokens"),
        (Answer("", calls=[("weather", '{"city": "X"}')]), "tool_use"),
    ],
)
def test_messages_say_why_they_stopped(shared: Stack, answer: Answer, stop: str) -> None:
    shared.engine.script = lambda body: answer
    body = {"model": "tiny", "max_tokens": 5, "messages": [user("Hi")], "stop_sequences": ["END"]}
    assert shared.http.post("/v1/messages", json=body).json()["stop_reason"] == stop
    assert shared.engine.requests[0]["stop"] == ["END"]
    streamed = shared.http.post("/v1/messages", json={**body, "stream": True}).text
    assert f'"stop_reason":"{stop}"' in streamed
    assert streamed.rstrip().endswith('data: {"type":"message_stop"}')


def test_a_messages_stream_that_breaks_ends_in_an_error_event(shared: Stack) -> None:
    shared.engine.script = lambda body: Answer("one two three", die_after=1)
    body = {"model": "tiny", "max_tokens": 5, "messages": [user("Hi")], "stream": True}
    assert "event: error\n" in shared.http.post("/v1/messages", json=body).text


def test_responses_go_on_from_kept_ones_only_for_their_owner(start: Start) -> None:
    import hashlib

    keys = [{"sha256": hashlib.sha256(n.encode()).hexdigest(), "tenant": n} for n in ("alice", "bob")]
    stack = start(api_keys=keys)
    alice, bob = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
    first = stack.http.post("/v1/responses", json={"model": "tiny", "input": "Hi"}, headers=alice).json()
    body = {"model": "tiny", "input": "More", "previous_response_id": first["id"]}
    expect(stack.http.post("/v1/responses", json=body, headers=bob), 400, "previous_response_not_found")
    assert stack.http.get(f"/v1/responses/{first['id']}", headers=bob).status_code == 404
    second = stack.http.post("/v1/responses", json=body, headers=alice).json()
    assert second["usage"]["agentkv"]["state"] == "resumed"
    assert second["previous_response_id"] == first["id"]
    # Each response has its own continuation: going on from the first again is a branch.
    again = stack.http.post("/v1/responses", json={**body, "input": "Other"}, headers=alice).json()
    assert again["usage"]["agentkv"]["state"] == "rebuilt"
    unkept = stack.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "store": False}, headers=alice)
    assert stack.http.get(f"/v1/responses/{unkept.json()['id']}", headers=alice).status_code == 404


def test_responses_refuse_what_they_cannot_do(shared: Stack) -> None:
    for fields in (
        {"tools": [{"type": "web_search"}]},
        {"background": True},
        {"conversation": "c"},
        {"input": 3},
        {"input": [{"type": "computer_call"}]},
        {"previous_response_id": 7},
        {"previous_response_id": "resp_none"},
    ):
        reply = shared.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", **fields})
        assert reply.status_code == 400, reply.text
    assert shared.engine.requests == []


def test_structured_output_reaches_the_engine(shared: Stack) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    shared.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "text": {"format": form}})
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert shared.engine.requests[0]["response_format"] == {"type": "json_schema", "json_schema": schema}


def test_owners_see_and_end_their_sessions(stack: Stack) -> None:
    messages = [user("Hi")]
    stack.say(messages, headers={"X-AgentKV-Session": "team/a", "X-AgentKV-Budget": "256"})
    stack.say([user("Other")], headers={"X-AgentKV-Session": "b"})
    listed = stack.http.get("/v1/agentkv/sessions").json()
    assert {s["id"] for s in listed["data"]} == {"team/a", "b"} and listed["total"] == 2
    one = stack.http.get("/v1/agentkv/sessions/team/a").json()
    assert (one["turns"], one["budget"], one["worker"]) == (1, "256", "w0")
    assert one["kv_tokens"] > 0 and one["logical_tokens"] >= one["kv_tokens"]
    assert stack.http.delete("/v1/agentkv/sessions/team/a").status_code == 204
    expect(stack.http.delete("/v1/agentkv/sessions/team/a"), 404, "session_not_found")
    assert stack.engine.closed == [FakeEngine.control(stack.engine.requests[0])["session"]]  # type: ignore[index]
    messages.append(user("More"))
    assert stack.say(messages, headers={"X-AgentKV-Session": "team/a"})["agentkv"]["state"] == "new"
    for _ in range(2):
        assert stack.http.post("/v1/agentkv/sessions/b/release").status_code == 204
    assert len(stack.engine.closed) == 2


@pytest.mark.parametrize("streamed", [True, False])
def test_ending_a_session_stops_its_turn(stack: Stack, streamed: bool) -> None:
    stack.engine.script = lambda body: Answer("x", pause=30)
    replies: list[Any] = []
    headers = {"X-AgentKV-Session": "s"}
    thread = threading.Thread(target=lambda: replies.append(stack.post([user("Hi")], headers=headers, stream=streamed)))
    thread.start()
    wait_for(lambda: stack.engine.running)
    assert stack.http.delete("/v1/agentkv/sessions/s").status_code == 204
    thread.join()
    assert stack.engine.aborted
    assert "session_ended" in replies[0].text
    assert stack.http.get("/v1/agentkv/sessions").json()["total"] == 0


def test_the_admin_api_needs_its_own_key(start: Start) -> None:
    stack = start(api_key="client", admin_key="admin-secret")
    for headers in ({}, {"authorization": "Bearer client"}, {"authorization": "Basic admin-secret"}):
        for path in ("/admin/workers", "/admin/workers/w0", "/admin/workers/w0/sessions", "/admin/config"):
            expect(stack.http.get(path, headers=headers), 401, "invalid_api_key")
    expect(stack.http.get("/v1/models", headers=ADMIN), 401, "invalid_api_key")
    shown = stack.http.get("/admin/config", headers=ADMIN).text
    assert "admin-secret" not in shown and json.loads(shown)["api_key"] == "**********"


def test_without_an_admin_key_there_is_no_admin_api(stack: Stack) -> None:
    expect(stack.http.get("/admin/workers", headers=ADMIN), 404, "not_found")


def test_a_draining_worker_keeps_its_sessions_and_gets_no_new_ones(start: Start) -> None:
    stack = start(engines=2, admin_key="admin-secret")
    messages = [user("Hi")]
    home = stack.say(messages, headers={"X-AgentKV-Session": "s"})["headers"]["x-agentkv-worker"]
    assert stack.http.post(f"/admin/workers/{home}/drain", headers=ADMIN).json()["draining"]
    for i in range(4):
        reply = stack.say([user("Hi")], headers={"X-AgentKV-Session": f"new-{i}"})
        assert reply["headers"]["x-agentkv-worker"] != home
    messages.append(user("More"))
    assert stack.say(messages, headers={"X-AgentKV-Session": "s"})["agentkv"]["state"] == "resumed"
    held = stack.http.get(f"/admin/workers/{home}/sessions", headers=ADMIN).json()["data"]
    assert len(held) == 1 and held[0]["turns"] == 2
    assert not stack.http.post(f"/admin/workers/{home}/undrain", headers=ADMIN).json()["draining"]


def test_workers_come_and_go(start: Start) -> None:
    stack = start(engines=2, admin_key="admin-secret")
    messages = [user("Hi")]
    home = stack.say(messages, headers={"X-AgentKV-Session": "s"})["headers"]["x-agentkv-worker"]
    url = stack.http.get(f"/admin/workers/{home}", headers=ADMIN).json()["url"]
    assert stack.http.delete(f"/admin/workers/{home}", headers=ADMIN).status_code == 204
    messages.append(user("More"))
    reply = stack.say(messages, headers={"X-AgentKV-Session": "s"})
    assert (reply["agentkv"]["state"], reply["headers"]["x-agentkv-worker"]) == (
        "moved",
        "w1" if home == "w0" else "w0",
    )
    added = stack.http.post("/admin/workers", json={"url": url, "id": "again"}, headers=ADMIN)
    assert added.status_code == 201 and added.json()["healthy"]
    expect(stack.http.post("/admin/workers", json={"url": url, "id": "again"}, headers=ADMIN), 409, "worker_exists")
    for wrong in ("file:///etc/passwd", "http://169.254.169.254/latest", "gopher://x", "http://u:p@h", 3):
        expect(stack.http.post("/admin/workers", json={"url": wrong}, headers=ADMIN), 400, "invalid_request")
    expect(stack.http.get("/admin/workers/none", headers=ADMIN), 404, "worker_not_found")


def test_tools_of_all_apis_render_alike(shared: Stack) -> None:
    schema = WEATHER["function"]["parameters"]
    shared.post([user("Hi")], tools=[WEATHER])
    tool = {"name": "weather", "description": "Weather of a city"}
    body = {"model": "tiny", "max_tokens": 9, "messages": [user("Hi")], "tools": [{**tool, "input_schema": schema}]}
    shared.http.post("/v1/messages", json=body)
    tools = [{"type": "function", **tool, "parameters": schema}]
    shared.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "tools": tools})
    prompts = [shared.engine.text(request) for request in shared.engine.requests]
    shown = [json.loads(prompt.split("# Tools\n")[1].split("\n")[0]) for prompt in prompts]
    assert shown == [WEATHER] * 3
