"""The one runtime object of a gateway process: everything with a life of its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import cast

from starlette.requests import Request

from agentkv_serve.gateway.auth import Authenticator
from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.metrics import Metrics
from agentkv_serve.gateway.routing.registry import Registry
from agentkv_serve.gateway.routing.worker import Worker
from agentkv_serve.gateway.sessions.identity import Keys
from agentkv_serve.gateway.sessions.opening import open_store
from agentkv_serve.gateway.sessions.rendering import Renderer
from agentkv_serve.gateway.sessions.session import Session
from agentkv_serve.gateway.sessions.store import SessionStore
from agentkv_serve.gateway.settings import Settings
from agentkv_serve.gateway.turns.plan import Planner
from agentkv_serve.gateway.turns.turn import Services
from agentkv_serve.gateway.upstream.client import EngineClient

_SWEEP_SECONDS = 30.0


class Runtime:
    """Built in the app's lifespan, reachable as `app.state.runtime`. Use as an async context manager."""

    def __init__(self, settings: Settings, renderer: Renderer) -> None:
        self.settings = settings
        self.stopping = False
        self.auth = Authenticator(settings)
        self.metrics = Metrics()
        self.client = EngineClient(settings.upstream)
        self.registry = Registry((Worker.of(worker, settings.worker_key) for worker in settings.workers), self.client)
        self.store: SessionStore = open_store(settings, self._store_changed)
        secret = settings.secret.get_secret_value().encode() if settings.secret else secrets.token_bytes(32)
        before = settings.previous_secret
        self.keys = Keys(secret, before.get_secret_value().encode() if before else None)
        self.planner = Planner(settings, self.store, self.registry, renderer, self.keys, time.time)
        self.services = Services(settings, self.store, self.registry, self.client, renderer, self.keys, self.metrics)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Runtime:
        await self.store.open()
        await self.registry.check()
        self._tasks = [
            asyncio.create_task(self.registry.watch(self.settings.health_interval)),
            asyncio.create_task(self._sweep()),
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()
        await self.client.close()

    def _store_changed(self, down: bool) -> None:
        self.metrics.store_down.set(int(down))

    async def end_session(self, session: Session) -> None:
        """Forget a session, stop its running turn, and release its state in the engine."""
        await self.store.delete(session.key)
        turn = self.services.running.get(session.key)
        if turn:
            await turn.abort(ApiError(409, "session_ended", "The session was ended while this turn ran."))
        await self._close(session)

    async def _close(self, session: Session) -> None:
        worker = self.registry.get(session.worker)
        if worker:
            key = self.keys.engine(session.key, session.incarnation)
            await self.client.close_session(worker, key)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for session in await self.store.sweep():
                await self._close(session)


def runtime_of(request: Request) -> Runtime:
    """The runtime of the app that serves `request`."""
    return cast(Runtime, request.app.state.runtime)
