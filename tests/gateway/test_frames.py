"""Frames of the engine's stream, however they arrive."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv_serve.gateway.upstream.facts import Facts
from agentkv_serve.gateway.upstream.frames import Assembly, FrameCutter, Kind, kind_of, payload_of


def frame(value: object, end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(value, separators=(',', ':'))}{end}".encode()


def content(**delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


FRAMES = [
    frame(content(content="a\n\nb")),
    b": ping\n\n",
    frame(content(content="ü🙂"), "\r\n\r\n"),
    frame({"choices": [], "usage": {"prompt_tokens": 1}}),
    b"data: [DONE]\n\n",
]


@given(st.lists(st.integers(0, len(b"".join(FRAMES))), max_size=12))
def test_frames_do_not_depend_on_how_the_bytes_were_split(cuts: list[int]) -> None:
    data = b"".join(FRAMES)
    edges = [0, *sorted(cuts), len(data)]
    cutter = FrameCutter()
    found = [f for a, b in zip(edges, edges[1:], strict=False) for f in cutter.feed(data[a:b])]  # noqa: RUF007
    assert [payload_of(f) for f in found] == [payload_of(f) for f in FRAMES]
    assert b"".join(found) == data
    assert cutter.rest == b""


def test_an_unfinished_frame_is_kept() -> None:
    cutter = FrameCutter()
    assert cutter.feed(b'data: {"choices"') == []
    assert cutter.rest == b'data: {"choices"'


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (frame(content(content='"choices":[] "sglext" [DONE]')), Kind.CONTENT),
        (b'data: {"choices": [{"index": 0, "delta": {}}]}\n\n', Kind.CONTENT),
        (frame({"choices": [], "sglext": {"output_ids": [[1]]}}), Kind.SGLEXT),
        (b"event: sglext_ids\n" + frame({"choices": [], "sglext": {"output_ids": [[1]]}}), Kind.SGLEXT),
        (frame({"choices": [], "usage": {"prompt_tokens": 3}}), Kind.USAGE),
        (frame({"choices": [], "usage": None}), Kind.OTHER),
        (frame({"usage": {"prompt_tokens": 3}}), Kind.USAGE),
        (frame({"error": {"message": "x", "code": 400}}), Kind.ERROR),
        (b"data: [DONE]\r\n\r\n", Kind.DONE),
        (b": keep-alive\n\n", Kind.OTHER),
        (b"data: {broken\n\n", Kind.OTHER),
        (b"event: ping\n\n", Kind.OTHER),
    ],
)
def test_frames_are_told_apart(data: bytes, kind: Kind) -> None:
    assert kind_of(data) is kind


ARGUMENTS = '{"a": "}{ </tool_call> \\" 漢字 🙂\\n", "b": [1, 2]}'


@pytest.mark.parametrize("step", range(1, 9))
def test_streamed_arguments_add_up_at_any_step(step: int) -> None:
    parts = [ARGUMENTS[i : i + step] for i in range(0, len(ARGUMENTS), step)]
    frames = [frame(content(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}]))]
    frames += [
        frame(content(tool_calls=[{"index": 0, "id": None, "function": {"name": None, "arguments": p}}])) for p in parts
    ]
    message = Assembly.of_frames(frames).message()
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
    ]


def test_parallel_calls_stay_apart_when_they_come_in_one_frame() -> None:
    calls = [{"index": i, "id": f"c{i}", "function": {"name": f"f{i}", "arguments": f'{{"x":{i}}}'}} for i in range(2)]
    message = Assembly.of_frames([frame(content(tool_calls=calls))]).message()
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "f0", "arguments": '{"x":0}'},
        {"name": "f1", "arguments": '{"x":1}'},
    ]


def test_calls_without_an_index_count_by_place() -> None:
    calls = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}, {"id": "b", "function": {"name": "g"}}]
    message = Assembly.of_frames([frame(content(tool_calls=calls))]).message()
    assert [(c["id"], c["function"]["arguments"]) for c in message["tool_calls"]] == [("a", "{}"), ("b", "")]


def test_other_choices_are_not_mixed_in() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "no"}}]}
    assert Assembly.of_frames([frame(content(content="yes")), frame(other)]).message()["content"] == "yes"


def test_facts_of_both_frames() -> None:
    report = {"v": 1, "state": "resumed", "reason": None, "logical": 9, "held": 5, "evicted": 4, "prefill": 2}
    facts = Facts()
    facts.read({"cached_tokens_details": {"device": 3, "host": 1, "storage_backend": "agentkv:" + json.dumps(report)}})
    facts.read({"output_ids": [[7, 8]]})
    assert (facts.state, facts.held, facts.prefill, facts.cached, facts.output_ids) == ("resumed", 5, 2, 4, [7, 8])


def test_a_worker_without_our_plug_in_reports_no_state() -> None:
    facts = Facts()
    facts.read({"cached_tokens_details": {"device": 3, "host": 0, "storage": 1, "storage_backend": "file"}})
    assert facts.state is None and facts.cached == 3
