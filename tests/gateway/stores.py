"""What tests of session stores share: settings, sessions, turns, commits."""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentkv_serve.gateway.sessions.ledger import Turn
from agentkv_serve.gateway.sessions.session import Head, Session
from agentkv_serve.gateway.sessions.store import Lease, SessionStore
from agentkv_serve.gateway.settings import Settings

Open = Callable[..., Awaitable[SessionStore]]


def store_settings(url: str | None = None, *, sessions: dict[str, float] | None = None, **store: object) -> Settings:
    """Settings of a gateway whose store is at `url`; None: in process."""
    return Settings(
        model_path=Path("/m"),
        secret="0123456789abcdef",  # type: ignore[arg-type]
        store={"url": url, **store},  # type: ignore[arg-type]
        sessions=sessions or {},  # type: ignore[arg-type]
    )


def fresh(key: str = "k1", tenant: str = "t") -> Session:
    return Session(key, tenant, "m", f"id-{key}", time.time(), time.time())


def turn(link: bytes, parent: bytes | None = None, calls: tuple[str, ...] = ()) -> Turn:
    return Turn(
        link.ljust(16), parent and parent.ljust(16), array("i", [1, 2, 70000]), array("i", [0, 3, 4]), -1, b"r", calls
    )


async def commit(store: SessionStore, lease: Lease, link: bytes, *, tokens: int = 10, worker: str = "w0") -> None:
    session = lease.session
    parent = session.ledger.head.strip() if session.ledger.head else None
    session.ledger.add(turn(link, parent, (f"call-{link.decode()}",)), 1000)
    session.turns += 1
    session.worker, session.kv_tokens, session.head = worker, tokens, Head(b"s" * 16, b"t" * 16)
    await store.commit(lease)
