"""The demo's agent loop with the OpenAI SDK: nothing of it knows AgentKV but the budget header and the usage."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletion

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
        reply, decode_tok_s = _ask(
            client,
            model=model,
            messages=messages,
            tools=[schema(tool) for tool in tools],
            temperature=0,
            max_tokens=MAX_TOKENS,
            extra_headers=last,
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        calls = [(c.id, c.function) for c in message.tool_calls or [] if c.type == "function"]
        for call_id, call in calls:
            result = run_tool(tools, call.name, call.arguments)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        missed = missed_calls(step, [(call.name, loads(call.arguments)) for _, call in calls])
        messages += replay(missed, tools)
        if step.user is not None:
            messages.append({"role": "user", "content": step.user})
        usage = reply.usage.model_dump() if reply.usage else {}
        yield facts(usage, decode_tok_s) | {"did": describe(step, len(calls), missed)}


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


def _ask(client: OpenAI, **request: Any) -> tuple[ChatCompletion, float | None]:
    """Streams one completion; returns it whole, with the decode speed seen between its chunks."""
    arrivals: list[float] = []
    with client.chat.completions.stream(stream_options={"include_usage": True}, **request) as stream:
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                arrivals.append(time.perf_counter())
        reply = stream.get_final_completion()
    tokens = (reply.usage.completion_tokens if reply.usage else 0) - 1
    seconds = arrivals[-1] - arrivals[0] if arrivals else 0.0
    return reply, tokens / seconds if tokens > 0 and seconds > 0 else None
