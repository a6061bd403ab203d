"""A client of Redis or Valkey that never waits for long."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError

from agentkv_serve.gateway.settings import StoreSettings


def connect(settings: StoreSettings) -> Redis:
    """The client of `settings.url`: redis://, rediss://, unix:// or redis+sentinel://."""
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
