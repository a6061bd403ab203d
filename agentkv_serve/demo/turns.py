"""What both agent loops share: which recorded calls a turn missed, and the facts that are shown of it.

Standard library only: the LangChain demo imports it in the clients' environment.
"""

from __future__ import annotations

import json
from typing import Any

from agentkv_serve.demo.recording import Call, Step

MAX_TOKENS = 48
FACTS = ("state", "reason", "logical_tokens", "kv_tokens", "evicted_tokens", "phases", "prefill_tokens")


def missed_calls(step: Step, made: list[tuple[str, Any]]) -> list[Call]:
    """Returns the step's recorded calls that are not among the calls made, given as (name, arguments)."""
    return [call for call in step.calls if (call.name, json.loads(call.arguments)) not in made]


def facts(usage: dict[str, Any], decode_tok_s: float | None) -> dict[str, Any]:
    """What one turn's `usage` says of the session, with the client's own decode speed in tokens a second."""
    told = usage.get("agentkv") or {}
    counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    return {name: told.get(name) for name in FACTS} | counts | {"decode_tok_s": decode_tok_s}


def describe(step: Step, own_calls: int, missed: list[Call]) -> str:
    """One phrase on what the model did, compared with the recorded agent."""
    if missed:
        did = "called another tool" if own_calls else "made no tool call"
        return f"{did}; replayed {', '.join(call.name for call in missed)}"
    if step.calls:
        return f"called {', '.join(call.name for call in step.calls)}"
    return f"made {own_calls} tool calls" if own_calls else "answered"
