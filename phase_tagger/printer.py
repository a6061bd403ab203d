"""Prints a conversation through a chat template, plain and with marks, and finds every string again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from .formats.chat import REASONING_KEYS, Conversation, JsonObject, Message, Segment
from .labels import Label
from .sentinels import Field, Marker, choose_alphabet, search
from .template import ChatTemplate, TemplateError

Confidence = Literal["high", "medium", "low"]
Write = Callable[[Segment], str]


@dataclass(slots=True)
class Printed:
    """A rendered text and the fields found in it; `dropped`: (message index, part) that it does not show."""

    text: str
    fields: list[Field]
    confidence: Confidence
    dropped: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class _Variant:
    """What some templates refuse, and how the same is said so that they accept it."""

    reasoning: bool = True  # reasoning beside calls
    parsed: bool = True  # arguments as an object, not as JSON text
    ids: bool = True  # call ids as the client chose them, not nine letters and digits
    parallel: bool = True  # several calls in one message, not one message for each
    no_tools: bool = True  # no tools are None, not an empty list


_VARIANTS = (
    _Variant(),
    _Variant(no_tools=False),
    _Variant(parsed=False),
    _Variant(reasoning=False),
    _Variant(ids=False),
    _Variant(parallel=False),
    _Variant(False, False, False, False, False),
)


class Printer:
    """Prints one conversation through one template.

    `escape`: control tokens to break in given strings. `names_only`: of tool schemas only the names are marked,
    enough to see where they are printed.
    """

    def __init__(
        self,
        template: ChatTemplate,
        conversation: Conversation,
        tools: Sequence[JsonObject] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        escape: re.Pattern[str] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        names_only: bool = False,
    ) -> None:
        self.template = template
        self.conversation = conversation
        self.tools = list(tools or [])
        self.arguments = dict(arguments or {})
        self.escape = escape
        self.add_generation_prompt = add_generation_prompt
        self.now = now or datetime.now()
        self._write_schema = _schema_name if names_only else _schema
        self._parts = _wants_parts(template.source)

    def print(self) -> Printed:
        """Render plain, then marked, and verify; see `Printed`. Raises `TemplateError`."""
        try:
            return self._print()
        except RecursionError as error:
            raise TemplateError("arguments or tool schemas are nested too deeply to be printed") from error

    def plain(self) -> str:
        """The plain rendering alone. Raises `TemplateError`."""
        try:
            return self._plain()[0]
        except RecursionError as error:
            raise TemplateError("arguments or tool schemas are nested too deeply to be printed") from error

    def _print(self) -> Printed:
        plain, variant = self._plain()
        alphabet = choose_alphabet(plain)
        if alphabet is not None:
            for everything in (True, False):
                marker = Marker(alphabet)
                try:
                    fields = marker.find(self._render(variant, self._writer(marker), everything), plain)
                except TemplateError:
                    continue
                if fields is not None:
                    shown = {field.number for field in fields}
                    hidden = [s for number, s in enumerate(marker.segments) if number not in shown]
                    return Printed(plain, fields, "high", _places(hidden))
        segments = [self._escaped(s) for message in self.conversation.messages for s in message.segments()]
        fields = search(plain, segments)
        found = {id(field.segment) for field in fields}
        hidden = [segment for segment in segments if id(segment) not in found and segment.text.strip()]
        return Printed(plain, fields, "medium" if fields else "low", _places(hidden))

    def _writer(self, marker: Marker) -> Write:
        return lambda segment: marker.mark(self._escaped(segment))

    def _plain(self) -> tuple[str, _Variant]:
        first: TemplateError | None = None
        for variant in _VARIANTS:
            try:
                return "".join(self._render(variant, lambda s: self._escaped(s).text, False)), variant
            except TemplateError as error:
                first = first or error
        assert first is not None
        raise first

    def _escaped(self, segment: Segment) -> Segment:
        if self.escape is None or segment.label not in (Label.INPUT, Label.TOOL):
            return segment
        text = self.escape.sub(lambda match: match[0][0] + "\u200b" + match[0][1:], segment.text)
        return segment if text == segment.text else replace(segment, text=text)

    def _render(self, variant: _Variant, write: Write, everything: bool) -> Iterator[str]:
        messages: list[JsonObject] = []
        for message in self.conversation.messages:
            messages += self._split(self._message(message, variant, write, everything), variant)
        tools = [self._write_schema(tool, write) for tool in self.tools] if everything else self.tools
        yield from self.template.stream(
            messages,
            tools or (None if variant.no_tools else []),
            add_generation_prompt=self.add_generation_prompt,
            arguments=self.arguments,
            now=self.now,
        )
        for printed in messages:  # the template's frames refer to themselves and would keep the texts alive
            printed.clear()

    def _split(self, message: JsonObject, variant: _Variant) -> list[JsonObject]:
        calls = message.get("tool_calls", [])
        if variant.parallel or len(calls) < 2:
            return [message]
        return [message | {"tool_calls": calls[:1]}, *({**_SILENT, "tool_calls": [call]} for call in calls[1:])]

    def _message(self, message: Message, variant: _Variant, write: Write, everything: bool) -> JsonObject:
        source = self.template.source
        role = message.role
        if role == "developer" and "developer" not in source:
            role = "system"
        printed: JsonObject = {"role": role}
        thought = message.reasoning if variant.reasoning else None
        reasoning = write(thought) if thought and thought.text else None
        text = "".join(segment.text if segment.label is None else write(segment) for segment in message.content)
        printed["content"] = text
        if self._parts or (message.media and "image" in source):
            printed["content"] = [{"type": kind} for kind in message.media] + [{"type": "text", "text": text}]
        if reasoning is not None and "[THINK]" in source:
            chunk = {"type": "thinking", "thinking": reasoning}
            printed["content"] = [chunk, {"type": "text", "text": text}] if text else [chunk]
        elif reasoning is not None:
            keys = [key for key in REASONING_KEYS if key in source] or ["reasoning_content"]
            printed |= dict.fromkeys(keys, reasoning)
        if message.calls:
            printed["tool_calls"] = list(self._calls(message, variant, write, everything))
        if message.role == "tool":
            printed["tool_call_id"] = self._id(message.call_id, variant)
        if message.name:
            printed["name"] = message.name
        return printed

    @staticmethod
    def _id(identity: str | None, variant: _Variant) -> str | None:
        if variant.ids or identity is None:
            return identity
        return hashlib.sha256(identity.encode()).hexdigest()[:9]

    def _calls(self, message: Message, variant: _Variant, write: Write, everything: bool) -> Iterator[JsonObject]:
        for call in message.calls:
            name = write(call.name)
            arguments: Any = call.arguments
            if everything:
                arguments = _write_leaves(arguments, replace(call.name, part="argument"), write)
            if not variant.parsed and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": name, "arguments": arguments}
            yield {"id": self._id(call.id, variant), "type": "function", "function": function}


_SILENT: JsonObject = {"role": "assistant", "content": ""}


def _wants_parts(source: str) -> bool:
    """Whether the template walks over the content's parts without asking whether it is a text."""
    walks = re.search(r"for \w+ in message(\.content|\[['\"]content['\"]\])", source)
    return bool(walks) and not re.search(r"content(['\"]\])? is (not )?(string|iterable|defined|mapping)", source)


