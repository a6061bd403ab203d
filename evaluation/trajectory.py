"""Recorded agent runs as the evaluation sees them: token ids, a label per token, and who wrote which part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from agentkv_serve.phase_tagger import ChatFormat, Label, Options, render_prompt
from agentkv_serve.phase_tagger.formats.dialects import DIALECTS
from agentkv_serve.phase_tagger.formats.files import Transcript, read_transcripts

Half = Literal["development", "report"]
GENERATED = (Label.THINK, Label.ACT, Label.SAY)
LEAST_GENERATED = 64
"""A trajectory with fewer generated tokens after its cut says nothing and is left out."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A transcript with the task that it is a run of. Runs of one task are not independent of each other."""

    name: str
    task: str
    repeat: int
    half: Half
    source: str
    transcript: Transcript


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, end)` that came from one side: written by the model (`generated`) or given to it."""

    start: int
    end: int
    generated: bool


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A recording in one model's tokens."""

    name: str
    task: str
    ids: npt.NDArray[np.int64]  # [n]
    labels: npt.NDArray[np.int8]  # [n]
    evidence: npt.NDArray[np.bool_]  # [n] token of a user message or of a tool result
    spans: tuple[Span, ...]  # cover [0, n), given and generated ones in turn

    @property
    def generated(self) -> npt.NDArray[np.bool_]:
        """[n] whether the model wrote the token, turn ends excluded."""
        return np.isin(self.labels, GENERATED)


def half_of(task: str, number: int | None = None) -> Half:
    """The half of the split that a task belongs to.

    Numbered tasks (tau-bench): an even number by its remainder of 4, 0 = development and 2 = report. All others: by the
    parity of the SHA-256 of the task's name, even = development.
    """
    if number is not None and number % 2 == 0:
        return "development" if number % 4 == 0 else "report"
    even = int(hashlib.sha256(task.encode()).hexdigest(), 16) % 2 == 0
    return "development" if even else "report"


def read_recordings(files: Iterable[Path], split: Half | None = None) -> list[Recording]:
    """All recordings of trace files, of one half of the split or of both, in the order in which they are evaluated.

    The order takes one recording of each file in turn, and of a file first one run of every task, so that the first
    N of them are as mixed as all. Raises `TranscriptError` for a file without transcripts.
    """
    queues = []
    for file in files:
        found = [recording for recording in _recordings(file) if split in (None, recording.half)]
        queues.append(sorted(found, key=lambda r: (r.repeat, hashlib.sha256(r.task.encode()).hexdigest())))
    return [recording for row in zip_longest(*queues) for recording in row if recording is not None]


def _recordings(file: Path) -> list[Recording]:
    transcripts = read_transcripts(file)
    items = _items(file, len(transcripts))
    found = []
    for transcript, item in zip(transcripts, items, strict=True):
        name, task, repeat, number = transcript.name, str(item.get("task") or transcript.name), 0, None
        if isinstance(item.get("task_id"), int):
            number, repeat = item["task_id"], int(item.get("trial", 0))
            task = f"{file.stem}/task{number}"
            name = f"{task}.trial{repeat}"
        elif "task" in item:
            name, repeat = str(item["id"]), int(item.get("repeat", 0))
        found.append(Recording(name, task, repeat, half_of(task, number), file.stem, transcript))
    return found


def _items(file: Path, count: int) -> list[dict[str, Any]]:
    """What a file says of its transcripts beside the messages; empty where it says nothing."""
    text = file.read_text("utf-8")
    try:
        data = json.loads(text)
    except ValueError:
        data = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if isinstance(data, list) and len(data) == count and all(isinstance(item, dict) for item in data):
        return data
    return [{}] * count


def tokenise(chat: ChatFormat, recording: Recording, length: int | None = None) -> Trajectory | None:
    """A recording in the model's tokens, cut to `length`; None where too little of it is generated.

    Agents that act in plain text (a closing `<command>` or fenced block) are read by their dialect. Text that an agent
    writes before such an action, or beside a call in a recording that never addresses a user, is its reasoning: it
    counts as think.
    """
    transcript = recording.transcript
    dialect = _dialect(transcript)
    options = Options(dialect=DIALECTS[dialect] if dialect else None, add_generation_prompt=False)
    rendered = render_prompt(chat, transcript.messages, transcript.tools, options=options)
    labels = np.concatenate([np.full(end - start, label, np.int8) for start, end, label in rendered.runs])
    evidence = np.zeros(len(labels), bool)
    for part in rendered.parts:
        user = 0 <= part.message < len(transcript.messages) and transcript.messages[part.message]["role"] == "user"
        evidence[part.start : part.end] |= part.label is Label.TOOL or user
    if dialect or _addresses_nobody(transcript):
        _thoughts(labels)
    ends = [chat.vocabulary.id_of(end) for end in chat.family.turn_end]
    ids = rendered.tokens.astype(np.int64)[:length]
    trajectory = Trajectory(
        recording.name, recording.task, ids, labels[:length], evidence[:length], _spans(ids, labels[:length], ends)
    )
    return trajectory if trajectory.generated.sum() >= LEAST_GENERATED else None


def _dialect(transcript: Transcript) -> str | None:
    texts = [
        m["content"] for m in transcript.messages if m.get("role") == "assistant" and isinstance(m["content"], str)
    ]
    if any(m.get("tool_calls") for m in transcript.messages) or not texts:
        return None
    endings = {"command": "</command>", "fenced": "```"}
    for name, ending in endings.items():
        if sum(text.rstrip().endswith(ending) for text in texts) > len(texts) / 2:
            return name
    if sum(text.startswith(("Thought", "Action")) for text in texts) > len(texts) / 2:
        return "react"
    return None


def _addresses_nobody(transcript: Transcript) -> bool:
    """Whether the agent calls a tool in (nearly) every message, after one single user message."""
    assistant = [message for message in transcript.messages if message.get("role") == "assistant"]
    users = sum(message.get("role") == "user" for message in transcript.messages)
    return users == 1 and sum(bool(message.get("tool_calls")) for message in assistant) >= 0.8 * len(assistant) > 0


def _thoughts(labels: npt.NDArray[np.int8]) -> None:
    """Relabels visible text that leads to an action as think (in place)."""
    bounds = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    for begin, middle in pairwise(bounds[:-1]):
        if labels[begin] == Label.SAY and labels[middle] == Label.ACT:
            labels[begin:middle] = Label.THINK


def _spans(ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int8], ends: Sequence[int | None]) -> tuple[Span, ...]:
    """Spans by author: a generated one begins with the model's first token and ends with its turn-end token."""
    spans: list[Span] = []
    begin = position = 0
    generated = np.isin(labels, GENERATED)
    stop = np.isin(ids, [end for end in ends if end is not None])
    while position < len(ids):
        if not generated[position]:
            position += 1
            continue
        if position > begin:
            spans.append(Span(begin, position, False))
        begin = position
        while position < len(ids) and not stop[position] and labels[position] in (*GENERATED, Label.GLUE):
            position += 1
        position = min(len(ids), position + 1)
        spans.append(Span(begin, position, True))
        begin = position
    if begin < len(ids):
        spans.append(Span(begin, len(ids), False))
    return tuple(spans)
