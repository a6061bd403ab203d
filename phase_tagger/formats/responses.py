"""OpenAI Responses items as OpenAI chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .chat import JsonObject


def to_chat(
    items: str | Sequence[Mapping[str, Any]],
    instructions: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[JsonObject], list[JsonObject] | None]:
    """Chat messages and tools that say the same.

    Reasoning, text and calls of one model step are separate items here and one assistant message there.
    """
    found: list[JsonObject] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        found.append({"role": "user", "content": items})
        items = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            step = _step(found, "content")
            texts = [part.get("text", "") for key in ("content", "summary") for part in item.get(key) or []]
            step["reasoning_content"] = "\n".join([*filter(None, [step.get("reasoning_content")]), *texts])
        elif kind in ("function_call", "custom_tool_call"):
            step = _step(found)
            function = {"name": item.get("name"), "arguments": item.get("arguments", item.get("input"))}
            step.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message" and item.get("role") == "assistant":
            _step(found, "tool_calls", "content")["content"] = item.get("content")
        elif kind == "message":
            found.append({"role": item.get("role", "user"), "content": item.get("content")})
        else:
            found.append({"role": "user", "content": [item]})  # counted as unknown by `read_messages`
    return found, [_tool(tool) for tool in tools] if tools else None


def _step(found: list[JsonObject], *ended_by: str) -> JsonObject:
    """The assistant message under construction; a new one if the last one has what ends a step."""
    if not found or found[-1]["role"] != "assistant" or any(found[-1].get(key) for key in ended_by):
        found.append({"role": "assistant", "content": None})
    return found[-1]


def _tool(tool: Mapping[str, Any]) -> JsonObject:
    if "function" in tool or tool.get("type") != "function":
        return dict(tool)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
