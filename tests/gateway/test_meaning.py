"""Messages by meaning: what makes another conversation, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv_serve.gateway.encoding import digest
from agentkv_serve.gateway.sessions.meaning import chain_and_head, message_digest


def chain(messages: list[dict[str, Any]], tools: Any, template_kwargs: dict[str, Any]) -> list[bytes]:
    return chain_and_head(messages, tools, template_kwargs)[0]


def head(messages: list[dict[str, Any]], tools: Any) -> tuple[bytes, bytes]:
    return chain_and_head(messages, tools, {})[1]


def call(arguments: str, name: str = "f", call_id: str = "c1") -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": call_id, "function": {"name": name, "arguments": arguments}}]}


SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("null content", {"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
    ("missing content", {"role": "assistant"}, {"role": "assistant", "content": ""}),
    ("parts", {"role": "user", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "ab"}]}),
    (
        "several parts",
        {"role": "tool", "content": "ab"},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ),
    ("blanks around", {"role": "assistant", "content": "\n\nyes "}, {"role": "assistant", "content": "yes"}),
    (
        "dropped reasoning",
        {"role": "assistant", "content": "x", "reasoning_content": "r"},
        {"role": "assistant", "content": "x"},
    ),
    ("spaces", call('{"a":1,"b":[2,3]}'), call('{ "a": 1, "b": [2, 3] }')),
    ("key order", call('{"a":1,"b":2}'), call('{"b":2,"a":1}')),
    ("escapes", call('{"a":"\\u00e9\\/"}'), call('{"a":"é/"}')),
    ("empty arguments", call(""), call("{}")),
    ("exponent", call('{"a":1e3}'), call('{"a":1000.0}')),
    ("no JSON", call("{broken"), call("{broken")),
    ("other fields", {"role": "assistant", "content": "x", "refusal": None}, {"role": "assistant", "content": "x"}),
    ("no calls", {"role": "assistant", "content": "x", "tool_calls": []}, {"role": "assistant", "content": "x"}),
]

OTHER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("text", {"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
    ("role", {"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
    ("blanks of a user", {"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
    ("argument value", call('{"a":1}'), call('{"a":2}')),
    ("argument type", call('{"a":1}'), call('{"a":"1"}')),
    ("function", call("{}"), call("{}", name="g")),
    ("call id", call("{}"), call("{}", call_id="c2")),
    ("broken arguments", call("{broken"), call("{broken }")),
    (
        "answered call",
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
        {"role": "tool", "content": "x", "tool_call_id": "c2"},
    ),
    (
        "image",
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "b"}}]},
    ),
    ("number of calls", call("{}"), {**call("{}"), "tool_calls": call("{}")["tool_calls"] * 2}),
]


@pytest.mark.parametrize(("what", "one", "two"), SAME, ids=[w for w, *_ in SAME])
def test_equal_in_meaning(what: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    assert message_digest(one) == message_digest(two)


@pytest.mark.parametrize(("what", "one", "two"), OTHER, ids=[w for w, *_ in OTHER])
def test_different_in_meaning(what: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    assert message_digest(one) != message_digest(two)


def test_a_chain_depends_on_everything_before() -> None:
    hi, more = {"role": "user", "content": "Hi"}, {"role": "user", "content": "More"}
    plain = chain([hi, more], [], {})
    assert len(plain) == 3
    assert chain([hi], [], {}) == plain[:2]
    assert chain([more, hi], [], {})[2] != plain[2]
    assert chain([hi, more], [{"type": "function"}], {})[2] != plain[2]
    assert chain([hi, more], [], {"enable_thinking": False})[2] != plain[2]
    assert chain([hi, more], None, {}) == plain


def test_texts_cannot_be_shifted_between_messages() -> None:
    one = chain([{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}], [], {})
    two = chain([{"role": "user", "content": "a"}, {"role": "user", "content": "bc"}], [], {})
    assert one[-1] != two[-1]


def test_an_agent_is_known_by_its_system_message_and_tools() -> None:
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert head([system, user], tools) == head([system], tools)
    assert head([user], tools)[0] != head([system, user], tools)[0]
    assert head([user], tools)[1] != head([user], [])[1]


@given(st.lists(st.binary(max_size=9), max_size=5), st.lists(st.binary(max_size=9), max_size=5))
def test_digests_of_different_lists_differ(one: list[bytes], two: list[bytes]) -> None:
    assert (digest(*one) == digest(*two)) is (one == two)


def test_digests_keep_parts_apart() -> None:
    assert len({digest(*p) for p in ([], [b""], [b"", b""], [b"ab"], [b"a", b"b"], [b"", b"ab"], [b"ab", b""])}) == 7
