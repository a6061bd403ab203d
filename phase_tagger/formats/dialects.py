"""Agents that act in plain text: opt-in rules that split assistant text and recognise the answers to it.

A dialect looks at assistant text, and at a user message only as the answer to a message that acted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..labels import Label
from .chat import Dialect, JsonObject, Message, Segment

_REACT = re.compile(r"^(Thought|Action Input|Action|Observation)(?: \d+)?:", re.MULTILINE)
_REACT_LABELS = {
    "Thought": Label.THINK,
    "Action": Label.ACT,
    "Action Input": Label.ACT,
    "Observation": Label.TOOL,
}
_COMMAND = re.compile(r"<command>.*?</command>\s*\Z", re.DOTALL)
_FENCE = re.compile(r"^```[\w.+-]*\n(?:(?!^```).)*^```[ \t]*\s*\Z", re.DOTALL | re.MULTILINE)


def react(message: Message, before: Message | None) -> list[Segment] | None:
    """`Thought n:` is think, `Action n:` and `Action Input:` act, `Observation n:` tool, at the start of a line."""
    text = message.text
    if message.role == "user":
        answers = before is not None and before.role == "assistant" and text.startswith("Observation")
        return _whole(message, Label.TOOL) if answers and _REACT.match(text) else None
    if message.role != "assistant":
        return None
    marks = list(_REACT.finditer(text))
    bounds = [mark.start() for mark in marks] + [len(text)]
    found = [(text[: bounds[0]], Label.SAY)] if marks else [(text, Label.SAY)]
    found += [
        (text[begin:end], _REACT_LABELS[mark[1]]) for mark, begin, end in zip(marks, bounds, bounds[1:], strict=False)
    ]
    return [Segment(piece, label, message.index, "content") for piece, label in found if piece]


def command(message: Message, before: Message | None) -> list[Segment] | None:
    """A `<command>` at the end of the assistant's text is act, and the user message that follows is its result."""
    return _closing_action(message, before, _COMMAND)


def fenced(message: Message, before: Message | None) -> list[Segment] | None:
    """A fenced block at the end of the assistant's text is act, and the user message that follows its result."""
    return _closing_action(message, before, _FENCE)


DIALECTS: dict[str, Dialect] = {"react": react, "command": command, "fenced": fenced}


def _closing_action(message: Message, before: Message | None, pattern: re.Pattern[str]) -> list[Segment] | None:
    if message.role == "user" and before is not None and before.role == "assistant":
        acted = any(segment.label is Label.ACT for segment in before.content)
        return _whole(message, Label.TOOL) if acted else None
    match = pattern.search(message.text) if message.role == "assistant" else None
    if match is None:
        return None
    pieces = ((message.text[: match.start()], Label.SAY), (message.text[match.start() :], Label.ACT))
    return [Segment(text, label, message.index, "content") for text, label in pieces if text]


def _whole(message: Message, label: Label) -> list[Segment]:
    return [Segment(message.text, label, message.index, "result")] if message.text else []


def react_to_chat(text: str) -> list[JsonObject]:
    """One ReAct episode in plain text as chat messages: observations come from outside, the rest is the model's."""
    return list(_turns(text))


def _turns(text: str) -> Iterator[JsonObject]:
    marks = list(_REACT.finditer(text))
    bounds = [0, *(mark.start() for mark in marks), len(text)]
    roles = ["user", *("user" if mark[1] == "Observation" else "assistant" for mark in marks)]
    turn: JsonObject | None = None
    for role, begin, end in zip(roles, bounds, bounds[1:], strict=False):
        piece = text[begin:end]
        if turn is not None and turn["role"] == role:
            turn["content"] += piece
        elif piece.strip():
            if turn is not None:
                yield turn
            turn = {"role": role, "content": piece}
    if turn is not None:
        yield turn
