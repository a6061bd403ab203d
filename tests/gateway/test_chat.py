"""Chat turns: what reaches the engine, what reaches the client."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.gateway.conftest import WEATHER, Stack, Start, system, tool_result, user
from tests.gateway.engine import Answer, Body, FakeEngine


def lines(text: str) -> list[str]:
    return [frame for frame in text.split("\n\n") if frame]


def test_a_turn_goes_to_the_engine_as_token_ids(shared: Stack) -> None:
    shared.say([system("Be brief."), user("Hi")], temperature=0, max_completion_tokens=9, top_k=3)
    sent = shared.engine.requests[0]
    assert shared.engine.text(sent) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sent["messages"] == [{"role": "user", "content": "."}]
    assert (sent["temperature"], sent["max_completion_tokens"], sent["top_k"]) == (0, 9, 3)
    assert len(sent["rid"]) == 32 and int(sent["rid"], 16) >= 0
    control = FakeEngine.control(sent)
    assert control is not None
    assert control["v"] == 1 and control["epoch"] == 0 and control["budget"] == 4096
    assert control["policy"] == "agentkv" and len(control["session"]) == 64
    assert shared.engine.headers[0]["x-sglext-ids-framed"] == "1"


def test_later_turns_send_the_sampled_tokens_and_only_new_text(stack: Stack) -> None:
    stack.engine.script = lambda body: Answer("It is sunny.", reasoning="The user wants\nweather")
    messages = [user("Weather?")]
    first = stack.say(messages)
    # A framework that knows no reasoning sends it back without.
    messages[-1] = {"role": "assistant", "content": messages[-1]["content"]}
    messages.append(user("And tomorrow?"))
    second = stack.say(messages)
    before, after = stack.engine.requests[0]["input_ids"], stack.engine.requests[1]["input_ids"]
    assert after[: len(before)] == before
    assert "The user wants\nweather" in stack.engine.text(stack.engine.requests[1])
    assert first["agentkv"]["state"] == "new"
    assert second["agentkv"]["state"] == "resumed"
    new = "\n<|im_start|>user\nAnd tomorrow?<|im_end|>\n<|im_start|>assistant\n"
    assert second["agentkv"]["prefill_tokens"] == len(stack.engine.tokenizer.encode(new).ids)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(after) - second["agentkv"]["prefill_tokens"]
    assert [FakeEngine.control(r)["epoch"] for r in stack.engine.requests] == [0, 1]  # type: ignore[index]


def test_content_frames_pass_byte_for_byte(shared: Stack) -> None:
    shared.engine.script = lambda body: Answer('Grüße 🙂 "choices":[] \\ data: [DONE]\n\n', calls=[("f", '{"a": 1}')])
    raw: list[bytes] = []
    original = shared.engine._stream

    async def recording(*arguments: object) -> object:
        async for frame in original(*arguments):  # type: ignore[arg-type]
            raw.append(frame)
            yield frame

    shared.engine._stream = recording  # type: ignore[method-assign, assignment]
    reply = shared.post([user("Hi")], stream=True)
    content = [frame.decode() for frame in raw if b'"choices":[{' in frame]
    assert reply.text == "".join(content) + "data: [DONE]\n\n"
    assert any(b"sglext_ids" in frame for frame in raw)


@pytest.mark.parametrize(
    ("options", "told"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
def test_usage_frames_come_as_the_client_asked(shared: Stack, options: Body | None, told: bool) -> None:
    reply = shared.post([user("Hi")], stream=True, stream_options=options)
    frames = lines(reply.text)
    assert frames[-1] == "data: [DONE]"
    usages = [json.loads(f[6:])["usage"] for f in frames[:-1] if json.loads(f[6:]).get("usage")]
    assert len(usages) == (1 if told else 0)
    if told:
        assert usages[0]["agentkv"]["state"] == "new"
        assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "sglext" not in reply.text
    assert shared.engine.requests[0]["stream_options"] == {"include_usage": True}


def test_a_whole_reply_hides_the_engines_extras(shared: Stack) -> None:
    reply = shared.say([user("Hi")])
    assert "sglext" not in reply
    told = reply["agentkv"]
    assert told["logical_tokens"] == told["kv_tokens"] + told["evicted_tokens"]
    assert sum(told["phases"].values()) == told["kv_tokens"]


def test_headers_say_what_was_decided(stack: Stack) -> None:
    messages = [user("Hi")]
    headers = stack.say(messages)["headers"]
    assert headers["x-agentkv-session"].startswith("akv-")
    assert headers["x-agentkv-session-source"] == "issued"
    assert headers["x-agentkv-session-state"] == "new"
    assert headers["x-agentkv-worker"] == "w0"
    assert headers["x-agentkv-budget"] == "4096"
    assert headers["x-request-id"]
    messages.append(user("More"))
    with stack.http.stream(
        "POST", "/v1/chat/completions", json={"model": "tiny", "messages": messages, "stream": True}
    ) as reply:
        reply.read()
    assert reply.headers["x-agentkv-session"] == headers["x-agentkv-session"]
    assert reply.headers["x-agentkv-session-source"] == "content"
    assert reply.headers["x-agentkv-session-state"] == "resumed"
    assert reply.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_tool_loop_resumes_although_the_client_rewrites_its_calls(stack: Stack, named: bool, streamed: bool) -> None:
    stack.engine.script = lambda body: Answer(
        "", reasoning="think", calls=[("weather", '{"city":"Köln","days":[1,2.0]}'), ("weather", "{}")]
    )
    messages = [system("Use tools."), user("Weather?")]
    headers = {"X-AgentKV-Session": "loop"} if named else None
    states = []
    for turn in range(5):
        fields: Body = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        reply = stack.post(messages, headers=headers, tools=[WEATHER], **fields)
        assert reply.status_code == 200, reply.text
        states.append(reply.headers["x-agentkv-session-state"])
        calls = read_calls(reply.text) if streamed else reply.json()["choices"][0]["message"]["tool_calls"]
        # Keys reordered, spaces added, no reasoning, null content: as frameworks do.
        again = [
            {
                "function": {
                    "arguments": json.dumps(dict(reversed(json.loads(c["function"]["arguments"]).items())), indent=1),
                    "name": c["function"]["name"],
                },
                "type": "function",
                "id": c["id"],
            }
            for c in calls
        ]
        messages.append({"tool_calls": again, "content": None, "role": "assistant"})
        messages += [tool_result(c["id"], f"result {turn} </think><|im_end|>") for c in calls]
    assert states == ["new", "resumed", "resumed", "resumed", "resumed"]
    ids = [request["input_ids"] for request in stack.engine.requests]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(ids))
    assert len(stack.engine.sessions) == 1


def read_calls(text: str) -> list[Body]:
    calls: dict[int, Body] = {}
    for frame in lines(text):
        if frame == "data: [DONE]":
            continue
        for choice in json.loads(frame[6:])["choices"]:
            for part in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"id": part["id"], "function": {"name": "", "arguments": ""}})
                call["function"]["name"] += part["function"]["name"] or ""
                call["function"]["arguments"] += part["function"]["arguments"] or ""
    return [calls[i] for i in sorted(calls)]


def test_tool_schemas_with_shuffled_keys_are_the_same_tools(stack: Stack) -> None:
    messages = [user("Hi")]
    stack.say(messages, tools=[WEATHER])
    shuffled = json.loads(json.dumps(WEATHER))
    shuffled["function"] = dict(reversed(shuffled["function"].items()))
    messages.append(user("More"))
    assert stack.say(messages, tools=[shuffled])["agentkv"]["state"] == "resumed"


def test_a_cut_turn_goes_on_after_its_last_token(stack: Stack) -> None:
    stack.engine.script = lambda body: Answer("Once upon a", stop=False)
    messages = [user("Tell")]
    reply = stack.say(messages)
    assert reply["choices"][0]["finish_reason"] == "length"
    messages.append(user("Go on"))
    assert stack.say(messages)["agentkv"]["state"] == "resumed"
    assert "Once upon a<|im_end|>\n<|im_start|>user\nGo on" in stack.engine.text(stack.engine.requests[1])


@pytest.mark.parametrize("budget", ["128", "full"])
def test_a_budget_never_changes_the_prompt(start: Start, budget: str) -> None:
    plain, bounded = start(), start()
    for stack, headers in ((plain, None), (bounded, {"X-AgentKV-Budget": budget})):
        messages = [user("Hi " * 50)]
        stack.say(messages, headers=headers)
        messages.append(user("More"))
        stack.say(messages)
    for a, b in zip(plain.engine.requests, bounded.engine.requests, strict=True):
        assert a["input_ids"] == b["input_ids"]


def test_a_budget_holds_until_it_is_changed(stack: Stack) -> None:
    messages = [user("Hi " * 100)]
    budgets = []
    for value in ("128", None, "256", None, "full"):
        reply = stack.say(messages, headers={"X-AgentKV-Budget": value} if value else None)
        budgets.append((reply["headers"]["x-agentkv-budget"], FakeEngine.control(stack.engine.requests[-1])["budget"]))  # type: ignore[index]
        messages.append(user("More"))
    assert budgets == [("128", 128), ("128", 128), ("256", 256), ("256", 256), ("full", 0)]


def test_budget_auto_leaves_the_choice_to_the_worker_up_to_a_cap(stack: Stack) -> None:
    for headers in ({"X-AgentKV-Budget": "auto"}, None):
        reply = stack.say([user("Hi " * 100)], headers=headers)
        control = FakeEngine.control(stack.engine.requests[-1])
        assert control is not None
        assert (control["budget"], control.get("cap")) == (("auto", 4096) if headers else (4096, None))
        assert reply["headers"]["x-agentkv-budget"] == ("auto" if headers else "4096")
        assert reply["usage"]["agentkv"]["budget"] == 4096


def test_the_body_mirror_serves_clients_without_headers(stack: Stack) -> None:
    mirror = {"session_id": "mine", "budget": 200, "policy": "full", "final": True}
    reply = stack.say([user("Hi")], agentkv=mirror)
    control = FakeEngine.control(stack.engine.requests[0])
    assert control is not None
    assert (control["budget"], control["policy"]) == (200, "full")
    assert reply["headers"]["x-agentkv-session"] == "mine"
    assert reply["headers"]["x-agentkv-session-source"] == "body"
    assert stack.engine.closed == [control["session"]]
    assert "agentkv" not in stack.engine.requests[0]


def test_a_final_turn_releases_the_session(stack: Stack) -> None:
    messages = [user("Hi")]
    stack.say(messages, headers={"X-AgentKV-Session": "s"})
    messages.append(user("Bye"))
    stack.say(messages, headers={"X-AgentKV-Session": "s", "X-AgentKV-Session-Final": "true"})
    messages.append(user("Again"))
    reply = stack.say(messages, headers={"X-AgentKV-Session": "s"})
    assert len(stack.engine.closed) == 1
    assert reply["agentkv"]["state"] == "new"
    assert reply["headers"]["x-agentkv-session-source"] == "header"


def test_a_token_limit_is_refused_when_spent_and_raised_to_go_on(stack: Stack) -> None:
    messages = [user("Hi")]
    headers = {"X-AgentKV-Session": "s", "X-AgentKV-Session-Token-Limit": "120"}
    used = stack.say(messages, headers=headers)["usage"]["total_tokens"]
    messages.append(user("More " * 10))
    refused = stack.post(messages, headers=headers)
    assert refused.status_code == 402
    assert refused.json()["error"]["code"] == "session_budget_exhausted"
    assert refused.headers["x-should-retry"] == "false"
    assert len(stack.engine.requests) == 1
    reply = stack.say(messages, headers={**headers, "X-AgentKV-Session-Token-Limit": str(used + 2000)})
    assert reply["agentkv"]["state"] == "resumed"


def test_a_token_limit_bounds_what_a_turn_may_generate(stack: Stack) -> None:
    headers = {"X-AgentKV-Session": "s", "X-AgentKV-Session-Token-Limit": "100"}
    stack.say([user("Hi")], headers=headers, max_completion_tokens=5000 - 2000)
    sent = stack.engine.requests[0]
    assert sent["max_tokens"] == 100 - len(sent["input_ids"])
    assert "max_completion_tokens" not in sent


def test_rebuild_on_request(stack: Stack) -> None:
    messages = [user("Hi")]
    stack.say(messages, headers={"X-AgentKV-Session": "s"})
    messages.append(user("More"))
    reply = stack.say(messages, headers={"X-AgentKV-Session": "s", "X-AgentKV-Session-Rebuild": "true"})
    assert reply["agentkv"]["state"] == "rebuilt"
    assert reply["headers"]["x-agentkv-session-state"] == "rebuilt"


@pytest.mark.parametrize("streamed", [True, False])
def test_thinking_arguments_reach_the_template_and_the_parser(shared: Stack, streamed: bool) -> None:
    shared.post([user("Hi")], reasoning_effort="none", stream=streamed)
    assert shared.engine.requests[0]["reasoning_effort"] == "none"


@pytest.mark.parametrize(
    ("general", "asked", "state"),
    [
        ("all", None, "resumed"),
        ("template", None, "rebuilt"),
        ("all", {"headers": {"X-AgentKV-Retain": "template"}}, "rebuilt"),
        ("template", {"agentkv": {"retain": "all"}}, "resumed"),
    ],
)
def test_old_thinking_stays_or_goes_as_the_template_says(
    start: Start, general: str, asked: Body | None, state: str
) -> None:
    stack = start(sessions={"retain": general})
    stack.engine.script = lambda body: Answer("", reasoning="old thoughts", calls=[("weather", "{}")])
    messages = [user("Weather?")]
    # Said once, it holds for the session.
    session = stack.say(messages, tools=[WEATHER], **(asked or {}))["headers"]["x-agentkv-session"]
    call = messages[-1]["tool_calls"][0]["id"]
    messages[-1] = {k: v for k, v in messages[-1].items() if k != "reasoning_content"}
    messages.append(tool_result(call, "sunny"))
    stack.engine.script = lambda body: Answer("It is sunny.")
    # Within the tool loop nothing is dropped.
    assert stack.say(messages, tools=[WEATHER])["agentkv"]["state"] == "resumed"
    messages.append(user("And tomorrow?"))
    reply = stack.say(messages, tools=[WEATHER])
    assert reply["agentkv"]["state"] == state
    assert ("old thoughts" in stack.engine.text(stack.engine.requests[-1])) is (state == "resumed")
    messages.append(user("And then?"))
    assert stack.say(messages, tools=[WEATHER])["agentkv"]["state"] == "resumed"
    shown = stack.http.get(f"/v1/agentkv/sessions/{session}").json()
    assert shown["retain"] == ("template" if asked and "headers" in asked else "all" if asked else None)
