"""A shared store that may fail: bounded waits, a breaker, and this process's own copies to go on with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from agentkv_serve.gateway.sessions.memory import MemoryStore
from agentkv_serve.gateway.sessions.redis import RedisStore
from agentkv_serve.gateway.sessions.session import Session
from agentkv_serve.gateway.sessions.store import (
    Lease,
    LeaseLost,
    Mark,
    SessionBusy,
    StoreDown,
    TooManySessions,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
_PROBE = (0.5, 5.0)  # seconds between looks at a dead store, growing
_LOOK = 1.0  # seconds between looks at a living one


class ResilientStore:
    """A SessionStore over Redis that goes on without it.

    Every session that this process commits is also kept here. While Redis is down turns run on these copies, leased in
    this process alone; when it is back, or has come back without its memory, what is newer here is written there. If
    two processes went on with one session apart from each other, the engine's epochs keep the state right and the
    later writer's ledger stays.
    """

    def __init__(
        self, shared: RedisStore, local: MemoryStore, on_change: Callable[[bool], None] = lambda down: None
    ) -> None:
        self._shared = shared
        self._local = local
        self._on_change = on_change
        self._down = False
        self._watch: asyncio.Task[None] | None = None
        self._memory = b""
        self._changed: set[str] = set()  # sessions that are newer here
        self._running: dict[str, Lease] = {}  # leases of the shared store
        self._deleted: set[str] = set()  # sessions that the shared store has yet to forget
        self._discarded: set[str] = set()  # kept values likewise

    @property
    def degraded(self) -> bool:
        """True while Redis is not used."""
        return self._down

    async def open(self) -> None:
        """Look for the shared store once, and from now on every second."""
        try:
            await self._look()
        except StoreDown as error:
            self._fell(error)
        self._watch = asyncio.create_task(self._look_for_ever())

    async def close(self) -> None:
        """Stop looking for the shared store and close it."""
        if self._watch:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._shared.close()

    async def peek(self, key: str) -> tuple[Session | None, bool]:
        session, busy = await self._either(lambda: self._shared.peek(key), lambda: self._local.peek(key))
        mine = self._mine(key)
        return (mine if mine and (session is None or mine.turns > session.turns) else session), busy

    async def claim(self, fresh: Session, wait: float, limit: int) -> Lease:
        deadline = time.monotonic() + wait
        if not self._down:
            mine = self._mine(fresh.key)
            try:
                least = mine.epoch if mine else 0
                lease = await self._shared.claim(mine or fresh, wait, limit, least_epoch=least)
            except StoreDown as error:
                self._fell(error)
            else:
                _catch_up(lease, mine)
                self._running[fresh.key] = lease
                return lease
        # A turn that was leased before the outage still runs here.
        while fresh.key in self._running:
            if time.monotonic() >= deadline:
                raise SessionBusy(fresh.key)
            await asyncio.sleep(0.02)
        lease = await self._local.claim(fresh, max(0.0, deadline - time.monotonic()), limit)
        lease.local = True
        return lease

    async def bump(self, lease: Lease) -> None:
        if lease.local:
            await self._local.bump(lease)
        elif not await self._reached(self._shared.bump, lease):
            lease.epoch += 1
            lease.session.epoch = lease.epoch + 1

    async def commit(self, lease: Lease) -> None:
        key = lease.session.key
        if lease.local:
            await self._local.commit(lease)
            self._changed.add(key)
            return
        self._ended(lease)
        if await self._reached(self._shared.commit, lease):
            self._changed.discard(key)
        else:
            self._shared.abandon(lease)
            self._changed.add(key)
        self._local.adopt(lease.session.copied())

    async def release(self, lease: Lease, *, dispatched: bool) -> None:
        if lease.local:
            await self._local.release(lease, dispatched=dispatched)
            return
        self._ended(lease)

        async def release(lease: Lease) -> None:
            await self._shared.release(lease, dispatched=dispatched)

        if not await self._reached(release, lease):
            self._shared.abandon(lease)

    async def delete(self, key: str) -> Session | None:
        mine = await self._local.delete(key)
        self._changed.discard(key)
        shared = await self._either(lambda: self._shared.delete(key), lambda: _nothing(None))
        if self._down:
            self._deleted.add(key)
        return shared or mine

    async def find(self, scope: str, marks: Sequence[Mark]) -> tuple[Mark, list[str]] | None:
        if not self._changed and not self._down:
            return await self._either(lambda: self._shared.find(scope, marks), lambda: self._local.find(scope, marks))
        # What went on here without Redis is only known here.
        mine = await self._local.find(scope, marks)
        if mine:
            return mine
        return await self._either(lambda: self._shared.find(scope, marks), lambda: _nothing(None))

    async def sessions(self, tenant: str) -> list[Session]:
        return await self._either(lambda: self._shared.sessions(tenant), lambda: self._local.sessions(tenant))

    async def on_worker(self, worker: str) -> list[Session]:
        return await self._either(lambda: self._shared.on_worker(worker), lambda: self._local.on_worker(worker))

    async def count(self) -> int:
        return await self._either(self._shared.count, self._local.count)

    async def resident(self, workers: Sequence[str]) -> Mapping[str, int]:
        return await self._either(lambda: self._shared.resident(workers), lambda: self._local.resident(workers))

    async def keep(self, key: str, value: bytes, ttl: float) -> None:
        await self._local.keep(key, value, ttl)
        await self._either(lambda: self._shared.keep(key, value, ttl), lambda: _nothing(None))

    async def recall(self, key: str) -> bytes | None:
        mine = await self._local.recall(key)
        if mine is not None:
            return mine
        return await self._either(lambda: self._shared.recall(key), lambda: _nothing(None))

    async def discard(self, key: str) -> None:
        await self._local.discard(key)
        await self._either(lambda: self._shared.discard(key), lambda: _nothing(None))
        if self._down:
            self._discarded.add(key)

    async def workers(self) -> dict[str, bytes] | None:
        return await self._either(self._shared.workers, lambda: _nothing(None))

    async def set_worker(self, worker: str, entry: bytes | None) -> None:
        if self._down:
            raise StoreDown("the session store is down")
        await self._shared.set_worker(worker, entry)

    async def sweep(self) -> list[Session]:
        # Copies of sessions that live on elsewhere expire here too; the engine itself forgets what is unused.
        gone = await self._local.sweep()
        await self._either(self._shared.sweep, lambda: _nothing([]))
        return gone if self.degraded else []

    # ---- within -------------------------------------------------------------------------------------------

    def _mine(self, key: str) -> Session | None:
        """This process's copy, where it may be newer than the shared session."""
        return self._local.held(key) if key in self._changed else None

    def _ended(self, lease: Lease) -> None:
        if self._running.get(lease.session.key) is lease:
            del self._running[lease.session.key]
        mine = self._local.held(lease.session.key)
        if mine:
            mine.epoch = max(mine.epoch, lease.epoch + 1)

    async def _either(self, shared: Callable[[], Awaitable[T]], local: Callable[[], Awaitable[T]]) -> T:
        if not self._down:
            try:
                return await shared()
            except StoreDown as error:
                self._fell(error)
        return await local()

    async def _reached(self, step: Callable[[Lease], Awaitable[None]], lease: Lease) -> bool:
        """Whether the shared store has taken a step of a lease that it gave."""
        if self._down:
            return False
        try:
            await step(lease)
        except StoreDown as error:
            self._fell(error)
            return False
        return True

    def _fell(self, error: StoreDown) -> None:
        if not self._down:
            log.error("the session store is down (%s): going on with this process's own copies", error)
            self._down = True
            self._on_change(True)

    async def _look_for_ever(self) -> None:
        pause = _PROBE[0]
        while True:
            await asyncio.sleep(pause if self._down else _LOOK)
            pause = min(2 * pause, _PROBE[1]) if self._down else _PROBE[0]
            try:
                await self._look()
            except StoreDown as error:
                self._fell(error)

    async def _look(self) -> None:
        memory = await self._shared.memory()
        if self._memory and memory != self._memory:
            log.warning("the session store came back without its memory: writing sessions anew")
            self._changed.update(self._local.keys())
        self._memory = memory
        await self._forget()
        await self._write_back()
        if self._down:
            log.warning("the session store is back")
            self._down = False
            self._on_change(False)

    async def _forget(self) -> None:
        """Do what clients asked for while the shared store was down: nothing that they ended comes back with it."""
        for key in list(self._deleted):
            await self._shared.delete(key)
            self._deleted.discard(key)
        for key in list(self._discarded):
            await self._shared.discard(key)
            self._discarded.discard(key)

    async def _write_back(self) -> None:
        """Write what is newer here; a session whose turn runs right now is written when that ends."""
        for key in list(self._changed):
            session, busy = await self._local.peek(key)
            if session is None:
                self._changed.discard(key)
            elif not busy and key not in self._running:
                try:
                    lease = await self._shared.claim(session, 0, 1 << 30, least_epoch=session.epoch)
                    _catch_up(lease, session)
                    await self._commit_or_abandon(lease)
                except (SessionBusy, LeaseLost, TooManySessions):
                    continue
                session.epoch = max(session.epoch, lease.epoch + 1)
                self._changed.discard(key)

    async def _commit_or_abandon(self, lease: Lease) -> None:
        try:
            await self._shared.commit(lease)
        except StoreDown:
            self._shared.abandon(lease)  # else it would be renewed for ever, by nobody's turn
            raise


def _catch_up(lease: Lease, mine: Session | None) -> None:
    """Go on from this process's copy where the shared store is behind it, or has lost the ledger."""
    shared = lease.session
    lost = shared.ledger.head is None and mine is not None and mine.ledger.head is not None
    if mine and (mine.turns > shared.turns or (lost and mine.turns >= shared.turns)):
        lease.session = mine.copied()
        lease.session.epoch = shared.epoch


async def _nothing(value: T) -> T:
    return value
