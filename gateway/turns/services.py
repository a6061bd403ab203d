"""What turns work with; one of each per gateway process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.metrics import Metrics
from agentkv_serve.gateway.routing.registry import Registry
from agentkv_serve.gateway.sessions.identity import Keys
from agentkv_serve.gateway.sessions.rendering import Renderer
from agentkv_serve.gateway.sessions.store import Lease, SessionStore
from agentkv_serve.gateway.settings import Settings
from agentkv_serve.gateway.upstream.client import EngineClient


class Running(Protocol):
    """A turn that can be stopped."""

    async def abort(self, failure: ApiError | None = None) -> None:
        """Stop it; `failure` is what its client is told."""


@dataclass(slots=True)
class Services:
    """`running` holds the turns of sessions by the sessions' keys."""

    settings: Settings
    store: SessionStore
    registry: Registry
    client: EngineClient
    renderer: Renderer
    keys: Keys
    metrics: Metrics
    running: dict[str, Running] = field(default_factory=dict)

    def engine_key(self, lease: Lease) -> str:
        """The engine's key of a leased session."""
        return self.keys.engine(lease.session.key, lease.session.incarnation)
