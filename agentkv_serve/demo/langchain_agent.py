"""The demo's agent loop with LangChain. Runs in the clients' environment and prints one JSON line per turn.

The command line starts it as a subprocess, because today's LangChain and the engine's openai pin cannot share one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI

from agentkv_serve.demo.recording import load_recording
from agentkv_serve.demo.tools import Airline, run_tool
from agentkv_serve.demo.turns import MAX_TOKENS, describe, facts, missed_calls


def converse(base_url: str, model: str, budget: str, turns: int) -> None:
    """Runs the recorded conversation at one budget and prints the facts of each turn."""
    recording = load_recording()
    tools = Airline(recording).tools()
    llm = ChatOpenAI(
        base_url=f"{base_url}/v1",
        api_key="any",
        model=model,
        temperature=0,
        max_tokens=MAX_TOKENS,
        default_headers={"X-AgentKV-Budget": budget},
    ).bind_tools([StructuredTool.from_function(tool) for tool in tools])
    messages: list[BaseMessage] = [SystemMessage(recording.system), HumanMessage(recording.opening)]
    for step in recording.steps[:turns]:
        reply = llm.invoke(messages)
        messages.append(reply)
        for call in reply.tool_calls:
            result = run_tool(tools, call["name"], json.dumps(call["args"]))
            messages.append(ToolMessage(result, tool_call_id=call["id"]))
        missed = missed_calls(step, [(call["name"], call["args"]) for call in reply.tool_calls])
        if missed:
            calls = [{"id": c.id, "name": c.name, "args": json.loads(c.arguments)} for c in missed]
            messages.append(AIMessage("", tool_calls=calls))
            messages += [ToolMessage(run_tool(tools, c.name, c.arguments), tool_call_id=c.id) for c in missed]
        if step.user is not None:
            messages.append(HumanMessage(step.user))
        usage: dict[str, Any] = reply.response_metadata["token_usage"]
        print(json.dumps(facts(usage, None) | {"did": describe(step, len(reply.tool_calls), missed)}), flush=True)


if __name__ == "__main__":
    converse(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
