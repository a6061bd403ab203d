"""One running turn: dispatched to a worker, relayed to the client, settled in the session."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson

from agentkv_serve.gateway.encoding import digest
from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.metrics import Metrics
from agentkv_serve.gateway.routing.placement import place
from agentkv_serve.gateway.routing.registry import Registry
from agentkv_serve.gateway.routing.worker import Worker
from agentkv_serve.gateway.sessions.identity import Keys
from agentkv_serve.gateway.sessions.ledger import Turn as LedgerTurn
from agentkv_serve.gateway.sessions.ledger import concatenate, extend_runs, reasoning_digest
from agentkv_serve.gateway.sessions.meaning import message_digest
from agentkv_serve.gateway.sessions.rendering import Renderer
from agentkv_serve.gateway.sessions.session import new_incarnation
from agentkv_serve.gateway.sessions.store import Lease, LeaseLost, SessionStore
from agentkv_serve.gateway.settings import Settings
from agentkv_serve.gateway.telemetry import TurnTrace
from agentkv_serve.gateway.turns.controls import say_budget
from agentkv_serve.gateway.turns.departure import ClientGone
from agentkv_serve.gateway.turns.plan import Kind, Plan, unique_calls
from agentkv_serve.gateway.turns.usage import usage_of
from agentkv_serve.gateway.upstream.bodies import FRAMED, session_body, stateless_body
from agentkv_serve.gateway.upstream.client import EngineClient, Reply, UpstreamError
from agentkv_serve.gateway.upstream.facts import Facts
from agentkv_serve.gateway.upstream.frames import Assembly, FrameCutter, kind_of, payload_of
from agentkv_serve.gateway.upstream.frames import Kind as Frame
from agentkv_serve.gateway.upstream.refusals import client_error

log = logging.getLogger(__name__)

_ABORT_AGAIN = 0.5
_COMMITTED = ("stop", "tool_calls", "length")


class Services:
    """What turns work with; one per gateway process."""

    def __init__(
        self,
        settings: Settings,
        store: SessionStore,
        registry: Registry,
        client: EngineClient,
        renderer: Renderer,
        keys: Keys,
        metrics: Metrics,
    ) -> None:
        self.settings = settings
        self.store = store
        self.registry = registry
        self.client = client
        self.renderer = renderer
        self.keys = keys
        self.metrics = metrics
        self.running: dict[str, Turn] = {}


class Turn:
    """Runs a plan. Call `open`, then either `contents` or `whole`; both settle the session at their end.

    After a failed `open` the session is settled already. `abort` may be called at any time: the worker is told to
    stop, and the running call goes on until the worker's end so that the session is not used by two turns at once.
    """

    def __init__(self, services: Services, plan: Plan, trace: TurnTrace, request_id: str) -> None:
        self.plan = plan
        self.aborted = False
        self.facts = Facts()
        self.usage: dict[str, Any] = {}
        self.failure: ApiError | None = None
        self._s = services
        self._trace = trace
        self._request_id = request_id
        self._rid = ""
        self._worker: Worker | None = None
        self._moved_from = plan.lease.session.worker if plan.lease else ""
        self._old_instance = plan.lease.session.instance if plan.lease else ""
        self._reserved = 0
        self._reply: Reply | None = None
        self._dispatching: asyncio.Task[Reply] | None = None
        self._finishing = False
        self._settled = False
        self._dispatched = False
        self._started = time.monotonic()
        self._first = self._last = 0.0
        if plan.lease:
            services.running[plan.lease.session.key] = self

    # ---- dispatch -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Dispatch the turn and wait for the worker's status. Raises ApiError, with the session settled."""
        try:
            await self._place()
            await self._open()
        except BaseException:
            await self._settle(None)
            raise

    async def place(self) -> None:
        """Choose the worker ahead of `open`, so that the reply's headers can name it."""
        try:
            await self._place()
        except BaseException:
            await self._settle(None)
            raise

    async def _place(self, tried: tuple[str, ...] = ()) -> None:
        if self._worker is not None:
            return
        resident = await self._s.store.resident([worker.id for worker in self._s.registry])
        hard = (self.plan.controls.affinity or self._s.settings.routing.affinity) == "hard"
        worker = place(
            self._s.registry,
            self.plan.request.model,
            pinned=self._moved_from,
            resident=resident,
            tried=tried,
            saturated=None if hard else self._s.settings.routing.saturated,
        )
        worker.breaker.chosen()
        # From the choice to here nothing awaits: a burst of new sessions sees each other's reservations.
        self._reserved = self._estimate(worker)
        worker.inflight += 1
        worker.reserved += self._reserved
        self._worker = worker

    def _estimate(self, worker: Worker) -> int:
        if self.plan.lease is None or worker.id == self._moved_from:
            return 0
        tokens = self.plan.prompt_tokens
        return min(tokens, self.plan.budget) if self.plan.budget else tokens

    async def _open(self) -> None:
        for attempt in (1, 2):
            assert self._worker is not None
            worker = self._worker
            if self.aborted:
                raise self.failure or ClientGone
            try:
                reply = await self._send(worker)
                if reply.status == 200:
                    self._reply = reply
                    return
                body = await reply.read()
            except UpstreamError as error:
                if self.aborted:
                    raise self.failure or ClientGone from error
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
        lease = self.plan.lease
        if lease is None:
            return False
        try:
            await self._s.store.bump(lease)
        except LeaseLost:
            return False
        lease.session.incarnation = new_incarnation()
        return True

    async def _redispatch(self, failed: Worker, failure: ApiError, again: bool) -> None:
        """Place the turn anew before its first byte; raises `failure` when no other worker can take it."""
        self._unplace()
        self._worker = None
        try:
            await self._place((failed.id,))
        except ApiError:
            if not again:
                raise failure from None
            await self._place()
        if self.plan.lease:
            await self._s.store.bump(self.plan.lease)

    async def _send(self, worker: Worker) -> Reply:
        self._rid = secrets.token_hex(16)
        self._dispatched = True
        task = asyncio.create_task(
            self._s.client.generate(
                worker, self._body(), path=self.plan.request.path, headers={**FRAMED, **self._trace.headers}
            )
        )
        self._dispatching = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise UpstreamError("the aborted turn did not end in time", sent=True) from None
            task.cancel()
            raise
        finally:
            self._dispatching = None

    def _body(self) -> bytes:
        plan, request = self.plan, self.plan.request
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
            "session": self._engine_key(plan.lease),
            "epoch": plan.lease.epoch,
            "budget": plan.budget,
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

    def _engine_key(self, lease: Lease) -> str:
        return self._s.keys.engine(lease.session.key, lease.session.incarnation)

    # ---- what the client is told --------------------------------------------------------------------------

    def headers(self) -> dict[str, str]:
        """Headers of the reply, as expected at dispatch (final once the turn has ended)."""
        plan = self.plan
        headers = {"x-agentkv-session-state": self.state, "x-agentkv-session-source": plan.source}
        if plan.session_id:
            headers["x-agentkv-session"] = plan.session_id
        if self._worker:
            headers["x-agentkv-worker"] = self._worker.id
        if plan.lease:
            headers["x-agentkv-budget"] = say_budget(plan.budget)
        elif plan.why_stateless:
            headers["x-agentkv-stateless-reason"] = plan.why_stateless
        return headers

    @property
    def state(self) -> str:
        """new, resumed, rebuilt, moved or stateless: the engine's word once it is known, else what is expected."""
        plan = self.plan
        if plan.lease is None:
            return "stateless"
        if self.facts.state:
            moved = self.facts.state == "rebuilt" and self._has_moved and plan.kind is Kind.APPEND
            return "moved" if moved else self.facts.state
        if plan.kind is Kind.NEW and plan.lease.epoch == 0:
            return "new"
        if plan.kind is Kind.APPEND and not plan.controls.rebuild:
            if self._has_moved:
                return "moved"
            worker = self._worker
            return "resumed" if worker and worker.instance == self._old_instance else "rebuilt"
        return "rebuilt" if self._moved_from else "new"

    @property
    def reason(self) -> str | None:
        """Why the state is not `resumed`."""
        if self.plan.kind is Kind.REPLACED:
            return "history_rewritten"
        if self.state == "moved":
            return "worker_changed"
        return self.facts.reason

    @property
    def _has_moved(self) -> bool:
        return bool(self._worker and self._moved_from and self._worker.id != self._moved_from)

    # ---- relay --------------------------------------------------------------------------------------------

    async def contents(self) -> AsyncIterator[list[bytes]]:
        """The content frames of the stream, as they arrive: the engine's bytes. At the end the session is settled;
        `failure` then says what went wrong, or is None, and `usage` is the usage frame, if there was one.
        """
        try:
            async for ready in self._contents():
                yield ready
        finally:
            # Also when the stream is broken off from this side, as at the end of the process.
            await self._settle(None)

    async def _contents(self) -> AsyncIterator[list[bytes]]:
        assert self._reply is not None and self._worker is not None
        cutter, content = FrameCutter(), list[bytes]()
        expected, done = self.state, False
        try:
            async for piece in self._reply.pieces():
                ready = []
                for frame in cutter.feed(piece):
                    kind = kind_of(frame)
                    if kind is Frame.CONTENT:
                        if not content:
                            self._first_token()
                        if b'"finish_reason":null' not in frame:
                            self._finishing = True
                        content.append(frame)
                        ready.append(frame)
                    elif kind is Frame.SGLEXT:
                        self.facts.read(orjson.loads(payload_of(frame))["sglext"])
                    elif kind is Frame.USAGE:
                        self.usage = orjson.loads(payload_of(frame))
                    elif kind is Frame.DONE:
                        done = True
                    elif kind is Frame.ERROR:
                        self.failure = client_error(0, payload_of(frame))
                        if self.failure.status >= 500:
                            self._s.registry.failed(self._worker)
                    else:
                        ready.append(frame)
                if ready:
                    self._last = time.monotonic()
                    yield ready
        except UpstreamError as error:
            log.warning("worker %s broke off a stream: %s", self._worker.id, error)
        if not done and self.failure is None and not self.aborted:
            self.failure = self._lost("broken_stream")
        await self._settle(Assembly.of_frames(content) if done and self.failure is None else None)
        if self.facts.state and self.state != expected:
            self._s.metrics.mismatches.labels(expected, self.state).inc()
        if self.usage:
            self.usage["usage"] = usage_of(self.usage["usage"], self)

    def _first_token(self) -> None:
        self._first = self._last = time.monotonic()
        self._s.metrics.ttft.observe(self._first - self._started)
        self._trace.first_token()

    async def whole(self) -> dict[str, Any]:
        """The reply that is not streamed. Raises ApiError; the session is settled either way."""
        assert self._reply is not None and self._worker is not None
        assembly: Assembly | None = None
        try:
            reply = orjson.loads(await self._reply.read())
            self.facts.read(reply.pop("sglext", None) or {})
            assembly = Assembly.of_choice(reply["choices"][0])
        except (UpstreamError, orjson.JSONDecodeError) as error:
            if self.aborted:
                raise self.failure or ClientGone from error
            raise self._lost("broken_reply") from error
        finally:
            await self._settle(assembly)
        if self.failure is not None:
            raise self.failure
        reply["usage"] = usage_of(reply.get("usage") or {}, self)
        return dict(reply)

    def _lost(self, kind: str) -> ApiError:
        assert self._worker is not None
        self._s.registry.failed(self._worker)
        self._s.metrics.upstream_errors.labels(self._worker.id, kind).inc()
        return ApiError(502, "worker_lost", "The worker went away in the middle of the reply; send the turn again.")

    # ---- end ----------------------------------------------------------------------------------------------

    async def abort(self, failure: ApiError | None = None) -> None:
        """Stop the turn upstream, unless it has reached its end already. Returns when the turn has settled.
        `failure` is what the client is told, if it is still there."""
        if self.aborted or self._settled or self._finishing:
            return
        self.aborted, self.failure = True, failure
        asyncio.get_running_loop().call_later(self._s.settings.upstream.abort, self._cut)
        while not self._settled:
            # Said again until the end: the first may overtake the request that it is meant for.
            if self._worker and self._rid:
                delivered = await self._s.client.abort(self._worker, self._rid)
                self._s.metrics.aborts.labels(str(delivered).lower()).inc()
            await asyncio.sleep(_ABORT_AGAIN)

    def _cut(self) -> None:
        """The worker did not end an aborted turn in time: drop the connection."""
        if self._dispatching:
            self._dispatching.cancel()
        if self._reply and not self._settled:
            self._reply.close()

    def _unplace(self) -> None:
        if self._worker:
            self._worker.inflight -= 1
            self._worker.reserved -= self._reserved
            self._reserved = 0

    async def _settle(self, assembly: Assembly | None) -> None:
        """End the turn once: commit it to the session, or leave the session as it was."""
        if self._settled:
            return
        self._settled = True
        worker = self._worker
        if worker and assembly is not None:
            worker.breaker.succeeded()
        elif worker:
            worker.breaker.let_go()
        if self.plan.lease and self._s.running.get(self.plan.lease.session.key) is self:
            del self._s.running[self.plan.lease.session.key]
        try:
            if self.plan.lease:
                await self._settle_session(self.plan, worker, assembly)
        finally:
            self._unplace()
            if self._reply:
                self._reply.close()
            self._tell(assembly)

    def _tell(self, assembly: Assembly | None) -> None:
        """Log and trace the end of the turn; nothing of its content."""
        plan, facts, worker = self.plan, self.facts, self._worker
        generated = len(facts.output_ids or ())
        if generated > 1 and self._first:
            self._s.metrics.itl.observe((self._last - self._first) / (generated - 1))
        outcome = assembly.finish if assembly else "aborted" if self.aborted else "failed"
        facts_told = {
            "tenant": plan.tenant.name,
            "session": plan.lease.session.key[:16] if plan.lease else None,
            "state": self.state,
            "reason": self.reason or plan.why_stateless or None,
            "worker": worker.id if worker else None,
            "prompt_tokens": plan.prompt_tokens or None,
            "prefill_tokens": facts.prefill,
            "output_tokens": generated,
            "kv_tokens": facts.held,
        }
        error = self.failure.code if self.failure else None if assembly else outcome
        log.info(
            "turn %s",
            outcome,
            extra={
                **facts_told,
                "request_id": self._request_id,
                "model": plan.request.model,
                "seconds": round(time.monotonic() - self._started, 4),
                "error": error,
            },
        )
        attributes: dict[str, Any] = {f"agentkv.{name}": value for name, value in facts_told.items()}
        attributes |= {
            "gen_ai.usage.input_tokens": plan.prompt_tokens or None,
            "gen_ai.usage.output_tokens": generated,
            "gen_ai.response.finish_reasons": [outcome] if assembly else None,
        }
        self._trace.end(attributes, error)

    async def _settle_session(self, plan: Plan, worker: Worker | None, assembly: Assembly | None) -> None:
        lease = plan.lease
        assert lease is not None
        entry = self._entry(assembly) if assembly else None
        if entry is None or worker is None:
            if self._dispatched:
                why = "aborted" if self.aborted else "failed" if assembly is None else assembly.finish or "unknown"
                self._s.metrics.uncommitted.labels(why).inc()
            await self._s.store.release(lease, dispatched=self._dispatched)
            return
        session = lease.session
        session.ledger.add(entry, self._s.settings.sessions.max_branch_tokens)
        session.worker, session.instance = worker.id, worker.instance
        session.kv_tokens = self.facts.held
        session.turns += 1
        session.spent += plan.prompt_tokens + len(self.facts.output_ids or ())
        try:
            await self._s.store.commit(lease)
        except LeaseLost:
            log.warning("a turn ended after its session had gone on without it; it is not recorded")
            self._s.metrics.uncommitted.labels("lease_lost").inc()
            return
        self._s.metrics.turns.labels(self.state, self.reason or "").inc()
        self._s.metrics.budgets.observe(plan.budget or float("inf"))
        self._s.metrics.held.observe(self.facts.held)
        self._s.metrics.tokens.labels("prompt").inc(plan.prompt_tokens)
        self._s.metrics.tokens.labels("prefilled").inc(self.facts.prefill)
        self._s.metrics.tokens.labels("generated").inc(len(self.facts.output_ids or ()))
        if plan.controls.final:
            await self._s.store.delete(session.key)
            await self._s.client.close_session(worker, self._engine_key(lease))

    def _entry(self, assembly: Assembly) -> LedgerTurn | None:
        """The ledger's record of this turn; None when it may not be recorded."""
        plan, output = self.plan, self.facts.output_ids
        if assembly.finish not in _COMMITTED or not output or plan.prompt is None:
            return None
        message = assembly.message()
        labelled = self._s.renderer.label_output(plan.prompt, output)
        ids, runs = concatenate((), plan.prompt.ids, plan.prompt.runs)
        extend_runs(runs, labelled.runs, len(ids))
        ids.extend(output)
        return LedgerTurn(
            link=digest(plan.links[-1], message_digest(message)),
            parent=plan.match.link,
            ids=ids,
            runs=array("i", runs),
            open_block=labelled.open_block,
            reasoning=reasoning_digest(message),
            call_ids=tuple(unique_calls(message)),
        )
