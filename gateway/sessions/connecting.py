"""Where Redis or Valkey is: at an address, at a socket, or where sentinels say; with TLS and a login."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import Sentinel

from agentkv_serve.gateway.settings import StoreSettings

_SENTINELS = ("redis+sentinel://", "rediss+sentinel://")
P = TypeVar("P", bound=asyncio.Protocol)


@dataclass(frozen=True)
class Server:
    """One server, or the one in charge of `service` among those that `sentinel` watches. `path`: of its socket."""

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    username: str | None = None
    password: str | None = None
    db: int = 0
    tls: ssl.SSLContext | None = None
    sentinel: Any = None
    service: str = ""

    async def connect(self, protocol: Callable[[], P]) -> P:
        """Open a connection. Raises OSError, or RedisError when no sentinel knows the server."""
        loop = asyncio.get_running_loop()
        if self.path is not None:
            return (await loop.create_unix_connection(protocol, self.path))[1]
        host, port = self.host, self.port
        if self.sentinel is not None:
            host, port = await self.sentinel.discover_master(self.service)
        named = host if self.tls else None
        return (await loop.create_connection(protocol, host, port, ssl=self.tls, server_hostname=named))[1]

    @property
    def greeting(self) -> list[tuple[str | int, ...]]:
        """What is said first on a connection."""
        said: list[tuple[str | int, ...]] = [("CLIENT", "SETNAME", "agentkv-gateway")]
        if self.db:
            said.insert(0, ("SELECT", self.db))
        if self.password is not None:
            said.insert(0, ("AUTH", self.username, self.password) if self.username else ("AUTH", self.password))
        return said

    async def close(self) -> None:
        """Let go of connections to sentinels."""
        for each in self.sentinel.sentinels if self.sentinel is not None else ():
            await each.aclose()


def server_of(settings: StoreSettings) -> Server:
    """The server of `settings.url`. Raises ValueError for an address that is none."""
    assert settings.url is not None
    url = settings.url.get_secret_value()
    tls = ssl.create_default_context(cafile=settings.ca_file) if url.startswith("rediss") else None
    if url.startswith(_SENTINELS):
        return _by_sentinels(url, settings, tls)
    given: dict[str, Any] = {**parse_url(url)}
    known = ("host", "port", "path", "username", "password", "db")
    return Server(tls=tls, **{name: given[name] for name in known if name in given})


def _by_sentinels(url: str, settings: StoreSettings, tls: ssl.SSLContext | None) -> Server:
    parts = urlsplit(url)
    hosts = [host.rpartition(":") for host in parts.netloc.rpartition("@")[2].split(",")]
    service, _, database = parts.path.strip("/").partition("/")
    options: dict[str, Any] = {"socket_timeout": settings.timeout, "socket_connect_timeout": settings.timeout}
    if tls is not None:
        options |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_ca_certs": settings.ca_file}
    return Server(
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        db=int(database or 0),
        tls=tls,
        sentinel=Sentinel(  # type: ignore[no-untyped-call]
            [(host.strip("[]"), int(port)) for host, _, port in hosts], sentinel_kwargs=options
        ),
        service=service,
    )
