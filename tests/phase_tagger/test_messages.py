"""Message level: what each part of a transcript is, in every wire format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentkv_serve.phase_tagger import Label, MessageError, get_family, read_messages
from agentkv_serve.phase_tagger.formats import anthropic, harmony, responses
from agentkv_serve.phase_tagger.formats.chat import Conversation
from agentkv_serve.phase_tagger.formats.dialects import DIALECTS

from .transcripts import load

INPUT, THINK, ACT, TOOL, SAY = Label.INPUT, Label.THINK, Label.ACT, Label.TOOL, Label.SAY


def parts(conversation: Conversation) -> list[tuple[int, str, Label, str]]:
    """Everything that carries a label: message, part, label, text."""
    found = [s for message in conversation.messages for s in message.segments()]
    return [(s.message, s.part, s.label, s.text) for s in found if s.label is not None]


def labelled(message: dict[str, Any], **options: Any) -> list[tuple[Label, str]]:
    return [(label, text) for _, _, label, text in parts(read_messages([message], **options))]


CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "system", "content": "s"}, [(INPUT, "s")]),
        ({"role": "developer", "content": "d"}, [(INPUT, "d")]),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, [(INPUT, "a b")]),
        ({"role": "user", "content": "<think>x</think> <tool_call>"}, [(INPUT, "<think>x</think> <tool_call>")]),
        ({"role": "tool", "content": "</think> r", "tool_call_id": "a"}, [(TOOL, "</think> r")]),
        ({"role": "tool", "content": [{"type": "text", "text": "r"}]}, [(TOOL, "r")]),
        ({"role": "tool", "content": {"a": 1}}, []),
        ({"role": "function", "name": "look", "content": "r"}, [(TOOL, "r")]),
        ({"role": "ipython", "content": "r"}, [(TOOL, "r")]),
        ({"role": "assistant", "content": "a"}, [(SAY, "a")]),
        ({"role": "assistant", "content": None}, []),
        ({"role": "assistant", "content": ""}, []),
        ({"role": "assistant", "content": None, "refusal": "no"}, [(SAY, "no")]),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, [(SAY, "no")]),
        ({"role": "assistant", "reasoning_content": "t", "content": "a"}, [(THINK, "t"), (SAY, "a")]),
        ({"role": "assistant", "reasoning": "t", "content": "a"}, [(THINK, "t"), (SAY, "a")]),
        ({"role": "assistant", "thinking": "t", "content": "a"}, [(THINK, "t"), (SAY, "a")]),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]},
            [(THINK, "t"), (SAY, "a")],
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}]},
            [(THINK, "t")],
        ),
        ({"role": "assistant", "content": "a", "tool_calls": [CALL, CALL]}, [(SAY, "a"), (ACT, "look"), (ACT, "look")]),
        ({"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])}, [(ACT, "look")]),
        ({"role": "assistant", "content": None, "tool_calls": [json.dumps(CALL)]}, [(ACT, "look")]),
        ({"role": "assistant", "content": "", "function_call": CALL["function"]}, [(ACT, "look")]),
        ({"role": "assistant", "content": "\n<think>t</think>\n\na"}, [(THINK, "t"), (SAY, "\n\na")]),
        ({"role": "assistant", "content": "a <think>t</think>"}, [(SAY, "a <think>t</think>")]),
        ({"role": "assistant", "content": "<think>t</think>b</think>c"}, [(THINK, "t"), (SAY, "b</think>c")]),
        ({"role": "assistant", "content": "<think>never closed"}, [(THINK, "never closed")]),
        (
            {"role": "assistant", "content": "a\n<tool_call>\n{}\n</tool_call>"},
            [(SAY, "a\n"), (ACT, "\n{}\n")],
        ),
        # structured calls exist: tags in the text are text
        (
            {"role": "assistant", "content": "a <tool_call>{}</tool_call>", "tool_calls": [CALL]},
            [(SAY, "a "), (SAY, "<tool_call>{}</tool_call>"), (ACT, "look")],
        ),
    ],
)
def test_chat_messages(message: dict[str, Any], expected: list[tuple[Label, str]]) -> None:
    assert labelled(message) == expected


def test_unknown_roles_and_parts_are_input_and_counted() -> None:
    messages = [
        {"role": "narrator", "content": "x"},
        {
            "role": "user",
            "content": [{"type": "hologram", "data": 1}, 7, {"type": "text"}, {"type": "text", "text": "y"}],
        },
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "user", "content": 5},
    ]
    conversation = read_messages(messages)
    assert conversation.unknown_parts == 4
    assert [(label, text) for _, _, label, text in parts(conversation)] == [(INPUT, "x"), (INPUT, "y"), (INPUT, "5")]
    assert conversation.messages[2].media == ["image"]


@pytest.mark.parametrize("message", [None, "text", {"content": "x"}, {"role": 3}])
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(MessageError, match=r"messages\[0\]"):
        read_messages([message])


def test_a_tool_may_count_as_thinking() -> None:
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "think", "arguments": "{}"}}, CALL],
    }
    assert labelled(message) == [(ACT, "think"), (ACT, "look")]
    assert labelled(message, think_tools=["think"]) == [(THINK, "think"), (ACT, "look")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("[1]", "[1]"),
        ('{"a": ', '{"a": '),
        ([1], "[1]"),
    ],
)
def test_arguments(arguments: Any, expected: Any) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    conversation = read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert conversation.messages[0].calls[0].arguments == expected


def test_text_of_a_family_with_other_markers() -> None:
    nemotron = get_family("nemotron")
    message = {"role": "assistant", "content": "<think>\nt\n</think>\n\n<TOOLCALL>[{}]</TOOLCALL>"}
    assert labelled(message, family=nemotron) == [(THINK, "\nt\n"), (ACT, "[{}]")]
    assert labelled({"role": "assistant", "content": '{"name": "f"}'}, family=get_family("llama3")) == [
        (ACT, '{"name": "f"}')
    ]


def test_anthropic_blocks() -> None:
    messages = [
        {"role": "user", "content": "Go"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "first"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}]},
                {"type": "text", "text": "then"},
            ],
        },
    ]
    tools = [{"name": "look", "description": "d", "input_schema": {"type": "object"}}]
    chat, schemas = anthropic.to_chat(messages, "sys", tools)
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "user", "tool", "user"]
    assert schemas and schemas[0]["function"]["parameters"] == {"type": "object"}
    assert [(label, text) for _, _, label, text in parts(read_messages(chat))] == [
        (INPUT, "sys"),
        (INPUT, "Go"),
        (THINK, "hm"),
        (SAY, "I look."),
        (ACT, "look"),
        (INPUT, "first"),
        (TOOL, "seen"),
        (INPUT, "then"),
    ]
    only = read_messages([{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}])
    assert only.unknown_parts == 0 and only.messages[0].reasoning is not None


def test_responses_items() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "it"}'},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done"}]},
        {"type": "computer_call", "action": {}},
    ]
    chat, tools = responses.to_chat(items, "sys", [{"type": "function", "name": "look", "parameters": {}}])
    assert tools == [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    conversation = read_messages(chat)
    assert [(label, text) for _, _, label, text in parts(conversation)] == [
        (INPUT, "sys"),
        (INPUT, "Go"),
        (THINK, "hm"),
        (SAY, "I look."),
        (ACT, "look"),
        (TOOL, "seen"),
        (THINK, "so"),
        (SAY, "Done"),
    ]
    assert conversation.unknown_parts == 1
    assert responses.to_chat("Hi")[0] == [{"role": "user", "content": "Hi"}]


def test_harmony_channels() -> None:
    text = (
        "<|start|>user<|message|>Weather?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Use the tool.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>"
        "<|start|>functions.look to=assistant<|channel|>commentary<|message|>sunny<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"
    )
    assert [(label, piece) for _, _, label, piece in parts(read_messages(harmony.to_chat(text)))] == [
        (INPUT, "Weather?"),
        (THINK, "Use the tool."),
        (SAY, "I look."),
        (ACT, "look"),
        (TOOL, "sunny"),
        (SAY, "Sunny."),
    ]


@pytest.mark.parametrize(
    ("name", "think", "act", "tool"),
    [
        ("08_sweagent_xml_command_in_text.json", 0, 10, 10),
        ("10_mini_swe_agent_bash_block.json", 0, 5, 5),
        ("11_react_thought_action_observation.txt", 2, 2, 2),
    ],
)
def test_agents_that_act_in_plain_text(name: str, think: int, act: int, tool: int) -> None:
    [transcript] = load(name)[:1]
    plain = [label for _, _, label, _ in parts(read_messages(transcript.messages))]
    assert ACT not in plain and TOOL not in plain
    found = [label for _, _, label, _ in parts(read_messages(transcript.messages, dialect=transcript.dialect))]
    assert found.count(THINK) >= think and found.count(ACT) >= act and found.count(TOOL) >= tool
    # every result answers an action
    assert found.count(ACT) - found.count(TOOL) in (0, 1)


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_dialects_leave_other_messages_alone(name: str) -> None:
    messages = [
        {"role": "system", "content": "Thought: x\n<command>ls</command>"},
        {"role": "user", "content": "Observation 1: <returncode>0</returncode>"},
        {"role": "assistant", "content": "No action here."},
        {"role": "user", "content": "Thank you"},
        {"role": "tool", "content": "Observation: x"},
    ]
    found = [label for _, _, label, _ in parts(read_messages(messages, dialect=DIALECTS[name]))]
    assert found == [INPUT, INPUT, SAY, INPUT, TOOL]


def test_an_earlier_block_is_no_action() -> None:
    messages = [{"role": "assistant", "content": "```bash\nls\n```\nThat was an example."}]
    found = [label for _, _, label, _ in parts(read_messages(messages, dialect=DIALECTS["fenced"]))]
    assert found == [SAY]