def _places(segments: Sequence[Segment]) -> tuple[tuple[int, str], ...]:
    shown = (s for s in segments if s.part not in ("argument", "schema"))
    return tuple(dict.fromkeys((segment.message, segment.part) for segment in shown))


def _write_leaves(value: Any, leaf: Segment, write: Write) -> Any:
    """A copy of a JSON value whose texts are written as segments like `leaf`."""
    if isinstance(value, str):
        return write(replace(leaf, text=value))
    if isinstance(value, dict):
        return {key: _write_leaves(item, leaf, write) for key, item in value.items()}
    if isinstance(value, list):
        return [_write_leaves(item, leaf, write) for item in value]
    return value


def _schema_name(tool: Any, write: Write) -> Any:
    """A copy of a tool schema whose name is written as input of no message."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return _schema(tool, write)
    name = write(Segment(function["name"], Label.INPUT, -1, "schema"))
    return tool | {"function": function | {"name": name}}


# Keys of a schema whose texts templates only print; others, such as `type` and `required`, they compare.
_FREE_TEXT = frozenset(("description", "title", "enum", "const", "default", "examples", "pattern"))


def _schema(tool: Any, write: Write, *, named: bool = True, free: bool = False) -> Any:
    """A copy of a tool schema whose name and free texts are written as input of no message."""
    if isinstance(tool, str):
        return write(Segment(tool, Label.INPUT, -1, "schema")) if free else tool
    if isinstance(tool, dict):
        return {
            key: _schema(
                value, write, named=named and key == "function", free=key in _FREE_TEXT or (named and key == "name")
            )
            for key, value in tool.items()
        }
    if isinstance(tool, list):
        return [_schema(item, write, named=False, free=free) for item in tool]
    return tool
