"""Appended messages of a known shape are rendered as if nothing were known."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentkv_serve.phase_tagger import ChatFormat, Options, Rendered, Vocabulary, render_appended
from agentkv_serve.phase_tagger.skeleton import Skeletons

TEMPLATES = {
    "plain": "{{ m.content }}",
    "trimmed": "{{ m.content | trim }}",
    "escaped": "{{ m.content | tojson }}",
    "looked at": "{% if m.content.startswith('x') and '/no' not in m.content %}!{% endif %}{{ m.content }}",
    "counted": "{{ m.content | length }}: {{ m.content }}",
    "cut": "{{ m.content[:3] }}{{ m.content[3:] }}",
    "twice": "{{ m.content }}|{{ m.content }}",
    "named": "{{ m.name or '' }} {{ m.tool_call_id or '' }} {{ m.content }}",
}
TEXTS = st.text(st.sampled_from('ax/no \n\t"\\<|im_end|>é漢🙂\x80\x91'), max_size=12)


def chat_of(body: str, vocabulary: Vocabulary) -> ChatFormat:
    turn = "<|im_start|>{{ m.role }}\n" + body + "<|im_end|>\n"
    end = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return ChatFormat(vocabulary, "{% for m in messages %}" + turn + "{% endfor %}" + end, tools_template="model")


def told(rendered: Rendered) -> dict[str, Any]:
    return {**asdict(rendered), "tokens": rendered.ids}


def cold(chat: ChatFormat, messages: list[dict[str, Any]], **how: Any) -> Rendered:
    known, chat.skeletons = chat.skeletons, Skeletons()
    try:
        return render_appended(chat, messages, 2, **how)
    finally:
        chat.skeletons = known


@pytest.mark.parametrize("body", TEMPLATES.values(), ids=TEMPLATES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_known_shape_changes_nothing(tiny: Vocabulary, body: str, data: st.DataObject) -> None:
    chat = chat_of(body, tiny)
    for _ in range(3):
        role = data.draw(st.sampled_from(["user", "tool"]))
        new = [
            {"role": role, "content": text, "name": "n"} for text in data.draw(st.lists(TEXTS, min_size=1, max_size=2))
        ]
        turn = {"role": "assistant", "content": "Yes"}
        system = {"role": "system", "content": data.draw(st.sampled_from(["S", "/no_think"]))}
        messages = [system, turn, *new]
        how: dict[str, Any] = {"last_id": data.draw(st.sampled_from([None, tiny.id_of("<|im_end|>")])), "offset": 5}
        warm, full = render_appended(chat, messages, 2, **how), cold(chat, messages, **how)
        assert warm.ids == full.ids
        if body != TEMPLATES["cut"]:
            assert told(warm) == told(full)
            continue
        # Marks do not survive a template that cuts texts, and a search may be wrong; a known shape still is right.
        if warm.confidence == "high" and full.confidence != "high":
            for part, message in zip(warm.parts, new, strict=True):
                assert message["content"].strip() in tiny.decode(warm.ids[part.start - 5 : part.end - 5])


def test_a_known_shape_is_printed_once(tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(TEMPLATES["plain"], tiny)

    def messages(text: str) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes"},
            {"role": "user", "content": text},
        ]

    render_appended(chat, messages("first"), 2)
    expected = told(cold(chat, messages("second <|im_end|>")))
    monkeypatch.setattr("agentkv_serve.phase_tagger.printer.Printer.print", lambda self: pytest.fail("printed in full"))
    assert told(render_appended(chat, messages("second <|im_end|>"), 2)) == expected
    assert (
        told(render_appended(chat, messages("second <|im_end|>"), 2, options=Options(constrained=True)))["initial"]
        == "act"
    )


def test_only_so_many_shapes_are_remembered(tiny: Vocabulary) -> None:
    chat = chat_of(TEMPLATES["plain"], tiny)
    for number in range(200):
        system = {"role": "system", "content": f"agent {number}"}
        render_appended(chat, [system, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], 2)
    assert len(chat.skeletons._known) == 128
