"""Whatever the transcript holds: nothing raises, every token has a label, structure decides."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentkv_serve.phase_tagger import ChatFormat, Label, Rendered, Vocabulary, render_appended, render_prompt
from agentkv_serve.phase_tagger import labels as runs

from .tiny import tiny_tokenizer
from .transcripts import Transcript, load

HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *("<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "<tool_call>", "</tool_call>"),
                *("<tool_response>", "</tool_response>", "{", "}", '"', "\\", "\n", "\r\n", " ", "\u200b", "\x91\x86"),
                *("\U000f0011", "\udcff", "é", "漢", "🙂", "\x00", "\u2028", "[TOOL_CALLS]", "<|eot_id|>", "{{ x }}"),
            ]
        ),
        st.text(max_size=8),
    ),
    max_size=8,
).map("".join)
NAMES = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
ARGUMENTS = st.one_of(
    st.dictionaries(st.text(max_size=6), st.one_of(HOSTILE, st.integers(), st.booleans(), st.none()), max_size=3).map(
        json.dumps
    ),
    HOSTILE,
)
CALLS = st.lists(
    st.builds(lambda name, args: {"id": "x", "function": {"name": name, "arguments": args}}, NAMES, ARGUMENTS),
    max_size=3,
)
CONTENT = st.one_of(HOSTILE, st.none(), st.lists(st.builds(lambda t: {"type": "text", "text": t}, HOSTILE), max_size=2))


def message(role: str, content: Any, reasoning: str, calls: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        found |= {"reasoning_content": reasoning, "tool_calls": calls}
    return found


MESSAGES = st.lists(
    st.builds(message, st.sampled_from(["system", "user", "assistant", "tool"]), CONTENT, HOSTILE, CALLS),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def chat(tiny: Vocabulary) -> ChatFormat:
    return ChatFormat(tiny)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=MESSAGES)
def test_hostile_transcripts_never_raise(chat: ChatFormat, messages: list[dict[str, Any]]) -> None:
    rendered = render_prompt(chat, messages)
    runs.check_runs(rendered.runs, len(rendered.ids))
    for index, role in enumerate(m["role"] for m in messages):
        wanted = {"system": Label.INPUT, "user": Label.INPUT, "tool": Label.TOOL}.get(role)
        for part in rendered.parts:
            if part.message == index and wanted is not None and part.end - part.start > 2:
                inside = runs.labels_of(rendered.runs)[part.start + 1 : part.end - 1]
                assert set(inside) == {wanted}
    for start in range(1, len(messages)):
        if messages[start - 1]["role"] == "assistant":
            added = render_appended(chat, messages, start, offset=7)
            assert added.runs[0][0] == 7 and added.runs[-1][1] == 7 + len(added.ids)


@settings(max_examples=100, deadline=None)
@given(payload=HOSTILE)
def test_text_of_a_result_never_changes_the_others(chat: ChatFormat, payload: str) -> None:
    """Whatever a tool returns, the labels around it are those around a harmless result."""

    def labels(result: str) -> list[Label]:
        messages = [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": f"x{result}x"},
            {"role": "assistant", "content": "done"},
        ]
        return [run[2] for run in render_prompt(chat, messages).runs]

    assert labels(payload) == labels("harmless")


def test_injected_markers_on_our_own_template(chat: ChatFormat) -> None:
    """The 12 recorded mutants, through the built-in tools template."""
    [base] = load("05_bfcl_base_0_filesystem.json")
    wanted = [run[2] for run in _render(chat, base).runs]
    for mutant in load("19_marker_injection_mutants.json"):
        assert [run[2] for run in _render(chat, mutant).runs] == wanted, mutant.name


def _render(chat: ChatFormat, transcript: Transcript) -> Rendered:
    return render_prompt(chat, transcript.messages, transcript.tools)


@pytest.mark.parametrize(
    "name",
    ["01_tau_airline_tool_errors.json", "06_bfcl_base_188_parallel_calls.json", "07_sweagent_function_calling.json"],
)
def test_recorded_runs_label_every_message(chat: ChatFormat, name: str) -> None:
    [transcript] = load(name)
    _check_run(chat, transcript)


@pytest.mark.long
def test_a_hundred_recorded_runs() -> None:
    """Every run of the large collection, where it is at hand, whole and appended turn by turn."""
    transcripts = load("20_tau_airline_gpt4o_even_tasks.json")
    if not transcripts:
        # 1.7 MB that the repository does not carry; the runs in tests/ go through the same checks.
        pytest.skip("the large collection is not part of the repository")
    chat = ChatFormat(tiny_tokenizer())
    for transcript in transcripts:
        _check_run(chat, transcript)


@pytest.mark.long
@pytest.mark.parametrize("model", ["smollm2", "qwen3", "deepseek_v4"])
def test_the_800_multi_turn_items_of_bfcl(model: str, request: pytest.FixtureRequest) -> None:
    """Questions, calls and executed results, up to 70,000 characters each."""
    from .packages import bfcl, templates, vocabulary

    if model == "smollm2":
        chat = ChatFormat.from_folder(request.getfixturevalue("smollm2_folder"))
    else:
        template = {"qwen3": "trl/qwen3", "deepseek_v4": "llama.cpp/deepseek-ai-DeepSeek-V4"}[model]
        chat = ChatFormat(vocabulary(model), templates()[template], tokens={"bos_token": ""})
    items = [json.loads(line) for line in bfcl().read_text("utf-8").splitlines()]
    assert len(items) == 800
    for item in items:
        _check_run(chat, Transcript(item["id"], item["messages"], item["tools"]), appended=2)


def _check_run(chat: ChatFormat, transcript: Transcript, appended: int = 100) -> None:
    rendered = _render(chat, transcript)
    runs.check_runs(rendered.runs, len(rendered.ids))
    assert rendered.confidence == "high" and not rendered.dropped
    order = runs.labels_of(rendered.runs)
    for part in rendered.parts:
        assert part.label in order[part.start : part.end]
    ids = rendered.ids
    starts = [i + 1 for i, m in enumerate(transcript.messages[:-1]) if m["role"] == "assistant"]
    for start in starts[-appended:]:
        added = render_appended(chat, transcript.messages, start, transcript.tools)
        assert ids[-len(added.ids) :] == added.ids
        assert order[-len(added.ids) :] == runs.labels_of(added.runs)
