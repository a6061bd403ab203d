"""The one runtime object of a gateway process: everything with a life of its own."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import cast

import orjson
from starlette.requests import Request

from agentkv_serve.gateway.auth import Authenticator
from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.metrics import Metrics, MetricsPort
from agentkv_serve.gateway.routing.registry import Registry
from agentkv_serve.gateway.routing.worker import Worker
from agentkv_serve.gateway.sessions.identity import Keys
from agentkv_serve.gateway.sessions.opening import open_store
from agentkv_serve.gateway.sessions.rendering import Renderer
from agentkv_serve.gateway.sessions.session import Session
from agentkv_serve.gateway.sessions.store import SessionStore
from agentkv_serve.gateway.settings import Settings, WorkerSettings
from agentkv_serve.gateway.telemetry import Tracing
from agentkv_serve.gateway.turns.planner import Planner
from agentkv_serve.gateway.turns.services import Services
from agentkv_serve.gateway.upstream.client import EngineClient
from agentkv_serve.joining import FORGET_AFTER

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 30.0


class Runtime:
    """Built in the app's lifespan, reachable as `app.state.runtime`. Use as an async context manager."""

    def __init__(self, settings: Settings, renderer: Renderer) -> None:
        self.settings = settings
        self.stopping = False
        self._added: dict[str, WorkerSettings] = {}
        self.auth = Authenticator(settings)
        self.metrics = Metrics()
        self.client = EngineClient(settings.upstream)
        self.registry = Registry((self.worker_of(worker) for worker in settings.workers), self.client)
        self.store: SessionStore = open_store(settings, self._store_changed, self._store_called)
        secret = settings.secret.get_secret_value().encode() if settings.secret else secrets.token_bytes(32)
        before = settings.previous_secret
        self.keys = Keys(secret, before.get_secret_value().encode() if before else None)
        self.planner = Planner(settings, self.store, self.registry, renderer, self.keys, time.time)
        self.services = Services(settings, self.store, self.registry, self.client, renderer, self.keys, self.metrics)
        self.tracing = Tracing(settings.telemetry)
        self.metrics_port: MetricsPort | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Runtime:
        await self.store.open()
        await self._check_workers()
        self._tasks = [
            asyncio.create_task(self._watch_workers()),
            asyncio.create_task(self._sweep()),
        ]
        where = self.settings.metrics
        if where.port is not None:
            self.metrics_port = MetricsPort(self.metrics, self.sample, where.host or self.settings.host, where.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.stopping = True
        if self.metrics_port:
            await asyncio.to_thread(self.metrics_port.close)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()
        await self.client.close()
        await asyncio.to_thread(self.tracing.close)

    def worker_of(self, worker: WorkerSettings) -> Worker:
        """A worker of this gateway."""
        return Worker.of(worker, self.settings.worker_key, self.settings.routing)

    def add_worker(self, settings: WorkerSettings) -> Worker:
        """One more worker, of which `share_worker` is still to tell. Raises ApiError 409 when its id is taken."""
        worker = self.worker_of(settings)
        worker.shared = True
        try:
            self.registry.add(worker)
        except ValueError as error:
            raise ApiError(409, "worker_exists", str(error)) from None
        return worker

    async def share_worker(self, worker: Worker, settings: WorkerSettings | None = None) -> None:
        """Tell all gateway processes of a worker that was added here, or whose draining changed here."""
        if settings is not None:
            self._added[worker.id] = settings
        if not worker.shared or worker.id not in self._added:
            return
        added = self._added[worker.id]
        key = added.key.get_secret_value() if added.key else None
        entry = {"url": worker.url, "key": key, "draining": worker.draining, "announced": worker.announced}
        await self.store.set_worker(worker.id, dumps(entry))

    async def remove_worker(self, worker: Worker) -> None:
        """Forget a worker, in all gateway processes if it is a shared one."""
        if worker.shared:
            await self.store.set_worker(worker.id, None)
        self.registry.remove(worker.id)

    async def _check_workers(self) -> None:
        shared = await self.store.workers()
        if shared is not None:
            workers: dict[str, Worker] = {}
            for name, entry in shared.items():
                value = orjson.loads(entry)
                self._added[name] = WorkerSettings(url=value["url"], id=name, key=value["key"])
                workers[name] = worker = self.worker_of(self._added[name])
                worker.shared, worker.draining = True, value["draining"]
                worker.announced = value.get("announced", 0.0)
            self.registry.adopt(workers)
        await self.registry.check()
        await self._forget_the_silent()

    async def _forget_the_silent(self) -> None:
        """Workers that registered themselves, are not healthy and were not heard of for long are gone."""
        horizon = time.time() - FORGET_AFTER
        for worker in [w for w in self.registry if w.announced and w.announced < horizon and not w.healthy]:
            log.warning("worker %s is forgotten: it is down and does not register any more", worker.id)
            await self.remove_worker(worker)

    async def _watch_workers(self) -> None:
        interval = self.settings.routing.health_interval
        while True:
            # More often while one has never been seen healthy.
            starting = any(not worker.instance for worker in self.registry)
            await asyncio.sleep(min(interval, 1.0) if starting else interval)
            try:
                await self._check_workers()
            except Exception:  # one failed round must not end the watch over all workers
                log.exception("checking the workers failed")

    def _store_called(self, seconds: float, well: bool) -> None:
        self.metrics.of(self.metrics.store_seconds, "ok" if well else "failed").observe(seconds)

    def _store_changed(self, down: bool) -> None:
        self.metrics.store_down.set(int(down))

    async def sample(self) -> None:
        """Bring the gauges up to date, for a scrape."""
        sample = self.metrics
        resident = await self.store.resident([worker.id for worker in self.registry])
        sample.sessions.set(await self.store.count())
        # Set anew at each scrape, so that a removed worker leaves no stale series.
        sample.workers.clear()
        sample.resident.clear()
        for worker in self.registry:
            sample.workers.labels(worker.id).set(int(worker.healthy))
            sample.resident.labels(worker.id).set(resident.get(worker.id, 0))

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
