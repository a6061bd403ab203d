"""Opens the store that the settings ask for."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable

from agentkv_serve.gateway.sessions.memory import MemoryStore
from agentkv_serve.gateway.sessions.packing import Seal
from agentkv_serve.gateway.sessions.store import SessionStore
from agentkv_serve.gateway.settings import Settings


def open_store(
    settings: Settings,
    on_change: Callable[[bool], None],
    on_call: Callable[[float, bool], None] = lambda seconds, well: None,
) -> SessionStore:
    """The in-process store, or Redis with this process's copies behind it. `on_change` hears of outages, `on_call` of
    the seconds and success of each call."""
    ttl = settings.sessions.idle_ttl
    local = MemoryStore(ttl, time.time)
    if settings.store.url is None:
        return local
    # Only a gateway with a shared store pays for its client.
    from agentkv_serve.gateway.sessions.connecting import server_of
    from agentkv_serve.gateway.sessions.link import Link
    from agentkv_serve.gateway.sessions.redis import RedisStore
    from agentkv_serve.gateway.sessions.resilient import ResilientStore

    key = settings.store.ledger_key
    seal = Seal(base64.b64decode(key.get_secret_value()) if key else None)
    link = Link(server_of(settings.store), settings.store.timeout)
    shared = RedisStore(link, idle_ttl=ttl, clock=time.time, seal=seal, lease=settings.store.lease, on_call=on_call)
    return ResilientStore(shared, local, on_change)
