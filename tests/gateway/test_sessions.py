"""Which session a request belongs to, with and without an id."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.gateway.conftest import WEATHER, Stack, Start, system, tool_result, user
from tests.gateway.engine import Answer, Body, FakeEngine


def sessions_of(stack: Stack) -> list[str]:
    return [FakeEngine.control(r)["session"] for r in stack.engine.requests if FakeEngine.control(r)]  # type: ignore[index]


@pytest.mark.parametrize(
    ("headers", "fields", "source"),
    [
        ({"X-AgentKV-Session": "a"}, {}, "header"),
        ({"X-Session-Id": "a"}, {}, "header"),
        ({"X-Claude-Code-Session-Id": "a"}, {}, "header"),
        ({"Session-Id": "a"}, {}, "header"),
        ({}, {"session_id": "a"}, "body"),
        ({}, {"agentkv": {"session_id": "a"}}, "body"),
        ({}, {"metadata": {"session_id": "a", "other": "b"}}, "body"),
        ({}, {"prompt_cache_key": "a"}, "body"),
    ],
)
def test_a_session_id_may_stand_in_many_places(
    stack: Stack, headers: dict[str, str], fields: Body, source: str
) -> None:
    messages = [user("Hi")]
    first = stack.say(messages, headers=headers, **fields)
    assert first["headers"]["x-agentkv-session"] == "a"
    assert first["headers"]["x-agentkv-session-source"] == source
    # The same id in the first place of the order is the same session.
    messages.append(user("More"))
    assert stack.say(messages, headers={"X-AgentKV-Session": "a"})["agentkv"]["state"] == "resumed"


def test_an_explicit_id_wins_over_what_harnesses_send(stack: Stack) -> None:
    headers = {"X-AgentKV-Session": "mine", "X-Session-Affinity": "other"}
    reply = stack.say([user("Hi")], headers=headers, prompt_cache_key="third")
    assert reply["headers"]["x-agentkv-session"] == "mine"


def test_the_issued_id_can_be_used_from_then_on(stack: Stack) -> None:
    messages = [user("Hi")]
    issued = stack.say(messages)["headers"]["x-agentkv-session"]
    messages.append(user("More"))
    reply = stack.say(messages, headers={"X-AgentKV-Session": issued})
    assert reply["agentkv"]["state"] == "resumed"
    assert len(set(sessions_of(stack))) == 1


def test_without_ids_a_conversation_is_found_by_its_content(stack: Stack) -> None:
    messages = [system("S"), user("Hi")]
    states = []
    for turn in range(4):
        reply = stack.say(messages)
        states.append((reply["agentkv"]["state"], reply["headers"]["x-agentkv-session-source"]))
        messages.append(user(f"More {turn}"))
    assert states == [("new", "issued"), *[("resumed", "content")] * 3]
    assert len(set(sessions_of(stack))) == 1


def test_ids_can_be_required(start: Start) -> None:
    stack = start(sessions={"implicit": False})
    reply = stack.say([user("Hi")])
    assert reply["headers"]["x-agentkv-session-state"] == "stateless"
    assert reply["agentkv"] == {"state": "stateless", "reason": "no_session_id"}
    assert stack.say([user("Hi")], headers={"X-Session-Id": "a"})["agentkv"]["state"] == "new"


def test_agents_with_equal_openings_never_share(stack: Stack) -> None:
    """Two agents start alike, get the same answer, then part: each ends with its own history."""
    first, second = [user("Hi")], [user("Hi")]
    stack.say(first)
    stack.say(second)
    for turn in range(3):
        for name, messages in (("one", first), ("two", second)):
            messages.append(user(f"{name} {turn}"))
            stack.engine.script = lambda body, name=name, turn=turn: Answer(f"answer to {name} {turn}")  # type: ignore[misc]
            stack.say(messages)
            prompt = stack.engine.text(stack.engine.requests[-1])
            other = "two" if name == "one" else "one"
            assert f"{name} {turn}" in prompt and other not in prompt
    by_agent: dict[str, set[str]] = {"one": set(), "two": set()}
    for request, session in zip(stack.engine.requests, sessions_of(stack), strict=True):
        for name in by_agent:
            if name in stack.engine.text(request):
                by_agent[name].add(session)
    assert not by_agent["one"] & by_agent["two"]


def test_equal_agents_in_parallel_never_wait_for_each_other(stack: Stack) -> None:
    stack.engine.script = lambda body: Answer("slow", pause=0.5)
    replies: list[Any] = []

    def run() -> None:
        messages = [user("Hi")]
        for turn in range(3):
            replies.append(stack.say(messages, stream=False))
            messages.append(user(f"More {turn}"))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replies) == 9
    # Every turn of every agent was taken at once: three ran at a time.
    assert stack.metric("agentkv_turns_uncommitted_total") == 0
    assert {r["choices"][0]["message"]["content"] for r in replies} == {"slow"}


def test_an_older_point_by_content_is_another_session_with_the_same_tokens(stack: Stack) -> None:
    stack.engine.script = lambda body: Answer("A1", reasoning="thoughts that clients drop")
    messages = [user("Hi")]
    stack.say(messages)
    fork = [*messages, user("other way")]
    messages.append(user("on"))
    stack.say(messages)
    reply = stack.say(fork)
    assert reply["headers"]["x-agentkv-session-source"] == "issued"
    assert "thoughts that clients drop" in stack.engine.text(stack.engine.requests[-1])
    messages.append(user("and on"))
    assert stack.say(messages)["agentkv"]["state"] == "resumed"


def test_a_tool_call_id_finds_a_rewritten_history(stack: Stack) -> None:
    stack.engine.script = lambda body: Answer(calls=[("weather", "{}")])
    messages = [system("S"), user("Weather?")]
    first = stack.say(messages, tools=[WEATHER])
    call = messages[-1]["tool_calls"][0]["id"]
    shortened = [system("S"), user("(summary of what was)"), messages[-1], tool_result(call, "sunny")]
    reply = stack.say(shortened, tools=[WEATHER])
    assert reply["headers"]["x-agentkv-session"] == first["headers"]["x-agentkv-session"]
    assert reply["agentkv"]["state"] == "rebuilt"
    assert reply["agentkv"]["reason"] == "history_rewritten"


def test_a_named_session_goes_back_to_an_earlier_point(stack: Stack) -> None:
    headers = {"X-AgentKV-Session": "s"}
    stack.engine.script = lambda body: Answer("A1", reasoning="first thoughts")
    messages = [user("Hi")]
    stack.say(messages, headers=headers)
    again = [*messages, user("take two")]
    messages.append(user("take one"))
    stack.say(messages, headers=headers)
    reply = stack.say(again, headers=headers)
    assert reply["headers"]["x-agentkv-session-state"] == "rebuilt"
    assert reply["agentkv"]["reason"] == "diverged"
    prompt = stack.engine.text(stack.engine.requests[-1])
    assert "first thoughts" in prompt and "take one" not in prompt
    # Both branches are known: going on with the first keeps its tokens, too.
    messages.append(user("on"))
    stack.say(messages, headers=headers)
    assert stack.engine.text(stack.engine.requests[-1]).count("first thoughts") == 2


def test_a_regenerated_answer_replaces_the_last_one(stack: Stack) -> None:
    headers = {"X-AgentKV-Session": "s"}
    messages = [user("Hi")]
    stack.say(messages, headers=headers)
    messages.append(user("More"))
    retry = list(messages)
    stack.engine.script = lambda body: Answer("first try")
    stack.say(messages, headers=headers)
    stack.engine.script = lambda body: Answer("second try")
    stack.say(retry, headers=headers)
    retry.append(user("good"))
    assert stack.say(retry, headers=headers)["agentkv"]["state"] == "resumed"
    assert "first try" not in stack.engine.text(stack.engine.requests[-1])


def test_a_summarised_history_replaces_the_session(stack: Stack) -> None:
    headers = {"X-AgentKV-Session": "s"}
    messages = [system("S"), user("Hi")]
    stack.say(messages, headers=headers)
    short = [system("S"), user("Summary: we said hi."), user("Go on")]
    reply = stack.say(short, headers=headers)
    assert (reply["agentkv"]["state"], reply["agentkv"]["reason"]) == ("rebuilt", "history_rewritten")
    short.append(user("More"))
    assert stack.say(short, headers=headers)["agentkv"]["state"] == "resumed"


def test_a_side_request_leaves_the_session_alone(stack: Stack) -> None:
    headers = {"X-AgentKV-Session": "s"}
    messages = [system("You are an agent."), user("Hi")]
    stack.say(messages, headers=headers, tools=[WEATHER])
    title = [system("Write a title."), user("Hi")]
    reply = stack.say(title, headers=headers)
    assert reply["agentkv"] == {"state": "stateless", "reason": "side"}
    assert reply["headers"]["x-agentkv-session-state"] == "stateless"
    assert stack.engine.requests[-1]["messages"] == title[:-1]
    messages.append(user("More"))
    assert stack.say(messages, headers=headers, tools=[WEATHER])["agentkv"]["state"] == "resumed"
    assert [FakeEngine.control(r)["epoch"] for r in stack.engine.requests if FakeEngine.control(r)] == [0, 1]  # type: ignore[index]


def test_edited_reasoning_is_another_history(stack: Stack) -> None:
    headers = {"X-AgentKV-Session": "s"}
    stack.engine.script = lambda body: Answer("A", reasoning="true thoughts")
    messages = [user("Hi")]
    stack.say(messages, headers=headers)
    kept = [*messages, user("More")]
    edited = [messages[0], {**messages[1], "reasoning_content": "false thoughts"}, user("More")]
    assert stack.say(edited, headers=headers)["agentkv"]["reason"] == "history_rewritten"
    assert "true thoughts" not in stack.engine.text(stack.engine.requests[-1])
    assert stack.say(kept, headers=headers)["agentkv"]["state"] == "rebuilt"
    assert "true thoughts" in stack.engine.text(stack.engine.requests[-1])


def test_a_second_turn_waits_and_then_is_told_so(start: Start) -> None:
    stack = start(sessions={"busy_wait": 0.2})
    stack.engine.script = lambda body: Answer("slow", pause=1.0)
    headers = {"X-AgentKV-Session": "s"}
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(stack.post([user("Hi")], headers=headers)))
    thread.start()
    while not stack.engine.requests:
        pass
    refused = stack.post([user("Hi")], headers=headers)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "session_busy"
    assert refused.headers["x-should-retry"] == "false"
    thread.join()
    assert first[0].status_code == 200
    assert len(stack.engine.requests) == 1


def test_turns_of_one_session_run_one_after_the_other(start: Start) -> None:
    stack = start(sessions={"busy_wait": 20})
    running, most = 0, 0
    lock = threading.Lock()

    def script(body: Body) -> Answer:
        nonlocal running, most
        with lock:
            running = len(stack.engine.running)
            most = max(most, running)
        return Answer("ok", pause=0.05)

    stack.engine.script = script
    headers = {"X-AgentKV-Session": "s"}
    replies: list[Any] = []
    threads = [
        threading.Thread(target=lambda: replies.append(stack.post([user("Hi")], headers=headers))) for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.status_code for reply in replies] == [200] * 10
    assert most == 0  # none was running when another arrived at the engine
    epochs = [FakeEngine.control(r)["epoch"] for r in stack.engine.requests]  # type: ignore[index]
    assert epochs == sorted(set(epochs))


def test_tenants_with_the_same_ids_and_messages_share_nothing(start: Start) -> None:
    import hashlib

    keys = [{"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name} for name in ("alice", "bob")]
    stack = start(api_keys=keys)
    for name in ("alice", "bob"):
        for headers in ({"X-AgentKV-Session": "same"}, {}):
            messages = [user("Hi")]
            auth = {"authorization": f"Bearer {name}", **headers}
            assert stack.say(messages, headers=auth)["agentkv"]["state"] == "new"
    sessions = sessions_of(stack)
    assert len(set(sessions)) == 4
    salts = [request["cache_salt"] for request in stack.engine.requests]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    # A conversation that another tenant copies word by word is nobody's but the copier's.
    copied = [user("Hi"), {"role": "assistant", "content": "Hello from the model."}, user("More")]
    auth = {"authorization": "Bearer bob"}
    stack.say(copied, headers=auth)
    assert sessions_of(stack)[-1] not in sessions[:2]


def test_a_tenant_holds_a_bounded_number_of_sessions(start: Start) -> None:
    stack = start(sessions={"max_per_tenant": 2})
    for name in ("a", "b", "c"):
        stack.say([user("Hi")], headers={"X-AgentKV-Session": name})
    # The one unused for longest made room.
    messages = [user("Hi"), {"role": "assistant", "content": "Hello from the model."}, user("More")]
    assert stack.say(list(messages), headers={"X-AgentKV-Session": "c"})["agentkv"]["state"] == "resumed"
    assert stack.say(list(messages), headers={"X-AgentKV-Session": "a"})["agentkv"]["state"] == "new"
