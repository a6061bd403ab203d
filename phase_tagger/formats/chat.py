"""OpenAI chat messages, read into labelled segments. Every other format is turned into this one first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..families import PLAIN
from ..families.family import Family
from ..labels import Label
from ..stream import split_turn

JsonObject = dict[str, Any]
Mark = Callable[["Segment"], str]

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_INPUT_ROLES = ("system", "developer", "user")
_TOOL_ROLES = ("tool", "function", "ipython", "observation")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
_MEDIA_PARTS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
}


class MessageError(ValueError):
    """A message that is no chat message at all; the text names its place."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of one message's text. `label` None: a marker that the assistant wrote, owned by its neighbour."""

    text: str
    label: Label | None
    message: int
    part: str  # content, reasoning, call, result


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call: `arguments` is the parsed object, or the text when it is no JSON object."""

    id: str
    name: Segment
    arguments: JsonObject | str


@dataclass(slots=True)
class Message:
    """One message: its role for the template, and its parts."""

    index: int
    role: str
    content: list[Segment] = field(default_factory=list)
    reasoning: Segment | None = None
    calls: list[Call] = field(default_factory=list)
    media: list[str] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.content)

    def segments(self) -> Iterator[Segment]:
        """Everything that carries a label, in the order in which the turn is written."""
        if self.reasoning is not None:
            yield self.reasoning
        yield from (segment for segment in self.content if segment.label is not None)
        yield from (call.name for call in self.calls)


@dataclass(slots=True)
class Conversation:
    """Messages, and how many parts nobody knows (they are left out of the prompt and labelled input)."""

    messages: list[Message]
    unknown_parts: int = 0

    @property
    def uses_tools(self) -> bool:
        return any(message.calls or message.role == "tool" for message in self.messages)


Dialect = Callable[[Message, Message | None], list[Segment] | None]
"""Given a message and the one before it: its content in labelled segments, or None to leave it as it is."""


def read_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    family: Family = PLAIN,
    dialect: Dialect | None = None,
    think_tools: Sequence[str] = (),
    first: int = 0,
) -> Conversation:
    """Read OpenAI chat messages.

    `family`: whose markers split the assistant's own text (a leading think block; calls when no structured
    ones exist). `dialect`: for agents that act in plain text, see `dialects`. `think_tools`: names of tools whose
    calls count as thinking. `first`: index of the first message. Roles and parts that nobody knows are input and
    counted. Raises `MessageError`.
    """
    reader = _Reader(family, dialect, frozenset(think_tools))
    found: list[Message] = []
    for index, raw in enumerate(messages, first):
        found.append(reader.read(index, raw, found[-1] if found else None))
    return Conversation(found, reader.unknown_parts)


class _Reader:
    def __init__(self, family: Family, dialect: Dialect | None, think_tools: frozenset[str]) -> None:
        self.family = family
        self.dialect = dialect
        self.think_tools = think_tools
        self.unknown_parts = 0
        self.legacy_calls = 0

    def read(self, index: int, raw: Mapping[str, Any], before: Message | None) -> Message:
        if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str):
            raise MessageError(f"messages[{index}] must be an object with a role")
        role = raw["role"]
        message = Message(index, role, name=_text_or_none(raw.get("name")))
        if role in _TOOL_ROLES:
            message.role = "tool"
            message.call_id = _text_or_none(raw.get("tool_call_id")) or self._legacy_id(role, index)
            self._content(message, raw.get("content"), Label.TOOL, "result")
        elif role == "assistant" or role == "model":
            message.role = "assistant"
            self._assistant(message, raw)
        else:
            if role not in _INPUT_ROLES:
                self.unknown_parts += 1
            self._content(message, raw.get("content"), Label.INPUT, "content")
        if self.dialect is not None:
            replaced = self.dialect(message, before)
            message.content = message.content if replaced is None else replaced
        return message

    def _legacy_id(self, role: str, index: int) -> str:
        return f"call_{self.legacy_calls}" if role == "function" else f"result_{index}"

    def _assistant(self, message: Message, raw: Mapping[str, Any]) -> None:
        given = [raw[key] for key in REASONING_KEYS if isinstance(raw.get(key), str) and raw[key]]
        for call in _calls(raw):
            self._call(message, call)
        thoughts = given[:1] + self._content(message, raw.get("content"), Label.SAY, "content")
        thought = "\n".join(text for text in thoughts if text)
        if thoughts:
            message.reasoning = Segment(thought, Label.THINK, message.index, "reasoning")
        if _text_or_none(raw.get("refusal")):
            message.content.append(Segment(raw["refusal"], Label.SAY, message.index, "content"))
        message.content = [piece for segment in message.content for piece in self._split(message, segment)]

    def _call(self, message: Message, call: Mapping[str, Any]) -> None:
        function = call.get("function") if isinstance(call.get("function"), Mapping) else call
        assert isinstance(function, Mapping)
        name = _text_or_none(function.get("name")) or _text_or_none(call.get("name")) or ""
        arguments = function.get("arguments", function.get("input", function.get("parameters")))
        identity = _text_or_none(call.get("id"))
        if identity is None:
            self.legacy_calls += 1
            identity = f"call_{self.legacy_calls}"
        label = Label.THINK if name in self.think_tools else Label.ACT
        message.calls.append(Call(identity, Segment(name, label, message.index, "call"), parse_arguments(arguments)))

    def _content(self, message: Message, content: Any, label: Label, part: str) -> list[str]:
        """Read a message's content; returns the thoughts among its parts."""
        thoughts: list[str] = []
        texts: list[str] = []
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, Sequence):
            for item in content:
                self._part(message, item, texts, thoughts)
        elif isinstance(content, Mapping):
            self._part(message, content, texts, thoughts)
        elif content is not None:
            texts.append(json.dumps(content, ensure_ascii=False))
        text = " ".join(texts)
        if text:
            message.content.append(Segment(text, label, message.index, part))
        return thoughts

    def _part(self, message: Message, item: Any, texts: list[str], thoughts: list[str]) -> None:
        if isinstance(item, str):
            texts.append(item)
            return
        part = item if isinstance(item, Mapping) else {"type": "unknown"}
        kind = part.get("type", "text")
        value = part.get("text", part.get("refusal"))
        if kind in _TEXT_PARTS and isinstance(value, str):
            texts.append(value)
        elif kind == "thinking":
            thought = part.get("thinking")
            inner = thought if isinstance(thought, list) else [thought]
            thoughts += [t.get("text", "") if isinstance(t, Mapping) else str(t or "") for t in inner]
        elif kind == "redacted_thinking":
            thoughts.append("")  # nobody can read it, but it is thinking
        elif kind in _MEDIA_PARTS:
            message.media.append(_MEDIA_PARTS[kind])
        else:
            self.unknown_parts += 1

    def _split(self, message: Message, segment: Segment) -> list[Segment]:
        """The assistant's text: a leading think block, then calls in text when there are no structured ones."""
        found: list[Segment] = []
        for text, label in split_turn(self.family, segment.text):
            if label is Label.ACT and message.calls:
                label = Label.SAY
            blocks = {Label.THINK: self.family.think, Label.ACT: self.family.act}.get(label, ())
            opener = next((b.open for b in blocks if text.lstrip().startswith(b.open)), "")
            closer = next((b.close for b in blocks if b.close and text.rstrip().endswith(b.close)), "")
            start = text.index(opener) + len(opener)
            end = text.rindex(closer) if closer else len(text)
            for piece, kind in ((text[:start], None), (text[start:end], label), (text[end:], None)):
                if piece:
                    found.append(Segment(piece, kind, segment.message, segment.part))
        return found


def _calls(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = raw.get("tool_calls")
    if isinstance(calls, str):
        calls = _loads(calls)
    found: list[Mapping[str, Any]] = []
    for call in calls if isinstance(calls, list) else []:
        call = _loads(call) if isinstance(call, str) else call
        if isinstance(call, Mapping):
            found.append(call)
    if not found and isinstance(raw.get("function_call"), Mapping):
        found.append(raw["function_call"])
    return found


def parse_arguments(arguments: Any) -> JsonObject | str:
    """The arguments of a call as an object; text that is no JSON object stays text."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        value = _loads(arguments)
        return value if isinstance(value, dict) else arguments
    return json.dumps(arguments, ensure_ascii=False)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
