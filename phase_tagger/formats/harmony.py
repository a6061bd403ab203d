"""A rendered harmony text (gpt-oss) as OpenAI chat messages, by channel and recipient."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .chat import JsonObject

_MESSAGE = re.compile(
    r"(?:<\|start\|>)?(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
    r"(?P<body>.*?)(?P<end><\|(?:end|return|call)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class ChannelMessage:
    """One harmony message: who wrote it, to whom, on which channel."""

    role: str
    recipient: str | None
    channel: str | None
    body: str


def parse(text: str) -> list[ChannelMessage]:
    """The messages of a harmony text; one that begins inside the assistant's header counts as the assistant's."""
    found = []
    for match in _MESSAGE.finditer(text):
        head, _, rest = match["header"].partition("<|channel|>")
        recipient = re.search(r"to=(\S+?)(?=\s|<|$)", match["header"])
        role = head.split()[0] if head.split() and not head.startswith((" ", "to=")) else "assistant"
        channel = re.match(r"\w+", rest.strip())
        found.append(
            ChannelMessage(role, recipient[1] if recipient else None, channel[0] if channel else None, match["body"])
        )
    return found


def to_chat(text: str) -> list[JsonObject]:
    """Chat messages that say the same; analysis, calls and text of one step become one assistant message."""
    found: list[JsonObject] = []
    number = 0
    for message in parse(text):
        if message.role != "assistant":
            known = message.role in ("system", "developer", "user", "tool")
            if not known or message.recipient == "assistant":
                found.append({"role": "tool", "tool_call_id": f"call_{number}", "content": message.body})
            else:
                found.append({"role": message.role, "content": message.body})
            continue
        done = found[-1].get("content") or found[-1].get("tool_calls") if found else True
        if not found or found[-1]["role"] != "assistant" or (done and message.channel == "analysis"):
            found.append({"role": "assistant", "content": None})
        step = found[-1]
        if message.recipient:
            number += 1
            name = message.recipient.removeprefix("functions.")
            function = {"name": name, "arguments": message.body}
            step.setdefault("tool_calls", []).append({"id": f"call_{number}", "function": function})
        elif message.channel == "analysis":
            step["reasoning_content"] = message.body
        else:
            step["content"] = message.body if step["content"] is None else step["content"] + message.body
    return found
