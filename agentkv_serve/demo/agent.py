"""The demo's agent loop with the OpenAI SDK: nothing of it knows AgentKV but the budget header and the usage."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

from agentkv_serve.demo.recording import Call, Recording
from agentkv_serve.demo.tools import Airline, Tool, run_tool, schema
from agentkv_serve.demo.turns import MAX_TOKENS, describe, facts, missed_calls


def converse(base_url: str, model: str, recording: Recording, budget: str, turns: int) -> Iterator[dict[str, Any]]:
    """Runs the recorded conversation at one budget and yields the facts of each turn as it ends.

    The client sends the whole transcript every time, with no session id: the gateway finds the session by content.
    """
    client = OpenAI(base_url=f"{base_url}/v1", api_key="any", default_headers={"X-AgentKV-Budget": budget})
    tools = Airline(recording).tools()
    messages: list[Any] = [
        {"role": "system", "content": recording.system},
        {"role": "user", "content": recording.opening},
    ]
    steps = recording.steps[:turns]
    for number, step in enumerate(steps, 1):
        last = {"X-AgentKV-Session-Final": "true"} if number == len(steps) else {}
        reply = _ask(
            client,
            model=model,
            messages=messages,
            tools=[schema(tool) for tool in tools],
            temperature=0,
            max_tokens=MAX_TOKENS,
            extra_headers=last,
        )
        messages.append(reply.message())
        calls = list(reply.calls.values())
        for call in calls:
            result = run_tool(tools, call["name"], call["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        missed = missed_calls(step, [(call["name"], loads(call["arguments"])) for call in calls])
        messages += replay(missed, tools)
        if step.user is not None:
            messages.append({"role": "user", "content": step.user})
        yield facts(reply.usage, reply.decode_tok_s) | {"did": describe(step, len(calls), missed)}


def replay(calls: list[Call], tools: list[Tool]) -> list[dict[str, Any]]:
    """The messages of recorded calls that the model did not make itself, with the tools' results.

    They stand behind the model's own turn as a further assistant message, so that its tokens stay in the session.
    """
    if not calls:
        return []
    made = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
    results = [{"role": "tool", "tool_call_id": c.id, "content": run_tool(tools, c.name, c.arguments)} for c in calls]
    return [{"role": "assistant", "content": None, "tool_calls": made}, *results]


def loads(arguments: str) -> Any:
    """Returns the JSON value of a call's arguments, or None where the model wrote no valid JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return None


@dataclass
class Reply:
    """One streamed completion, put together. `decode_tok_s` is the speed seen between its chunks."""

    content: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    decode_tok_s: float | None = None

    def message(self) -> dict[str, Any]:
        """The assistant message to send back in the next request."""
        calls = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in self.calls.values()
        ]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}


def _ask(client: OpenAI, **request: Any) -> Reply:
    reply, arrivals = Reply(), []
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        if chunk.usage:
            reply.usage = chunk.usage.model_dump()
        for choice in chunk.choices:
            arrivals.append(time.perf_counter())
            reply.content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = reply.calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                if part.function:
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
    tokens = reply.usage.get("completion_tokens", 0) - 1
    if tokens > 0 and arrivals[-1] > arrivals[0]:
        reply.decode_tok_s = tokens / (arrivals[-1] - arrivals[0])
    return reply
