"""Transcripts in files: which format a file has, and its conversations as chat messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import anthropic, harmony, responses
from .chat import JsonObject
from .dialects import react_to_chat

FORMATS = ("auto", "openai", "responses", "anthropic", "harmony", "react")
_ANTHROPIC_BLOCKS = {"tool_use", "tool_result", "thinking", "redacted_thinking"}
_RESPONSES_ITEMS = {"function_call", "function_call_output", "reasoning", "message"}


class TranscriptError(ValueError):
    """A file that holds no transcript in any known format."""


@dataclass(frozen=True)
class Transcript:
    """One conversation: chat messages, tool schemas, and the name it has within its file."""

    name: str
    messages: list[JsonObject]
    tools: list[JsonObject] | None = None


def read_transcripts(file: Path, form: str = "auto") -> list[Transcript]:
    """All conversations of a file. `form`: one of `FORMATS`.

    JSON: a request body, a list of messages, a list or JSON lines of such, or a session log. Text: harmony, ReAct.
    Raises `TranscriptError`.
    """
    text = file.read_text("utf-8")
    if form == "harmony" or (form == "auto" and "<|message|>" in text and not text.lstrip().startswith(("{", "["))):
        return [Transcript(file.stem, harmony.to_chat(text))]
    if form == "react" or (form == "auto" and re.search(r"^(Thought|Action)( \d+)?:", text, re.MULTILINE)):
        return [Transcript(file.stem, react_to_chat(text))]
    try:
        data = json.loads(text)
    except ValueError:
        data = _json_lines(file, text)
    found = list(_conversations(file.stem, data, form))
    if not found:
        raise TranscriptError(f"{file} holds no messages; give a request body, a list of messages, or see --format")
    return found


def _json_lines(file: Path, text: str) -> list[Any]:
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise TranscriptError(f"{file} is neither JSON nor harmony or ReAct text: {error}") from error


def _conversations(name: str, data: Any, form: str) -> Iterator[Transcript]:
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        if "role" in data[0] or data[0].get("type") in _RESPONSES_ITEMS:
            yield _one(name, {"messages": data}, form)
        elif isinstance(data[0].get("message"), Mapping):  # a session log, one message a line
            yield from _conversations(name, {"loglines": data}, form)
        else:
            for number, item in enumerate(data):
                yield from _conversations(f"{name}#{number}", item, form)
    elif isinstance(data, Mapping):
        if isinstance(data.get("items"), list):
            for number, item in enumerate(data["items"]):
                shared = {key: value for key, value in data.items() if key == "tools"}
                yield from _conversations(f"{name}#{item.get('id', number)}", {**shared, **item}, form)
        elif isinstance(data.get("loglines"), list):
            lines = [line["message"] for line in data["loglines"] if isinstance(line.get("message"), Mapping)]
            yield _one(name, {"messages": lines}, form)
        elif any(isinstance(data.get(key), list | str) for key in ("messages", "traj", "input")):
            yield _one(name, data, form)


def _one(name: str, body: Mapping[str, Any], form: str) -> Transcript:
    messages = body.get("messages") or body.get("traj") or body.get("input") or []
    tools = body.get("tools")
    if form == "responses" or (form == "auto" and ("input" in body or _has_items(messages))):
        return Transcript(name, *responses.to_chat(messages, body.get("instructions"), tools))
    if form == "anthropic" or (form == "auto" and ("system" in body or _has_blocks(messages))):
        return Transcript(name, *anthropic.to_chat(messages, body.get("system"), tools))
    return Transcript(name, list(messages), tools)


def _has_items(messages: Any) -> bool:
    return any(isinstance(m, Mapping) and m.get("type") in _RESPONSES_ITEMS for m in messages)


def _has_blocks(messages: Any) -> bool:
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return any(isinstance(block, Mapping) and block.get("type") in _ANTHROPIC_BLOCKS for block in blocks)
