"""One running turn: dispatched to a worker, relayed to the client, settled in the session."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson

from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.sessions.store import LeaseLost
from agentkv_serve.gateway.telemetry import TurnTrace
from agentkv_serve.gateway.turns.controls import say_budget
from agentkv_serve.gateway.turns.departure import ClientGone
from agentkv_serve.gateway.turns.dispatch import Dispatch
from agentkv_serve.gateway.turns.plan import Kind, Plan
from agentkv_serve.gateway.turns.record import count, ledger_entry, tell
from agentkv_serve.gateway.turns.services import Services
from agentkv_serve.gateway.turns.usage import usage_of
from agentkv_serve.gateway.upstream.client import UpstreamError
from agentkv_serve.gateway.upstream.facts import Facts
from agentkv_serve.gateway.upstream.frames import Assembly, FrameCutter, kind_of, payload_of
from agentkv_serve.gateway.upstream.frames import Kind as Frame
from agentkv_serve.gateway.upstream.refusals import client_error

log = logging.getLogger(__name__)


class Turn:
    """Runs a plan. Call `open`, then either `contents` or `whole`; both settle the session at their end.

    After a failed `open` the session is settled already. `abort` may be called at any time: the worker is told to
    stop, and the running call goes on until the worker's end so that the session is not used by two turns at once.
    """

    def __init__(self, services: Services, plan: Plan, trace: TurnTrace, request_id: str) -> None:
        self.plan = plan
        self.facts = Facts()
        self.usage: dict[str, Any] = {}
        self.failure: ApiError | None = None
        self._s = services
        self._trace = trace
        self._request_id = request_id
        self._way = Dispatch(services, plan, trace.headers)
        self._old_instance = plan.lease.session.instance if plan.lease else ""
        self._finishing = False
        self._settled = False
        self._started = time.monotonic()
        self._first = self._last = 0.0
        if plan.lease:
            services.running[plan.lease.session.key] = self

    async def place(self) -> None:
        """Choose the worker ahead of `open`, so that the reply's headers can name it."""
        try:
            await self._way.place()
        except BaseException:
            await self._settle(None)
            raise

    async def open(self) -> None:
        """Dispatch the turn and wait for the worker's status. Raises ApiError, with the session settled."""
        try:
            await self._way.place()
            await self._way.open()
        except ClientGone:
            await self._settle(None)
            raise self.failure or ClientGone from None
        except BaseException:
            await self._settle(None)
            raise

    @property
    def aborted(self) -> bool:
        """Whether the turn was stopped from this side."""
        return self._way.aborted

    # ---- what the client is told --------------------------------------------------------------------------

    def headers(self) -> dict[str, str]:
        """Headers of the reply, as expected at dispatch (final once the turn has ended)."""
        plan = self.plan
        headers = {"x-agentkv-session-state": self.state, "x-agentkv-session-source": plan.source}
        if plan.session_id:
            headers["x-agentkv-session"] = plan.session_id
        if self._way.worker:
            headers["x-agentkv-worker"] = self._way.worker.id
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
            moved = self.facts.state == "rebuilt" and self._way.moved and plan.kind is Kind.APPEND
            return "moved" if moved else self.facts.state
        if plan.kind is Kind.NEW and plan.lease.epoch == 0:
            return "new"
        if plan.kind is Kind.APPEND and not plan.controls.rebuild:
            if self._way.moved:
                return "moved"
            worker = self._way.worker
            return "resumed" if worker and worker.instance == self._old_instance else "rebuilt"
        return "rebuilt" if self._way.pinned else "new"

    @property
    def reason(self) -> str | None:
        """Why the state is not `resumed`."""
        if self.plan.kind is Kind.REPLACED and self.state != "resumed":
            return "history_rewritten"
        if self.state == "moved":
            return "worker_changed"
        return self.facts.reason

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
        assert self._way.reply is not None
        cutter, content = FrameCutter(), list[bytes]()
        expected, done = self.state, False
        try:
            async for piece in self._way.reply.pieces():
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
                            self._way.failed("error_frame")
                    else:
                        ready.append(frame)
                if ready:
                    self._last = time.monotonic()
                    yield ready
        except UpstreamError as error:
            log.warning("a worker broke off a stream: %s", error)
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
        assert self._way.reply is not None
        assembly: Assembly | None = None
        try:
            reply = orjson.loads(await self._way.reply.read())
            self.facts.read(reply.pop("sglext", None) or {})
            assembly = Assembly.of_choice(reply["choices"][0])
        except (UpstreamError, LookupError, TypeError, ValueError, AttributeError) as error:
            # Cut off, or no reply of our engines at all: the worker's fault either way.
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
        self._way.failed(kind)
        return ApiError(502, "worker_lost", "The worker went away in the middle of the reply; send the turn again.")

    # ---- end ----------------------------------------------------------------------------------------------

    async def abort(self, failure: ApiError | None = None) -> None:
        """Stop the turn upstream, unless it has reached its end already. Returns when the turn has settled.
        `failure` is what the client is told, if it is still there."""
        if not (self.aborted or self._settled or self._finishing):
            self.failure = failure
            await self._way.abort()

    async def _settle(self, assembly: Assembly | None) -> None:
        """End the turn once: commit it to the session, or leave the session as it was."""
        if self._settled:
            return
        self._settled = True
        lease = self.plan.lease
        if lease and self._s.running.get(lease.session.key) is self:
            del self._s.running[lease.session.key]
        try:
            if lease:
                await self._settle_session(assembly)
        finally:
            self._way.close(well=assembly is not None)
            self._tell(assembly)

    async def _settle_session(self, assembly: Assembly | None) -> None:
        plan, worker, lease, metrics = self.plan, self._way.worker, self.plan.lease, self._s.metrics
        assert lease is not None
        try:
            entry = ledger_entry(self._s.renderer, plan, self.facts, assembly) if assembly else None
        except Exception:  # whatever it was, a lease that nobody frees would lock the session for good
            await self._s.store.release(lease, dispatched=True)
            raise
        if entry is None or worker is None:
            if self._way.sent:
                why = "aborted" if self.aborted else "failed" if assembly is None else assembly.finish or "unknown"
                metrics.uncommitted.labels(why).inc()
            await self._s.store.release(lease, dispatched=self._way.sent)
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
            metrics.uncommitted.labels("lease_lost").inc()
            return
        count(metrics, plan, self.facts, self.state, self.reason)
        if plan.controls.final:
            await self._s.store.delete(session.key)
            await self._s.client.close_session(worker, self._s.engine_key(lease))

    def _tell(self, assembly: Assembly | None) -> None:
        generated = len(self.facts.output_ids or ())
        if generated > 1 and self._first:
            self._s.metrics.itl.observe((self._last - self._first) / (generated - 1))
        outcome = (assembly.finish if assembly else None) or ("aborted" if self.aborted else "failed")
        tell(
            self.plan,
            self.facts,
            self._trace,
            outcome=outcome,
            state=self.state,
            reason=self.reason,
            worker=self._way.worker.id if self._way.worker else None,
            request_id=self._request_id,
            seconds=time.monotonic() - self._started,
            error=self.failure.code if self.failure else None if assembly else outcome,
        )
