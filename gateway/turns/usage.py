"""The usage object of a reply: the engine's counts, and what became of the session's KV state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agentkv_serve.gateway.turns.plan import Plan
from agentkv_serve.gateway.upstream.facts import Facts


class Ended(Protocol):
    """A turn that has ended."""

    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def facts(self) -> Facts: ...
    @property
    def plan(self) -> Plan: ...


def usage_of(usage: Mapping[str, Any], turn: Ended) -> dict[str, Any]:
    """The engine's `usage` with true cached tokens (always an integer) and the `agentkv` object."""
    facts = turn.facts
    prompt = int(usage.get("prompt_tokens") or 0)
    cached = max(0, prompt - facts.prefill) if facts.state else min(prompt, facts.cached)
    details = {**(usage.get("prompt_tokens_details") or {}), "cached_tokens": cached}
    told: dict[str, Any] = {"state": turn.state, "reason": turn.reason}
    if facts.state:
        told |= {
            "logical_tokens": facts.logical,
            "kv_tokens": facts.held,
            "evicted_tokens": facts.evicted,
            "prefill_tokens": facts.prefill,
            "phases": facts.phases,
            "budget": facts.budget or None,
        }
    elif turn.plan.why_stateless:
        told["reason"] = turn.plan.why_stateless
    return {**usage, "prompt_tokens_details": details, "agentkv": told}
