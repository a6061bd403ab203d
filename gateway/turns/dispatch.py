"""A turn on its way to a worker: placement, the request itself, one more try before the first byte, abort."""

from __future__ import annotations

import asyncio
import secrets

import numpy as np

from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.routing.placement import place, place_pinned
from agentkv_serve.gateway.routing.worker import Worker
from agentkv_serve.gateway.sessions.ledger import concatenate
from agentkv_serve.gateway.sessions.session import new_incarnation
from agentkv_serve.gateway.sessions.store import LeaseLost
from agentkv_serve.gateway.turns.departure import ClientGone
from agentkv_serve.gateway.turns.plan import Plan
from agentkv_serve.gateway.turns.services import Services
from agentkv_serve.gateway.upstream.bodies import FRAMED, session_body, stateless_body
from agentkv_serve.gateway.upstream.client import Reply, UpstreamError
from agentkv_serve.gateway.upstream.refusals import client_error

_ABORT_AGAIN = 0.5  # seconds


class Dispatch:
    """One turn's dealings with workers. `worker` is the one that has it, `reply` that worker's open reply; `sent` tells
    whether any worker may have seen the turn."""

    def __init__(self, services: Services, plan: Plan, trace_headers: dict[str, str]) -> None:
        self.worker: Worker | None = None
        self.reply: Reply | None = None
        self.sent = False
        self.aborted = False
        self.closed = False
        self.pinned = plan.lease.session.worker if plan.lease else ""
        self._s = services
        self._plan = plan
        self._headers = {**FRAMED, **trace_headers}
        self._rid = ""
        self._reserved = 0
        self._bound: asyncio.Timeout | None = None

    @property
    def moved(self) -> bool:
        """The session's state is on another worker than this turn."""
        return bool(self.worker and self.pinned and self.worker.id != self.pinned)

    async def place(self, tried: tuple[str, ...] = ()) -> None:
        """Choose a worker, unless there is one. Raises 503."""
        if self.worker is not None:
            return
        registry, model = self._s.registry, self._plan.request.model
        hard = (self._plan.controls.affinity or self._s.settings.routing.affinity) == "hard"
        saturated = None if hard else self._s.settings.routing.saturated
        # Most turns stay where their session is: they need not ask what all workers hold.
        worker = place_pinned(registry, model, pinned=self.pinned, tried=tried, saturated=saturated)
        if worker is None:
            resident = await self._s.store.resident([each.id for each in registry])
            worker = place(registry, model, pinned=self.pinned, resident=resident, tried=tried, saturated=saturated)
        worker.breaker.chosen()
        # From the choice to here nothing awaits: a burst of new sessions sees each other's reservations.
        self._reserved = self._estimate(worker)
        worker.inflight += 1
        worker.reserved += self._reserved
        self.worker = worker

    def _estimate(self, worker: Worker) -> int:
        if self._plan.lease is None or worker.id == self.pinned:
            return 0
        tokens = self._plan.prompt_tokens
        return min(tokens, abs(self._plan.budget)) if self._plan.budget else tokens

    async def open(self) -> None:
        """Send the turn and wait for the worker's 200. Raises ApiError, or ClientGone after an abort."""
        for attempt in (1, 2):
            assert self.worker is not None
            worker = self.worker
            if self.aborted:
                raise ClientGone
            try:
                reply = await self._send(worker)
                if reply.status == 200:
                    self.reply = reply
                    return
                body = await reply.read()
            except UpstreamError as error:
                if self.aborted:
                    raise ClientGone from error
                self._s.registry.failed(worker, gone=not error.sent)
                self._s.metrics.upstream_errors.labels(worker.id, "unreachable").inc()
                if error.sent:
                    await self._s.client.abort(worker, self._rid)
                failure = ApiError(502, "worker_unreachable", f"Worker {worker.id} went away before it answered.")
                # A connection that broke may just have been an old one: the same worker may be asked again.
                again = error.sent and worker.healthy
            else:
                self._s.metrics.upstream_errors.labels(worker.id, str(reply.status)).inc()
                failure = client_error(reply.status, body)
                if failure.code == "session_conflict" and attempt == 1 and await self._start_over():
                    continue
                if reply.status >= 500:
                    self._s.registry.failed(worker)
                if reply.status not in (502, 503):
                    raise failure
                again = False
            if attempt == 2 or self.aborted:
                raise failure
            await self._redispatch(worker, failure, again)

    async def _start_over(self) -> bool:
        """The engine has seen later turns than the store knows of. False when another turn really has overtaken this
        one; else the store lost them, and the session begins a new life in the engine."""
        lease = self._plan.lease
        if lease is None:
            return False
        if not await self._count_again():
            return False
        lease.session.incarnation = new_incarnation()
        return True

    async def _count_again(self) -> bool:
        """One more dispatch of the session; False when it is not ours any more."""
        assert self._plan.lease is not None
        try:
            await self._s.store.bump(self._plan.lease)
        except LeaseLost:
            return False
        return True

    async def _redispatch(self, failed: Worker, failure: ApiError, again: bool) -> None:
        """Place the turn anew before its first byte; raises `failure` when no other worker can take it."""
        self._unplace()
        self.worker = None
        try:
            await self.place((failed.id,))
        except ApiError:
            if not again:
                raise failure from None
            await self.place()
        if self._plan.lease and not await self._count_again():
            raise ApiError(
                409,
                "session_conflict",
                "Another turn has gone on with the session meanwhile.",
                headers={"x-should-retry": "false"},
            )

    async def _send(self, worker: Worker) -> Reply:
        self._rid = secrets.token_hex(16)
        self.sent = True
        path = self._plan.request.path
        try:
            async with asyncio.timeout(None) as self._bound:
                return await self._s.client.generate(worker, self._body(), path=path, headers=self._headers)
        except TimeoutError as error:
            raise UpstreamError("the aborted turn did not end in time", sent=True) from error
        finally:
            self._bound = None

    def _body(self) -> bytes:
        plan, request = self._plan, self._plan.request
        salt = self._s.keys.cache_salt(plan.tenant.name)
        if plan.lease is None or plan.prompt is None:
            return stateless_body(
                request.sampling,
                model=request.model,
                prompt=request.payload or {"messages": request.messages},
                stream=request.stream,
                rid=self._rid,
                salt=salt,
            )
        ids, runs = concatenate(plan.match.turns, plan.prompt.ids, plan.prompt.runs)
        control = {
            "v": 1,
            "session": self._s.engine_key(plan.lease),
            "epoch": plan.lease.epoch,
            **({"budget": "auto", "cap": -plan.budget} if plan.budget < 0 else {"budget": plan.budget}),
            "policy": plan.policy,
            "runs": runs,
            "decode": {"family": plan.prompt.family, "initial": plan.prompt.initial},
            "rebuild": plan.controls.rebuild,
        }
        return session_body(
            request.sampling,
            model=request.model,
            ids=np.frombuffer(ids, np.int32),
            stream=request.stream,
            rid=self._rid,
            salt=salt,
            control=control,
        )

    async def abort(self) -> None:
        """Tell the worker to stop the turn, again and again until `close`; after a bound the connection is cut."""
        self.aborted = True
        asyncio.get_running_loop().call_later(self._s.settings.upstream.abort, self._cut)
        while not self.closed:
            # Said again: the first may overtake the request that it is meant for.
            if self.worker and self._rid:
                delivered = await self._s.client.abort(self.worker, self._rid)
                self._s.metrics.aborts.labels(str(delivered).lower()).inc()
            await asyncio.sleep(_ABORT_AGAIN)

    def _cut(self) -> None:
        """The worker did not end an aborted turn in time: drop the connection."""
        if self._bound:
            self._bound.reschedule(asyncio.get_running_loop().time())
        if self.reply and not self.closed:
            self.reply.close()

    def failed(self, kind: str) -> None:
        """The worker failed after it had taken the turn."""
        assert self.worker is not None
        self._s.registry.failed(self.worker)
        self._s.metrics.upstream_errors.labels(self.worker.id, kind).inc()

    def close(self, *, well: bool) -> None:
        """The turn has ended, `well` or in a way that says nothing of the worker; `worker` stays to be told of."""
        self.closed = True
        if self.worker:
            (self.worker.breaker.succeeded if well else self.worker.breaker.let_go)()
        self._unplace()
        if self.reply:
            self.reply.close()

    def _unplace(self) -> None:
        if self.worker:
            self.worker.inflight -= 1
            self.worker.reserved -= self._reserved
            self._reserved = 0
