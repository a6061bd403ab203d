"""A recorded agent run: what the agent did at each turn, and what the world answered.

Standard library only: the LangChain demo imports it in the clients' environment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDING = Path(__file__).with_name("recording.json")


@dataclass(frozen=True)
class Call:
    """A recorded tool call and the tool's result. `arguments` is the JSON text that the agent wrote."""

    id: str
    name: str
    arguments: str
    result: str


@dataclass(frozen=True)
class Step:
    """One recorded turn of the agent: the tools that it called, or the user's answer to its text."""

    calls: tuple[Call, ...]
    user: str | None


@dataclass(frozen=True)
class Recording:
    """A whole run: system prompt, the user's first message, then the agent's turns."""

    origin: str
    system: str
    opening: str
    steps: tuple[Step, ...]

    @property
    def calls(self) -> list[Call]:
        """Every recorded call in order."""
        return [call for step in self.steps for call in step.calls]


def load_recording(path: Path = RECORDING) -> Recording:
    """Reads a recording whose messages are a system message, a user message, then the run."""
    data = json.loads(path.read_text(encoding="utf-8"))
    system, opening, *rest = data["messages"]
    results = {m["tool_call_id"]: m["content"] for m in rest if m["role"] == "tool"}
    steps: list[Step] = []
    for i, message in enumerate(rest):
        if message["role"] == "assistant":
            calls = tuple(_call(c, results) for c in message.get("tool_calls") or ())
            after = rest[i + 1] if i + 1 < len(rest) else {}
            steps.append(Step(calls, after["content"] if after.get("role") == "user" else None))
    return Recording(data["origin"], system["content"], opening["content"], tuple(steps))


def _call(call: dict[str, Any], results: dict[str, str]) -> Call:
    function = call["function"]
    return Call(call["id"], function["name"], function["arguments"], results[call["id"]])
