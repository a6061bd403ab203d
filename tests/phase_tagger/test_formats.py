"""Chat templates, families and which template serves tools."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agentkv_serve.phase_tagger import (
    ChatFormat,
    Label,
    Options,
    TemplateError,
    UnknownFamilyError,
    Vocabulary,
    detect_family,
    get_family,
    render_appended,
    render_prompt,
)
from agentkv_serve.phase_tagger.families import FAMILIES, with_tools
from agentkv_serve.phase_tagger.template import ChatTemplate, tools_reach_the_prompt

from .tiny import tiny_tokenizer

USER = [{"role": "user", "content": "Hi"}]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


class TestTemplate:
    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("{{ messages[0].content }}", "Hi"),
            ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
            ("{{ bos_token }}{{ eos_token }}", "<s>"),
            ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
            ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
            ("{% generation %}a{% endgeneration %}b", "ab"),
            ("{% set found = [] %}{% set _ = found.append(1) %}{{ found }}", "[1]"),
            ("{{ strftime_now('%d %b %Y') }}", "01 Feb 2030"),
            ("{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
            ("{{ enable_thinking }}", "False"),
        ],
    )
    def test_dialect(self, source: str, expected: str) -> None:
        template = ChatTemplate(source, {"bos_token": "<s>"})
        found = template.render(USER, arguments={"enable_thinking": False}, now=datetime(2030, 2, 1))
        assert found == expected

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ("{% if %}", "does not compile"),
            ("{{ raise_exception('no system role') }}", "no system role"),
            ("{{ undefined.field }}", "undefined"),
            ("{{ 1 + 'a' }}", "TypeError"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ],
    )
    def test_refusals(self, source: str, reason: str) -> None:
        with pytest.raises(TemplateError, match=reason):
            ChatTemplate(source).render(USER)

    def test_arguments_cannot_replace_the_messages(self) -> None:
        template = ChatTemplate("{{ messages | length }}{{ add_generation_prompt }}")
        assert template.render(USER, arguments={"messages": [], "add_generation_prompt": False}) == "1True"

    def test_whether_tools_reach_the_prompt(self) -> None:
        assert not tools_reach_the_prompt(ChatTemplate(CHATML))
        assert tools_reach_the_prompt(ChatTemplate("{{ tools | tojson }}{{ messages | tojson }}"))
        assert not tools_reach_the_prompt(ChatTemplate("{{ raise_exception('x') }}"))


class TestFamilies:
    @pytest.mark.parametrize("name", sorted(FAMILIES))
    def test_tables(self, name: str) -> None:
        family = get_family(name)
        assert family.name == name and family.title
        assert all(block.open for block in (*family.think, *family.act, *family.tool))
        assert get_family(f"{name}+tools") == with_tools(family)
        assert with_tools(with_tools(family)) == with_tools(family)

    def test_unknown_names(self) -> None:
        with pytest.raises(UnknownFamilyError, match=r"known: .*qwen3"):
            get_family("qwen99")

    def test_detection_by_vocabulary_and_template(self) -> None:
        assert detect_family(tiny_tokenizer(), CHATML).name == "chatml"
        assert detect_family(tiny_tokenizer(()), "{{ messages }}").name == "plain"
        assert detect_family(None, None).name == "plain"
        control = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        assert detect_family(tiny_tokenizer(control), "").name == "llama3"
        assert detect_family(tiny_tokenizer(control), "<TOOLCALL>").name == "nemotron"

    def test_an_override_wins(self) -> None:
        assert ChatFormat(tiny_tokenizer(), CHATML, family="hermes").family.name == "hermes"


class TestToolsTemplate:
    """Which template prints what, and what a model without tools in its template gets."""

    @pytest.mark.parametrize(("choice", "listed"), [("auto", True), ("own", True), ("model", False)])
    def test_choice(self, tiny: Vocabulary, choice: Any, listed: bool) -> None:
        chat = ChatFormat(tiny, CHATML, tools_template=choice)
        text = chat.vocabulary.decode(render_prompt(chat, USER, TOOLS).ids)
        assert ('"name": "look"' in text) == listed
        assert "<tools>" not in chat.vocabulary.decode(render_prompt(chat, USER).ids)

    def test_a_template_with_tools_is_kept(self, tiny: Vocabulary) -> None:
        source = CHATML + "{{ tools | tojson }}{{ messages | tojson }}"
        assert not ChatFormat(tiny, source).uses_own(TOOLS, _empty())
        assert ChatFormat(tiny, source, tools_template="own").uses_own(TOOLS, _empty())

    @pytest.mark.parametrize("family", ["llama3", "gemma3", "granite3"])
    def test_turns_of_other_families(self, family: str) -> None:
        table = get_family(family)
        control = (table.header[0], table.header[1].strip(), *table.turn_end)
        chat = ChatFormat(tiny_tokenizer(tuple(filter(None, control))), family=table)
        messages = [
            {"role": "user", "content": "Go"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "seen"},
        ]
        rendered = render_prompt(chat, messages, TOOLS)
        text = chat.vocabulary.decode(rendered.ids)
        assert text.count(table.header[0]) == 5 and text.count(table.turn_end[0]) == 4
        labels = [run[2] for run in rendered.runs if run[2] is not Label.GLUE]
        assert labels == [Label.INPUT, Label.INPUT, Label.ACT, Label.TOOL]
        added = render_appended(chat, messages, 2, TOOLS)
        assert rendered.ids[-len(added.ids) :] == added.ids
        automaton = chat.automaton(rendered.family)
        call = chat.vocabulary.encode("<tool_call>{}</tool_call>")[0].tolist()
        assert automaton.run(automaton.initial["start"], call)[0][-1] is Label.ACT

    def test_without_any_control_token(self) -> None:
        chat = ChatFormat(tiny_tokenizer(()))
        assert chat.family.name == "plain"
        messages = [*USER, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Why?"}]
        rendered = render_prompt(chat, messages)
        text = chat.vocabulary.decode(rendered.ids)
        assert text == "<|user|>\nHi\n<|assistant|>\nYes\n<|user|>\nWhy?\n<|assistant|>\n"
        assert [run[2] for run in rendered.runs if run[2] is not Label.GLUE] == [Label.INPUT, Label.SAY, Label.INPUT]
        added = render_appended(chat, messages, 2)
        assert chat.vocabulary.decode(added.ids).endswith("<|user|>\nWhy?\n<|assistant|>\n")

    def test_bare_json_is_a_call_only_with_tools(self) -> None:
        control = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        chat = ChatFormat(tiny_tokenizer(control), family="llama3")
        assert render_prompt(chat, USER, TOOLS).initial == "start"
        assert render_prompt(chat, USER).initial == "say"
        assert render_prompt(chat, USER, TOOLS, options=Options(constrained=True)).initial == "act"


def _empty() -> Any:
    from agentkv_serve.phase_tagger.formats.chat import Conversation

    return Conversation([])


class TestFolder:
    @pytest.mark.parametrize("place", ["jinja", "json", "config", "named", "none"])
    def test_where_the_template_is_kept(self, tmp_path: Path, place: str) -> None:
        tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
        config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
        source = "{{ bos_token }}" + CHATML
        if place == "jinja":
            (tmp_path / "chat_template.jinja").write_text(source)
        elif place == "json":
            (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": source}))
        elif place == "config":
            config["chat_template"] = source
        elif place == "named":
            config["chat_template"] = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": source}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        chat = ChatFormat.from_folder(tmp_path)
        text = chat.vocabulary.decode(render_prompt(chat, USER).ids)
        assert (chat.template is None) == (place == "none")
        assert text.startswith("<|im_start|>" if place == "none" else "<s><|im_start|>user\nHi")

    def test_a_template_of_the_users_own(self, tmp_path: Path) -> None:
        tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
        chat = ChatFormat.from_folder(tmp_path, template="{{ messages[0].content }}!", tools_template="model")
        assert chat.vocabulary.decode(render_prompt(chat, USER, TOOLS).ids) == "Hi!"


LOOP, CALLS, END = "{% for m in messages %}", "{% for c in m.tool_calls %}", "{% endfor %}"


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        # each refuses something that can be said in another way
        ("{% for t in tools %}{% endfor %}", 1),
        (f"{LOOP}{CALLS}{{{{ c.function.arguments.strip() }}}}{END}{END}", 1),
        (LOOP + "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + END, 2),
        (LOOP + CALLS + "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}" + END + END, 1),
        (LOOP + "{% if m.reasoning_content and m.tool_calls %}{{ raise_exception('x') }}{% endif %}" + END, 1),
    ],
)
def test_what_templates_refuse_is_said_in_another_way(tiny: Vocabulary, source: str, calls: int) -> None:
    call = {"id": "call_123456789012", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [call] * calls}
    chat = ChatFormat(tiny, source + CHATML, tools_template="model")
    assert render_prompt(chat, [*USER, message]).confidence == "high"


def test_arguments_too_deep_to_print(tiny: Vocabulary) -> None:
    deep: Any = "x"
    for _ in range(3000):
        deep = {"a": deep}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": deep}}],
    }
    with pytest.raises(TemplateError):
        render_prompt(ChatFormat(tiny), [*USER, message])
