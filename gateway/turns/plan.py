"""What a request is to its session, and all that its dispatch needs to know."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agentkv_serve.gateway.auth import Tenant
from agentkv_serve.gateway.sessions.identity import Source
from agentkv_serve.gateway.sessions.ledger import NO_MATCH, Match
from agentkv_serve.gateway.sessions.rendering import Prompt
from agentkv_serve.gateway.sessions.session import Head
from agentkv_serve.gateway.sessions.store import Lease
from agentkv_serve.gateway.turns.controls import Controls
from agentkv_serve.gateway.turns.request import ChatRequest

# Tool-call ids that some models number per conversation ("functions.f:0") identify nobody. Lengths are bounded: both
# parts may match the same letters, and trying all divisions of a long id would hold up everybody.
_UNIQUE_CALL = re.compile(r"[A-Za-z]{0,32}[_-]?[0-9a-fA-F-]{16,128}")


class Kind(StrEnum):
    """How a request relates to its session."""

    NEW = "new"
    APPEND = "append"
    BRANCH = "branch"
    REPLACED = "replaced"
    STATELESS = "stateless"


@dataclass(slots=True)
class Plan:
    """A request ready for dispatch. A stateless one has no lease and no prompt."""

    request: ChatRequest
    tenant: Tenant
    kind: Kind
    source: Source
    session_id: str
    context_length: int
    controls: Controls
    budget: int = 0
    policy: str = ""
    lease: Lease | None = None
    match: Match = NO_MATCH
    links: tuple[bytes, ...] = ()
    head: Head | None = None
    prompt: Prompt | None = None
    why_stateless: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt; 0 when the engine renders it."""
        if self.prompt is None:
            return 0
        return sum(turn.tokens for turn in self.match.turns) + len(self.prompt.ids)


def unique_calls(message: Any) -> list[str]:
    """Ids of a message's tool calls that are random enough to name one conversation."""
    if message.get("role") != "assistant":
        return []
    calls = message.get("tool_calls") or ()
    return [str(c["id"]) for c in calls if c.get("id") and _UNIQUE_CALL.fullmatch(str(c["id"]))]
