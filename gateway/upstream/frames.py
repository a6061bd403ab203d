"""Server-sent events of the engine: cut into frames, told apart, and read for what the gateway keeps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import orjson

_END = re.compile(rb"\r?\n\r?\n")


class Kind(Enum):
    """What a frame is to the gateway."""

    CONTENT = auto()  # has choices: belongs to the client, byte for byte
    SGLEXT = auto()  # the engine's own facts: never reaches a client
    USAGE = auto()
    ERROR = auto()
    DONE = auto()
    OTHER = auto()  # comments and whatever else: passed on


class FrameCutter:
    """Cuts a byte stream into frames at blank lines, however the bytes were split on their way."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The frames completed by `piece`, terminators included."""
        data = self._rest + piece
        if b"\r" not in data:
            frames = data.split(b"\n\n")
            self._rest = frames.pop()
            return [frame + b"\n\n" for frame in frames if frame]
        frames, start = [], 0
        for end in _END.finditer(data):
            if end.start() > start:
                frames.append(data[start : end.end()])
            start = end.end()
        self._rest = data[start:]
        return frames

    @property
    def rest(self) -> bytes:
        """Bytes of an unfinished frame."""
        return self._rest


def kind_of(frame: bytes) -> Kind:
    """What a frame is. JSON strings cannot hold an unescaped quote, so these byte tests cannot be fooled by
    generated text."""
    if b'"choices":[{' in frame:
        return Kind.CONTENT
    payload = payload_of(frame)
    if payload == b"[DONE]":
        return Kind.DONE
    if not payload.startswith(b"{"):
        return Kind.OTHER
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return Kind.OTHER
    if "error" in value:
        return Kind.ERROR
    if value.get("sglext") is not None:
        return Kind.SGLEXT
    if value.get("choices"):
        return Kind.CONTENT
    return Kind.USAGE if value.get("usage") is not None else Kind.OTHER


def payload_of(frame: bytes) -> bytes:
    """The data of a frame, joined over its `data:` lines; b"" for comments."""
    lines = [line[5:].strip() for line in frame.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


@dataclass(slots=True)
class Assembly:
    """An assistant message put together from content frames or taken from a whole reply."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish: str | None = None

    @classmethod
    def of_frames(cls, frames: Iterable[bytes]) -> Assembly:
        """Read the first choice of content frames."""
        whole = cls()
        for frame in frames:
            for choice in orjson.loads(payload_of(frame)).get("choices") or ():
                if choice.get("index", 0) == 0:
                    whole.add(choice.get("delta") or {}, choice.get("finish_reason"))
        return whole

    @classmethod
    def of_choice(cls, choice: dict[str, Any]) -> Assembly:
        """Read a choice of a reply that was not streamed."""
        whole = cls()
        whole.add(choice.get("message") or {}, choice.get("finish_reason"))
        return whole

    def add(self, delta: dict[str, Any], finish: str | None) -> None:
        """Take in one delta (or a whole message)."""
        if delta.get("content"):
            self.content.append(delta["content"])
        if delta.get("reasoning_content"):
            self.reasoning.append(delta["reasoning_content"])
        for position, part in enumerate(delta.get("tool_calls") or ()):
            index = part.get("index")
            call = self.calls.setdefault(
                position if index is None else index,
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
            )
            function = part.get("function") or {}
            call["id"] = part.get("id") or call["id"]
            call["function"]["name"] = function.get("name") or call["function"]["name"]
            call["function"]["arguments"] += function.get("arguments") or ""
        self.finish = finish or self.finish

    def message(self) -> dict[str, Any]:
        """The assistant message as a client keeps it."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [self.calls[i] for i in sorted(self.calls)]
        return message
