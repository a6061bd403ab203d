"""What the gateway knows about one session."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields

from agentkv_serve.gateway.sessions.ledger import Ledger


def new_incarnation() -> str:
    """A mark of one life of a session."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Head:
    """What identifies the agent that owns a session: digests of its system message and of its tools."""

    system: bytes
    tools: bytes

    def shares_with(self, other: Head) -> bool:
        """True when the system message or the tools are the same."""
        return self.system == other.system or self.tools == other.tools


@dataclass(slots=True)
class Session:
    """One session. `epoch` counts the turns dispatched so far; `kv_tokens` is what its engine state holds.

    `incarnation` makes the engine's key: an id that is used again after its session was released or expired never
    meets the old state, nor the epochs that the engine remembers.
    """

    key: str
    tenant: str
    model: str
    id: str
    created: float
    used: float
    incarnation: str = field(default_factory=new_incarnation)
    epoch: int = 0
    head: Head | None = None
    ledger: Ledger = field(default_factory=Ledger)
    worker: str = ""
    instance: str = ""
    kv_tokens: int = 0
    budget: int | None = None
    policy: str | None = None
    token_limit: int | None = None
    retain: str | None = None
    spent: int = 0
    turns: int = 0

    def copied(self) -> Session:
        """A copy with a ledger of its own; turns never change, so both have the same ones."""
        own = Session(*(getattr(self, name) for name in _FIELDS))
        own.ledger = Ledger(dict(self.ledger.turns), self.ledger.head)
        return own

    @property
    def scope(self) -> str:
        """The namespace of content lookups: sessions of other tenants or models are never candidates."""
        return f"{self.tenant}\x00{self.model}"


_FIELDS = tuple(each.name for each in fields(Session))
