"""Opens the store that the settings ask for."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError

from agentkv_serve.gateway.sessions.memory import MemoryStore
from agentkv_serve.gateway.sessions.packing import Seal
from agentkv_serve.gateway.sessions.redis import RedisStore
from agentkv_serve.gateway.sessions.resilient import ResilientStore
from agentkv_serve.gateway.sessions.store import SessionStore
from agentkv_serve.gateway.settings import Settings, StoreSettings


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
    key = settings.store.ledger_key
    seal = Seal(base64.b64decode(key.get_secret_value()) if key else None)
    shared = RedisStore(
        _connect(settings.store), idle_ttl=ttl, clock=time.time, seal=seal, lease=settings.store.lease, on_call=on_call
    )
    return ResilientStore(shared, local, on_change)


def _connect(settings: StoreSettings) -> Redis:
    assert settings.url is not None
    url = settings.url.get_secret_value()
    bounds: dict[str, Any] = {
        "socket_timeout": settings.timeout,
        "socket_connect_timeout": settings.timeout,
        # Once more when a connection turns out to be dead: all steps may be said twice. Never after a timeout.
        "retry": Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
        "client_name": "agentkv-gateway",
    }
    if url.startswith("redis+sentinel://"):
        parts = urlsplit(url)
        hosts = [host.rpartition(":") for host in parts.netloc.rpartition("@")[2].split(",")]
        service, _, database = parts.path.strip("/").partition("/")
        sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
            [(host, int(port)) for host, _, port in hosts],
            sentinel_kwargs=bounds,
            password=parts.password,
            username=parts.username,
            db=int(database or 0),
            **bounds,
        )
        master: Redis = sentinel.master_for(service)
        return master
    if url.startswith("rediss://"):
        bounds |= {"ssl_cert_reqs": "required", "ssl_ca_certs": settings.ca_file}
    pool = BlockingConnectionPool.from_url(
        url, max_connections=settings.connections, timeout=settings.timeout, **bounds
    )
    return Redis.from_pool(pool)
