"""Text mode: settled labels with hold-back, whatever the chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentkv_serve.phase_tagger import Label, TextLabeller, Vocabulary, label_text
from agentkv_serve.phase_tagger.labels import runs_of

from .test_automaton import HOSTILE, built

THINK, ACT, SAY = Label.THINK, Label.ACT, Label.SAY
FAMILIES = ["nemotron", "llama3", "hermes", "smollm2", "phi4-mini", "qwen3", "lfm2", "mistral"]


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("nemotron", "<think>a</think>\n\nHi", [("<think>a</think>", THINK), ("\n\nHi", SAY)]),
        (
            "nemotron",
            "<think>a</think>\n<TOOLCALL>[]</TOOLCALL>",
            [("<think>a</think>", THINK), ("\n<TOOLCALL>[]</TOOLCALL>", ACT)],
        ),
        ("nemotron", "Hi <TOOL", [("Hi <TOOL", SAY)]),
        ("llama3", '\n{"name": "f"}', [('\n{"name": "f"}', ACT)]),
        ("llama3", 'It is {"a": 1}', [('It is {"a": 1}', SAY)]),
        ("llama3", "<|python_tag|>f()", [("<|python_tag|>f()", ACT)]),
        ("hermes", "a<tool_call>b</tool_call>\nc", [("a", SAY), ("<tool_call>b</tool_call>", ACT), ("\nc", SAY)]),
        (
            "smollm2",
            "<tool_call>1</tool_call>\n<tool_call>2</tool_call>",
            [("<tool_call>1</tool_call>\n<tool_call>2</tool_call>", ACT)],
        ),
    ],
)
def test_settled_labels(family: str, text: str, expected: list[tuple[str, Label]]) -> None:
    assert label_text(family, text) == expected


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(text=HOSTILE, cuts=st.lists(st.integers(0, 120), max_size=6), initial=st.sampled_from(["start", "think", "say"]))
def test_chunks_change_nothing(family: str, text: str, cuts: list[int], initial: str) -> None:
    labeller = TextLabeller(family, initial)
    bounds = [0, *sorted(cuts), len(text)]
    pieces = [piece for a, b in pairwise(bounds) for piece in labeller.feed(text[a:b])]
    pieces += labeller.flush()
    assert "".join(piece for piece, _ in pieces) == text
    merged: list[tuple[str, Label]] = []
    for piece, label in pieces:
        if merged and merged[-1][1] is label:
            merged[-1] = (merged[-1][0] + piece, label)
        else:
            merged.append((piece, label))
    assert merged == label_text(family, text, initial)


def test_what_may_become_a_marker_is_held() -> None:
    labeller = TextLabeller("nemotron")
    assert labeller.feed("Hi <TO") == [("Hi ", SAY)]
    assert labeller.feed("OL>") == [("<TOOL>", SAY)]
    assert labeller.feed("<TOOLCALL") == []
    assert labeller.feed(">[") == [("<TOOLCALL>[", ACT)] and labeller.open is ACT
    assert labeller.feed("漢"[:1]) == [("漢", ACT)]
    assert labeller.flush() == []


@settings(max_examples=60, deadline=None)
@given(text=HOSTILE)
@example(text="<tool_call></tool_call></think>")
def test_the_automaton_differs_only_inside_openers(tiny: Vocabulary, text: str) -> None:
    """The device labels at once: only pieces of an opener, or that begin like one, and whitespace may settle otherwise.

    After a call "</" is such a piece: its first byte may open the next call, its second says that it does not.
    """
    automaton = built("smollm2", tiny)
    text = text.replace("<|im_end|>", "").replace("<|im_start|>", "")
    ids = tiny.encode(text)[0].tolist()
    causal, _ = automaton.run(automaton.initial["start"], ids)
    table = tiny.token_bytes()
    settled = [label for piece, label in label_text("smollm2", text) for _ in piece.encode()]
    position = 0
    for number, label in zip(ids, causal, strict=True):
        token = table[number]
        here = set(settled[position : position + len(token)])
        position += len(token)
        if label not in here:
            opener = token.strip().startswith(b"<") or any(
                token.strip() in marker for marker in (b"<tool_call>", b"<think>")
            )
            assert opener or not token.strip(), (text, token, label, here)


def test_long_texts_without_markers_are_one_piece() -> None:
    text = "word " * 20_000
    assert label_text("smollm2", text) == [(text, SAY)]
    assert runs_of([SAY] * 3) == [(0, 3, SAY)]
