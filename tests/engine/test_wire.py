"""The JSON that gateway and engine exchange about a turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentkv_serve.engine.wire import FACTS_PREFIX, Facts, WireError, parse_turn


def params(**changes: Any) -> dict[str, str]:
    body = {
        "v": 1,
        "session": "ab" * 16,
        "epoch": 3,
        "budget": 512,
        "policy": "agentkv",
        "runs": [0, 2, 0, 2, 5, 3, 5, 6, 5],
        "decode": {"family": "qwen3", "initial": "think"},
    }
    body.update(changes)
    return {"agentkv": json.dumps({key: value for key, value in body.items() if value is not None})}


def test_a_turn_is_read_with_one_label_per_token() -> None:
    spec = parse_turn(params(), 6)
    assert spec is not None
    assert spec.labels.tolist() == [0, 0, 3, 3, 3, 5]
    assert (spec.session, spec.epoch, spec.budget) == ("ab" * 16, 3, 512)
    assert (spec.policy, spec.family, spec.initial) == ("agentkv", "qwen3", "think")
    assert not spec.rebuild and not spec.force_window


def test_budget_auto_has_a_cap() -> None:
    spec = parse_turn(params(budget="auto", cap=2048), 6)
    assert spec is not None and spec.auto and spec.budget == 2048
    fixed = parse_turn(params(cap=2048), 6)
    assert fixed is not None and not fixed.auto and fixed.budget == 512
    for cap in (None, 0, "many"):
        with pytest.raises(WireError, match="cap"):
            parse_turn(params(budget="auto", cap=cap), 6)


def test_a_turn_may_leave_the_policy_to_the_worker_and_give_its_tokens() -> None:
    spec = parse_turn(params(policy=None, force_ids=[5, 0, 7]), 6)
    assert spec is not None and spec.policy == "" and spec.force_ids == (5, 0, 7)
    for wrong in ([-1], [True], "12", [1.5]):
        with pytest.raises(WireError, match="force_ids must be a list of token ids"):
            parse_turn(params(force_ids=wrong), 6)


@pytest.mark.parametrize("custom_params", [None, {}, {"other": 1}, "text"])
def test_a_request_without_our_field_is_none_of_ours(custom_params: Any) -> None:
    assert parse_turn(custom_params, 6) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"v": 2}, "v = 1"),
        ({"session": ""}, "session"),
        ({"session": 7}, "session"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": True}, "epoch"),
        ({"budget": 1.5}, "budget"),
        ({"budget": "512"}, "budget"),
        ({"policy": 3}, "policy"),
        ({"decode": []}, "decode"),
        ({"decode": {"initial": "sleep"}}, "start, think, say, act"),
        ({"runs": None}, "runs"),
        ({"runs": []}, "runs"),
        ({"runs": [0, 6]}, "runs"),
        ({"runs": [0, 6, 6]}, "runs"),  # no such label
        ({"runs": [0, 5, 0]}, "cover [0, 6)"),  # a gap at the end
        ({"runs": [0, 2, 0, 3, 6, 1]}, "cover"),  # a gap inside
        ({"runs": [0, 4, 0, 3, 6, 1]}, "cover"),  # an overlap
        ({"runs": [0, 7, 0]}, "cover"),
        ({"runs": [0, 0, 1, 0, 6, 0]}, "cover"),  # an empty run
        ({"runs": [0.0, 6, 0]}, "runs"),
        ({"runs": [True, 6, 0]}, "runs"),
        ({"runs": {"0": 6}}, "runs"),
        ({"runs": [0, 1 << 63, 0]}, "runs"),
        ({"runs": [0, 6, -1]}, "runs"),
    ],
)
def test_a_wrong_field_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(WireError) as caught:
        parse_turn(params(**changes), 6)
    assert caught.value.code == "bad_request"
    assert str(caught.value).startswith("agentkv:bad_request: ")
    assert says in str(caught.value)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(WireError, match="no tokens"):
        parse_turn(params(runs=[]), 0)


@pytest.mark.parametrize("raw", ["{", "[]", "1", 5])
def test_what_is_no_json_object_is_refused(raw: Any) -> None:
    with pytest.raises(WireError):
        parse_turn({"agentkv": raw}, 6)


def test_facts_travel_as_marked_json() -> None:
    facts = Facts("rebuilt", "evicted", 100, 64, 35, 12, {"think": 4.0, "act": 0.0, "tool": 20.0, "others": 40.0})
    text = facts.encode()
    assert text.startswith(FACTS_PREFIX)
    body = json.loads(text.removeprefix(FACTS_PREFIX))
    assert body["v"] == 1 and body["state"] == "rebuilt" and body["reason"] == "evicted"
    assert (body["logical"], body["held"], body["evicted"], body["prefill"]) == (100, 64, 35, 12)
    assert sum(body["phases"].values()) == 64
