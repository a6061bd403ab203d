"""Real vocabularies: coverage, order, the text of tool runs, injected markers, appended segments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentkv_serve.phase_tagger import (
    ChatFormat,
    Label,
    Options,
    Rendered,
    TemplateError,
    render_appended,
    render_prompt,
)
from agentkv_serve.phase_tagger import labels as runs

from .packages import templates, vocabulary
from .transcripts import Transcript, load, names

pytestmark = pytest.mark.long

# vocabulary -> chat template
MODELS = {
    "qwen3": "trl/qwen3",
    "qwen2.5": "trl/qwen2_5",
    "qwen3.6": "trl/qwen3_6",
    "llama3_1": "llama.cpp/meta-llama-Llama-3.1-8B-Instruct",
    "deepseek_v3": "llama.cpp/deepseek-ai-DeepSeek-V3.1",
    "deepseek_v4": "llama.cpp/deepseek-ai-DeepSeek-V4",
    "gptoss": "trl/gptoss",
    "gemma3": "trl/gemma3",
    "tekken": "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407",
}
TRANSCRIPTS = [t for name in names() for t in load(name) if not t.name.startswith("20_") or t.name.endswith("0")]


@pytest.fixture(scope="module", params=sorted(MODELS))
def chat(request: pytest.FixtureRequest) -> ChatFormat:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"} if request.param == "tekken" else {"bos_token": ""}
    return ChatFormat(vocabulary(request.param), templates()[MODELS[request.param]], tokens=tokens)


def render(chat: ChatFormat, transcript: Transcript) -> Rendered | None:
    try:
        return render_prompt(chat, transcript.messages, transcript.tools, options=Options(dialect=transcript.dialect))
    except TemplateError:
        return None


def test_runs_cover_the_tokenizers_own_ids(chat: ChatFormat) -> None:
    done = 0
    for transcript in TRANSCRIPTS:
        rendered = render(chat, transcript)
        if rendered is None:
            continue
        done += 1
        runs.check_runs(rendered.runs, len(rendered.ids))
        assert rendered.confidence == "high", transcript.name
        text = chat.vocabulary.decode(rendered.ids)
        assert chat.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids == rendered.ids, transcript.name
    assert done >= 0.8 * len(TRANSCRIPTS)


def test_tool_runs_are_the_tool_messages(chat: ChatFormat) -> None:
    """Every result lies in a tool run of its own, whole, with nothing but the template's wrapper around it."""
    checked = 0
    for transcript in TRANSCRIPTS:
        rendered = render(chat, transcript)
        results = [part for part in rendered.parts if part.part == "result"] if rendered else []
        for part in results:
            run = next(run for run in rendered.runs if run[0] <= part.start < run[1])  # type: ignore[union-attr]
            assert run[2] is Label.TOOL and part.end <= run[1] + 1, transcript.name
            text = chat.vocabulary.decode(rendered.ids[run[0] : run[1]])  # type: ignore[union-attr]
            wanted = _text(transcript.messages[part.message]["content"]).strip()
            assert any(spelling in text for spelling in spellings(wanted)), transcript.name
            checked += 1
    assert checked > 240


def spellings(text: str) -> tuple[str, ...]:
    """As it is, inside a JSON string, and as vocabularies decode it that write spaces as ▁."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1], text.replace("▁", " ")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


def test_injected_markers_keep_labels_and_order(chat: ChatFormat) -> None:
    base = render(chat, load("05_bfcl_base_0_filesystem.json")[0])
    assert base is not None
    mutants = load("19_marker_injection_mutants.json")
    assert len(mutants) == 12
    for mutant in mutants:
        rendered = render(chat, mutant)
        assert rendered is not None and rendered.confidence == "high"
        assert [run[2] for run in rendered.runs] == [run[2] for run in base.runs], mutant.name
        where, payload = mutant.extra["where"], mutant.extra["payload"]
        part = next(p for p in rendered.parts if p.message == where and p.part in ("content", "result"))
        inside = {run[2] for run in rendered.runs if run[0] < part.end and part.start < run[1]}
        label = Label.TOOL if mutant.messages[where]["role"] == "tool" else Label.INPUT
        assert label in inside and inside <= {label, Label.GLUE}, mutant.name
        text = chat.vocabulary.decode(rendered.ids[part.start : part.end])
        assert any(spelling in text for spelling in spellings(payload.strip())), mutant.name


def test_appended_segments_are_the_end_of_the_whole(chat: ChatFormat) -> None:
    """After any assistant turn. Class D moves the system text and the tools: compared without them."""
    checked = 0
    for transcript in TRANSCRIPTS[:20]:
        options = Options(dialect=transcript.dialect)
        starts = [i + 1 for i, m in enumerate(transcript.messages[:-1]) if m["role"] == "assistant"]
        for start in starts[-3:]:
            messages, tools = transcript.messages, transcript.tools
            if chat.family.drift == "D":
                tools, start = None, start - (messages[0]["role"] == "system")
                messages = [message for message in messages if message["role"] != "system"]
            try:
                whole = render_prompt(chat, messages, tools, options=options)
                added = render_appended(chat, messages, start, tools, options=options)
            except TemplateError:
                continue
            count = len(added.ids)
            assert whole.ids[-count:] == added.ids, (transcript.name, start)
            end = runs.labels_of(whole.runs)[-count:]
            assert runs.labels_of(added.runs) == end, (transcript.name, start)
            checked += 1
    assert checked >= 15
