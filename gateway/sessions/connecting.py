"""How Redis or Valkey is reached: by address, by socket, or by sentinels; with TLS and a login."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError

from agentkv_serve.gateway.settings import StoreSettings

_SENTINELS = ("redis+sentinel://", "rediss+sentinel://")


def connection_pool(settings: StoreSettings) -> ConnectionPool[Any]:
    """A maker of connections to `settings.url` that never wait for long."""
    assert settings.url is not None
    url = settings.url.get_secret_value()
    options: dict[str, Any] = {
        "socket_timeout": settings.timeout,
        "socket_connect_timeout": settings.timeout,
        "retry": Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
        "client_name": "agentkv-gateway",
        "protocol": 2,  # all that 6.2 and its proxies need to speak
    }
    if url.startswith("rediss"):
        options |= {"ssl_cert_reqs": "required", "ssl_ca_certs": settings.ca_file}
    if url.startswith(_SENTINELS):
        return _by_sentinels(url, options)
    return ConnectionPool.from_url(url, **options)


def _by_sentinels(url: str, options: dict[str, Any]) -> ConnectionPool[Any]:
    parts = urlsplit(url)
    hosts = [host.rpartition(":") for host in parts.netloc.rpartition("@")[2].split(",")]
    service, _, database = parts.path.strip("/").partition("/")
    if parts.scheme.startswith("rediss"):
        options |= {"ssl": True}
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        [(host.strip("[]"), int(port)) for host, _, port in hosts],
        sentinel_kwargs=options,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        db=int(database or 0),
        **options,
    )
    pool: ConnectionPool[Any] = sentinel.master_for(service).connection_pool
    return pool
