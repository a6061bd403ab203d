"""One engine worker as the gateway sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pydantic import SecretStr

from agentkv_serve.gateway.routing.breaker import Breaker
from agentkv_serve.gateway.settings import RoutingSettings, WorkerSettings


@dataclass(slots=True)
class Worker:
    """A worker's address, health and load. `instance` names the running process: it changes with a restart.

    `reserved` counts KV tokens of turns that were dispatched but not yet committed, so that a burst of new
    sessions does not see the same worker as empty. `shared` workers came by the admin API of some gateway process, or
    registered themselves: `announced` is the time of their newest message.
    """

    id: str
    url: str
    breaker: Breaker
    key: str | None = field(default=None, repr=False)
    instance: str = ""
    models: tuple[str, ...] = ()
    context_length: int = 0
    healthy: bool = False
    draining: bool = False
    shared: bool = False
    announced: float = 0.0
    failures: int = 0
    inflight: int = 0
    reserved: int = 0

    @classmethod
    def of(cls, settings: WorkerSettings, general_key: SecretStr | None, routing: RoutingSettings) -> Worker:
        """A worker from its settings."""
        key = settings.key or general_key
        parts = urlsplit(settings.url)
        name = f"{parts.hostname}-{parts.port or (443 if parts.scheme == 'https' else 80)}".replace(":", ".")
        breaker = Breaker(routing, time.monotonic)
        return cls(settings.id or name, settings.url, breaker, key.get_secret_value() if key else None)
