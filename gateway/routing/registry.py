"""The workers of one gateway process, kept up to date by health checks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping

from agentkv_serve.gateway.routing.worker import Worker
from agentkv_serve.gateway.upstream.client import EngineClient, UpstreamError

log = logging.getLogger(__name__)

DOWN_AFTER = 3  # failed checks in a row: a long prefill may delay one


class Registry:
    """Workers by id."""

    def __init__(self, workers: Iterable[Worker], client: EngineClient) -> None:
        self._client = client
        self._workers: dict[str, Worker] = {}
        self._models: dict[str, int] | None = None  # as last counted; None: something has changed since
        for worker in workers:
            self.add(worker)

    def __iter__(self) -> Iterator[Worker]:
        # Of a copy: who awaits between two workers must not stumble over one that comes or goes meanwhile.
        return iter(list(self._workers.values()))

    def get(self, worker_id: str) -> Worker | None:
        """The worker of that id."""
        return self._workers.get(worker_id)

    def add(self, worker: Worker) -> None:
        """Register a worker; raises ValueError when its id is taken."""
        if worker.id in self._workers:
            raise ValueError(f"two workers have the id {worker.id!r}: give each its own")
        self._workers[worker.id] = worker
        self._models = None

    def remove(self, worker_id: str) -> Worker | None:
        """Forget a worker; its sessions are rebuilt elsewhere."""
        self._models = None
        return self._workers.pop(worker_id, None)

    def models(self) -> Mapping[str, int]:
        """Served models with the context length (the smallest among their workers; 0 when unknown)."""
        if self._models is None:
            self._models = {}
            for worker in self:
                for model in worker.models:
                    known = self._models.get(model)
                    self._models[model] = worker.context_length if known is None else min(known, worker.context_length)
        return self._models

    def adopt(self, shared: Mapping[str, Worker]) -> None:
        """Bring the workers that admin APIs added up to date with what all gateway processes share."""
        for worker in list(self):
            if worker.shared and worker.id not in shared:
                self.remove(worker.id)
        for worker in shared.values():
            known = self._workers.get(worker.id)
            if known is None:
                self.add(worker)
            elif known.shared:
                known.draining = worker.draining
                known.announced = max(known.announced, worker.announced)

    async def check(self) -> None:
        """Check every worker once."""
        await asyncio.gather(*(self.check_one(worker) for worker in list(self)))

    async def check_one(self, worker: Worker) -> None:
        """Check one worker."""
        if not await self._client.healthy(worker):
            self._unwell(worker)
            return
        try:
            info = await self._client.server_info(worker)
            models = await self._client.models(worker)
            instance = str(info.get("startup_time") or info.get("instance_id") or "unknown")
            names = tuple(str(model["id"]) for model in models)
            context_length = min((int(model.get("max_model_len") or 0) for model in models), default=0)
        except (UpstreamError, LookupError, TypeError, ValueError, AttributeError) as error:
            # Whatever answers at that address, it may not end the check of the others.
            log.warning("worker %s is healthy but does not describe itself as SGLang does: %r", worker.id, error)
            self._unwell(worker)
            return
        if worker.instance and worker.instance != instance:
            log.warning("worker %s was restarted: its sessions will be rebuilt", worker.id)
        if not worker.healthy:
            log.info("worker %s is up", worker.id)
        worker.instance = instance
        if (worker.models, worker.context_length) != (names, context_length):
            worker.models, worker.context_length = names, context_length
            self._models = None
        worker.healthy, worker.failures = True, 0

    def _unwell(self, worker: Worker) -> None:
        worker.failures += 1
        if worker.failures >= DOWN_AFTER:
            self._down(worker)

    def failed(self, worker: Worker, *, gone: bool = False) -> None:
        """A turn failed by the worker's fault; `gone` (a refused connection) takes the worker out at once, until a
        health check finds it."""
        worker.breaker.failed()
        if gone:
            self._down(worker)

    def _down(self, worker: Worker) -> None:
        if worker.healthy:
            worker.healthy = False
            log.warning("worker %s is down", worker.id)
