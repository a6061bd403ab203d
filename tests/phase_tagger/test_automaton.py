"""The decode automaton: what it labels, and that tables, splits and spellings agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv_serve.phase_tagger import Automaton, Label, Vocabulary, build_automaton, get_family
from agentkv_serve.phase_tagger.families import FAMILIES
from agentkv_serve.phase_tagger.machine import LABEL_OF, SPACE, Machine

from .tiny import tiny_tokenizer

THINK, ACT, SAY, GLUE = Label.THINK, Label.ACT, Label.SAY, Label.GLUE


def pieces(automaton: Automaton, vocabulary: Vocabulary, text: str, initial: str = "start") -> list[tuple[Label, str]]:
    """The text in runs of equal labels."""
    ids = vocabulary.encode(text)[0].tolist()
    labels, _ = automaton.run(automaton.initial[initial], ids)
    found: list[tuple[Label, list[int]]] = []
    for number, label in zip(ids, labels, strict=True):
        if not found or found[-1][0] is not label:
            found.append((label, []))
        found[-1][1].append(number)
    return [(label, vocabulary.decode(numbers)) for label, numbers in found]


@pytest.fixture(scope="module")
def by_id(tiny_ids: Vocabulary) -> Automaton:
    return build_automaton("qwen3", tiny_ids)


@pytest.mark.parametrize(
    ("text", "initial", "expected"),
    [
        ("Hello.<|im_end|>", "start", [(SAY, "Hello."), (GLUE, "<|im_end|>")]),
        ("<think>\nhm\n</think>\n\nYes", "start", [(THINK, "<think>\nhm\n</think>"), (SAY, "\n\nYes")]),
        ("hm\n</think>\n\nYes", "think", [(THINK, "hm\n</think>"), (SAY, "\n\nYes")]),
        ("<tool_call>\n{}\n</tool_call>", "start", [(ACT, "<tool_call>\n{}\n</tool_call>")]),
        ('{"a": 1}</tool_call>.', "act", [(ACT, '{"a": 1}</tool_call>'), (SAY, ".")]),
        # parallel calls are one run, separators included
        ("<tool_call>1</tool_call>\n<tool_call>2</tool_call>", "start", None),
        # inside a call only its close and the turn end are looked at
        ("<tool_call></think> <think></tool_call>", "start", None),
        # a call at the start of a line ends the thinking; prose that mentions it does not
        ("a\n<tool_call>b", "think", [(THINK, "a\n"), (ACT, "<tool_call>b")]),
        ("use <tool_call> now", "think", [(THINK, "use <tool_call> now")]),
        # a think block only opens the turn, and only once
        ("Hi <think>x</think>", "start", [(SAY, "Hi <think>x</think>")]),
        ("</think><think>x", "think", [(THINK, "</think>"), (SAY, "<think>x")]),
        ("<think>x", "say", [(SAY, "<think>x")]),
        # an end inside thinking keeps it, and the end is final
        ("hm<|im_end|></think>x", "think", [(THINK, "hm"), (GLUE, "<|im_end|></think>x")]),
        # control tokens that are no markers belong to where they stand
        ("a<|im_start|>b", "think", [(THINK, "a<|im_start|>b")]),
    ],
)
def test_markers_of_one_id(
    by_id: Automaton, tiny_ids: Vocabulary, text: str, initial: str, expected: list[tuple[Label, str]] | None
) -> None:
    assert pieces(by_id, tiny_ids, text, initial) == (expected or [(ACT, text)])


def test_spelled_markers_count_where_ids_exist(by_id: Automaton, tiny_ids: Vocabulary) -> None:
    """Constrained decoding does not use the ids; a turn end is only ever the id."""
    spelled = [tiny_ids.encode(character)[0][0] for character in "<tool_call>x</tool_call>y<|im_end|>z"]
    opener, call, rest = len("<tool_call"), len(">x</tool_call>"), len("y<|im_end|>z")
    assert by_id.run(by_id.initial["start"], spelled)[0] == [SAY] * opener + [ACT] * call + [SAY] * rest


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("smollm2", "Ok\n<tool_call>{}</tool_call>bye", [SAY, ACT, SAY]),
        ("smollm2", "<tool_cal>{}", [SAY]),
        ("smollm2", "<<tool_call>{}</tool_call></tool_call>", [SAY, ACT, SAY]),
        ("nemotron", "<think>\na</think>\n\n<TOOLCALL>[{}]</TOOLCALL>", [SAY, THINK, SAY, ACT]),
        ("llama3", ' {"name": "f"}', [ACT]),
        ("llama3", "The JSON is {}", [SAY]),
        ("phi4-mini", "functools[{}]", [SAY, ACT]),
        ("lfm2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>ok", [SAY, ACT, SAY]),
        ("deepseek-v3.2", "x</think>\n\n<｜DSML｜function_calls>y</｜DSML｜function_calls>", [SAY, ACT]),
    ],
)
def test_markers_of_plain_text(tiny: Vocabulary, family: str, text: str, expected: list[Label]) -> None:
    found = pieces(build_automaton(family, tiny), tiny, text)
    assert [label for label, _ in found] == expected


def test_channels(tiny: Vocabulary) -> None:
    control = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
    vocabulary = Vocabulary(tiny_tokenizer(control))
    automaton = build_automaton("gpt-oss", vocabulary)
    turn = (
        "<|channel|>analysis<|message|>hm to=x<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    )
    found = [piece for piece in pieces(automaton, vocabulary, turn) if piece[0] is not GLUE]
    assert found == [(THINK, "hm to=x"), (SAY, "I look."), (ACT, "{}")]
    early = (
        "to=functions.f<|channel|>analysis<|message|>{}<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes<|return|>"
    )
    found = [piece for piece in pieces(automaton, vocabulary, early) if piece[0] is not GLUE]
    assert found == [(ACT, "{}"), (SAY, "Yes")]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tables_are_closed(tiny: Vocabulary, family: str) -> None:
    automaton = build_automaton(get_family(family), tiny)
    assert automaton.next.shape == automaton.label.shape == (automaton.states, tiny.size + 1)
    assert automaton.next.dtype == np.int16 and automaton.label.dtype == np.int8
    assert automaton.next.min() >= 0 and automaton.next.max() < automaton.states
    assert set(np.unique(automaton.label)) <= {int(label) for label in Label}
    assert set(automaton.initial) == {"start", "think", "say", "act"}
    assert automaton.states <= 256


PARTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<tool", "_call>", "<"),
    *("<|im_end|>", "<|im_start|>", "{", " ", "a", "é", "漢", "🙂", "functools[", "<scratch_pad>", "\n", "x\n"),
)
HOSTILE = st.lists(st.sampled_from(PARTS), max_size=24).map("".join)


@pytest.mark.parametrize("family", ["smollm2", "nemotron", "llama3", "hermes", "phi4-mini", "smollm3"])
@settings(max_examples=60, deadline=None)
@given(text=HOSTILE, initial=st.sampled_from(["start", "think", "say", "act"]))
def test_tables_equal_the_machine_read_byte_by_byte(tiny: Vocabulary, family: str, text: str, initial: str) -> None:
    """An independent walk: bytes one at a time, the token's label decided from its bytes' labels."""
    automaton = built(family, tiny)
    machine = Machine(get_family(family), lambda marker: tiny.id_of(marker) is not None)
    table = tiny.token_bytes()
    ids = tiny.encode(text)[0].tolist()
    state, expected = machine.initial(initial), []
    for number in ids:
        if number in tiny.special:
            state, label = machine.column(state, tiny.added[number]) or machine.skip(state)
            expected.append(label)
            continue
        token, labels = table[number], []
        for byte in token:
            step = machine.byte(state, byte)
            labels.append(step.label)
            if step.owned:
                labels[-step.owned :] = [step.label] * min(step.owned, len(labels))
            state = step.state
        deciding = next((i for i, byte in enumerate(token) if byte not in SPACE), 0)
        expected.append(labels[deciding])
    found, last = automaton.run(automaton.initial[initial], ids)
    assert found == expected
    assert automaton.modes[last] == state.mode.value


@settings(max_examples=60, deadline=None)
@given(text=HOSTILE, cut=st.integers(0, 80))
def test_splitting_the_stream_changes_nothing(tiny: Vocabulary, text: str, cut: int) -> None:
    automaton = built("smollm2", tiny)
    ids = tiny.encode(text)[0].tolist()
    whole, end = automaton.run(automaton.initial["start"], ids)
    left, middle = automaton.run(automaton.initial["start"], ids[:cut])
    right, last = automaton.run(middle, ids[cut:])
    assert left + right == whole and last == end


def test_other_control_tokens_break_a_marker(tiny: Vocabulary) -> None:
    found = pieces(built("smollm2", tiny), tiny, "<tool<|im_start|>_call>x")
    assert {label for label, _ in found} == {SAY}


def test_ids_beyond_the_table_are_plain_text(tiny: Vocabulary) -> None:
    automaton = built("smollm2", tiny)
    assert automaton.run(automaton.initial["start"], [10**6])[0] == [SAY]
    assert automaton.run(automaton.initial["think"], [tiny.size])[0] == [THINK]


def test_open_blocks_are_reported(tiny: Vocabulary) -> None:
    automaton = built("smollm2", tiny)
    for initial, label in (("think", THINK), ("act", ACT), ("say", None), ("start", None)):
        assert automaton.is_open(automaton.initial[initial]) is label


def test_every_mode_has_a_label_for_silence() -> None:
    assert all(isinstance(label, Label) for label in LABEL_OF.values())


_BUILT: dict[str, Automaton] = {}


def built(family: str, vocabulary: Vocabulary) -> Automaton:
    if family not in _BUILT:
        _BUILT[family] = build_automaton(family, vocabulary)
    return _BUILT[family]


def test_smollm2_real_vocabulary(smollm2: Vocabulary) -> None:
    automaton = build_automaton("smollm2", smollm2)
    text = 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call"}}\n</tool_call><|im_end|>'
    found = pieces(automaton, smollm2, text)
    assert [label for label, _ in found] == [SAY, ACT, GLUE]
    assert found[1][1].endswith("}\n</tool_call>")
