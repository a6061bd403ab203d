"""Anthropic messages (content blocks) as OpenAI chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .chat import JsonObject


def to_chat(
    messages: Sequence[Mapping[str, Any]],
    system: str | Sequence[Mapping[str, Any]] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[JsonObject], list[JsonObject] | None]:
    """Chat messages and tools that say the same.

    A `tool_result` inside a user message becomes a tool message of its own, the blocks around it stay user
    messages, in order. Blocks that nobody knows stay in the content, where `read_messages` counts them.
    """
    found: list[JsonObject] = []
    if system:
        found.append({"role": "system", "content": system})
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) or not isinstance(content, Sequence):
            found.append({"role": message.get("role"), "content": content})
        elif message.get("role") == "assistant":
            found.append(_assistant(content))
        else:
            found += _user(content, message.get("role"))
    return found, [_tool(tool) for tool in tools] if tools else None


def _assistant(blocks: Sequence[Any]) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": []}
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            message.setdefault("tool_calls", []).append({"id": block.get("id"), "function": function})
        else:
            message["content"].append(block)
    return message


def _user(blocks: Sequence[Any], role: Any) -> list[JsonObject]:
    found: list[JsonObject] = []
    for block in blocks:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif found and found[-1]["role"] == role:
            found[-1]["content"].append(block)
        else:
            found.append({"role": role, "content": [block]})
    return found


def _tool(tool: Mapping[str, Any]) -> JsonObject:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}
