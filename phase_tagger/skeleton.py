"""Appended messages of a shape that was rendered before: one plain rendering says all.

Two renderings, one of them marked, tell where a template prints each string. Messages of one shape (same template,
tools, arguments and roles, other texts) are mostly printed between the same texts. If a plain rendering consists of
exactly those texts with the new messages' own between them, every character's label is known without marks. Whatever
does not fit is rendered in full, and is the next to be remembered.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from .families.family import Family
from .formats.chat import Message
from .labels import Label
from .printer import Confidence
from .regions import CharRuns
from .sentinels import Field

_REMEMBERED = 128  # shapes; a server sees a few for each kind of agent


@dataclass(slots=True)
class Window:
    """A stretch of a rendered text, labelled and ready to be tokenised. `fields` count from its start."""

    text: str
    characters: CharRuns
    fields: list[Field]
    initial: str
    family: Family
    confidence: Confidence = "high"
    dropped: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What stands around the strings of messages of one shape: `texts` one more than there are strings.

    `runs`: label runs of each text, as (character, label). `labels`: label of each string. `cut`: where the window
    begins in the whole rendering. `head`: which of the ways to stand for the past was rendered.
    """

    head: int
    cut: int
    texts: tuple[str, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...]
    labels: tuple[int, ...]
    initial: str
    family: Family

    def fit(self, whole: str, new: Sequence[Message]) -> Window | None:
        """The window of the rendering `whole` of the messages `new`; None when it does not fit."""
        segments = [segment for message in new for segment in message.content]
        at = self.cut
        fields: list[Field] = []
        starts: list[int] = []
        labels: list[int] = []
        for text, runs, segment, label in zip(self.texts, self.runs, segments, self.labels, strict=False):
            if not whole.startswith(text, at):
                return None
            starts += [at - self.cut + start for start, _ in runs]
            labels += [run for _, run in runs]
            at += len(text)
            if not whole.startswith(segment.text, at):
                return None
            starts.append(at - self.cut)
            labels.append(label)
            fields.append(Field(segment, at - self.cut, at - self.cut + len(segment.text)))
            at += len(segment.text)
        if not whole.startswith(self.texts[-1], at) or at + len(self.texts[-1]) != len(whole):
            return None
        starts += [at - self.cut + start for start, _ in self.runs[-1]]
        labels += [run for _, run in self.runs[-1]]
        edges = [i for i in range(len(labels)) if i == 0 or labels[i] != labels[i - 1]]
        characters = CharRuns(np.array([starts[i] for i in edges]), np.array([labels[i] for i in edges], np.int8))
        return Window(whole[self.cut :], characters, fields, self.initial, self.family)


class Skeletons:
    """The skeletons of one chat format by shape; the oldest are forgotten."""

    def __init__(self) -> None:
        self._known: dict[bytes, Skeleton] = {}

    def get(self, shape: bytes | None) -> Skeleton | None:
        """What is remembered of a shape."""
        return self._known.get(shape) if shape else None

    def learn(self, shape: bytes | None, head: int, cut: int, window: Window, new: Sequence[Message]) -> None:
        """Remember a window that was rendered in full, if it prints each string of the messages once and whole."""
        if shape is None or window.confidence != "high" or window.dropped:
            return
        segments = [segment for message in new for segment in message.content]
        if [field.segment for field in window.fields] != segments:
            return
        labels = np.repeat(window.characters.labels, np.diff(window.characters.starts, append=len(window.text)))
        texts: list[str] = []
        runs: list[tuple[tuple[int, int], ...]] = []
        own: list[int] = []
        last = 0
        for field in [*window.fields, None]:
            end = len(window.text) if field is None else field.start
            if end < last:
                return
            texts.append(window.text[last:end])
            of = CharRuns.of(labels[last:end])
            runs.append(tuple(zip(of.starts.tolist(), of.labels.tolist(), strict=True)))
            if field is not None:
                inside = labels[field.start : field.end]
                if window.text[field.start : field.end] != field.segment.text or (inside != inside[0]).any():
                    return
                own.append(int(inside[0]))
                last = field.end
        while len(self._known) >= _REMEMBERED:
            self._known.pop(next(iter(self._known)), None)
        self._known[shape] = Skeleton(head, cut, tuple(texts), tuple(runs), tuple(own), window.initial, window.family)


def shape_of(
    leading: Sequence[Message],
    turn: Message,
    new: Sequence[Message],
    tools: Sequence[Any] | None,
    arguments: Mapping[str, Any] | None,
) -> bytes | None:
    """What decides how messages are printed, besides their texts; None for messages that are always rendered in full:
    turns of the assistant, media, blank texts, and values that are no plain data."""
    for message in new:
        plain = len(message.content) == 1 and message.content[0].text.strip() and message.role != "assistant"
        if not plain or message.media or message.calls or message.reasoning is not None:
            return None
    parts: Any = (
        [(message.role, message.text, message.name) for message in leading],
        [call.name.text for call in turn.calls],
        [(message.role, message.name, int(message.content[0].label or Label.INPUT)) for message in new],
        tools and list(tools),
        arguments and dict(arguments),
    )
    try:
        return blake2b(marshal.dumps(parts, 2), digest_size=16).digest()
    except ValueError:
        return None
