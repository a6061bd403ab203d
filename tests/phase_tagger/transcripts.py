"""Recorded agent transcripts as chat messages, whatever form they were saved in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentkv_serve.phase_tagger.formats import anthropic, dialects, harmony
from agentkv_serve.phase_tagger.formats.chat import Dialect

HERE = Path(__file__).parent / "traces"
SHARED = Path(__file__).parents[3] / "shared" / "traces"


@dataclass(frozen=True)
class Transcript:
    """One agent run: chat messages, tool schemas, and the dialect to read it with."""

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    dialect: Dialect | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def load(name: str) -> list[Transcript]:
    """The transcripts of one file."""
    file = next((folder / name for folder in (HERE, SHARED) if (folder / name).is_file()), None)
    if file is None:
        return []
    if file.suffix == ".txt":
        return list(_text(file))
    data = json.loads(file.read_text("utf-8"))
    return list(_json(file.stem, data))


def _text(file: Path) -> Iterator[Transcript]:
    text = file.read_text("utf-8")
    if "harmony" in file.name:
        if "<|message|>" in text:
            yield Transcript(file.stem, harmony.to_chat(text))
        return
    for number, episode in enumerate(text.split("\nQuestion: ")):
        episode = episode if episode.startswith("Question: ") else "Question: " + episode
        yield Transcript(f"{file.stem}#{number}", dialects.react_to_chat(episode), dialect=dialects.react)


def _json(name: str, data: Any) -> Iterator[Transcript]:
    if isinstance(data, list):
        for number, run in enumerate(data):
            yield Transcript(f"{name}#{number}", run.get("traj") or run["messages"])
        return
    if "loglines" in data:
        lines = [line["message"] for line in data["loglines"] if "message" in line]
        messages, tools = anthropic.to_chat(lines)
        yield Transcript(name, messages, tools)
    elif "items" in data:
        for item in data["items"]:
            tools = item.get("tools") or data.get("tools")
            extra = {key: value for key, value in item.items() if key not in ("tools", "messages")}
            yield Transcript(f"{name}#{item['id']}", item["messages"], tools, extra=extra)
    else:
        dialect = None
        if "xml_command" in name:
            dialect = dialects.command
        elif "bash_block" in name:
            dialect = dialects.fenced
        extra = {key: value for key, value in data.items() if key not in ("tools", "messages")}
        yield Transcript(name, data["messages"], data.get("tools"), dialect, extra)


def names() -> list[str]:
    """Every trace file at hand, those of this folder first."""
    found: dict[str, None] = {}
    for folder in (HERE, SHARED):
        if folder.is_dir():
            files = sorted(file.name for file in folder.iterdir() if file.name[:2].isdigit())
            found |= dict.fromkeys(files)
    return list(found)
