"""Sessions in this process: the default store, for one gateway process."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from agentkv_serve.gateway.sessions.ledger import Turn
from agentkv_serve.gateway.sessions.session import Session
from agentkv_serve.gateway.sessions.store import (
    CALL_MARK,
    Lease,
    LeaseLost,
    Mark,
    SessionBusy,
    TooManySessions,
)

MAX_VALUE_BYTES = 256 << 20


class MemoryStore:
    """A SessionStore of dictionaries; sessions stand in order of last use."""

    def __init__(self, idle_ttl: float, clock: Callable[[], float]) -> None:
        self._ttl = idle_ttl
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._leases: dict[str, str] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._index: dict[tuple[str, Mark], tuple[str, ...]] = {}
        self._resident: Counter[str] = Counter()
        self._per_tenant: Counter[str] = Counter()
        self._values: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._value_bytes = 0
        self._workers: dict[str, bytes] = {}

    @property
    def degraded(self) -> bool:
        return False

    async def open(self) -> None:
        """Nothing to begin."""

    async def close(self) -> None:
        """Nothing to let go of."""

    def held(self, key: str) -> Session | None:
        """The session as it is now; not to be changed."""
        return self._sessions.get(key)

    def keys(self) -> list[str]:
        """The keys of all sessions held."""
        return list(self._sessions)

    def adopt(self, session: Session) -> None:
        """Take over a session as another store committed it, whatever was here before."""
        old = self._sessions.get(session.key)
        if old is None:
            self._per_tenant[session.tenant] += 1
            old = session
        else:
            self._place(old, -1)
        self._put(old, session)

    async def peek(self, key: str) -> tuple[Session | None, bool]:
        return self._sessions.get(key), key in self._leases

    async def claim(self, fresh: Session, wait: float, limit: int) -> Lease:
        key = fresh.key
        deadline = self._clock() + wait
        while key in self._leases:
            left = deadline - self._clock()
            if left <= 0 or not await self._wait(key, left):
                raise SessionBusy(key)
        session = self._sessions.get(key)
        if session is None:
            self._make_room(fresh.tenant, limit)
            session = self._sessions[key] = fresh
            self._per_tenant[fresh.tenant] += 1
        self._sessions.move_to_end(key)
        token = secrets.token_hex(8)
        self._leases[key] = token
        epoch = session.epoch
        session.epoch += 1
        return Lease(session.copied(), epoch, token)

    async def bump(self, lease: Lease) -> None:
        session = self._held(lease)
        lease.epoch = session.epoch
        session.epoch += 1

    async def commit(self, lease: Lease) -> None:
        old = self._held(lease)
        new = lease.session
        new.epoch = old.epoch
        new.used = self._clock()
        self._place(old, -1)
        self._put(old, new)
        self._free(new.key)

    def _put(self, old: Session, new: Session) -> None:
        self._sessions[new.key] = new
        self._sessions.move_to_end(new.key)
        self._place(new, 1)
        # Only what has changed, so that a turn costs the same in a long session; `old` may be in nobody's index yet.
        known, now = (old.ledger.turns if old is not new else {}), new.ledger.turns
        gone = [known[link] for link in known.keys() - now.keys()]
        if gone:
            self._unindex(new, set(marks_of(gone)) - set(marks_of(now.values())))
        for mark in marks_of(now[link] for link in now.keys() - known.keys()):
            keys = self._index.get((new.scope, mark), ())
            if new.key not in keys:
                self._index[new.scope, mark] = (*keys, new.key)

    async def release(self, lease: Lease, *, dispatched: bool) -> None:
        if self._leases.get(lease.session.key) != lease.token:
            return
        session = self._sessions[lease.session.key]
        session.used = self._clock()
        if not dispatched:
            session.epoch -= 1
            if session.epoch == 0 and not session.ledger.turns:
                self._forget(session)
        self._free(lease.session.key)

    async def delete(self, key: str) -> Session | None:
        session = self._sessions.get(key)
        if session is not None:
            self._forget(session)
            self._free(key)
        return session

    async def find(self, scope: str, marks: Sequence[Mark]) -> tuple[Mark, list[str]] | None:
        for mark in marks:
            keys = self._index.get((scope, mark))
            if keys:
                return mark, list(keys)
        return None

    async def sessions(self, tenant: str) -> list[Session]:
        return [s for s in self._sessions.values() if s.tenant == tenant]

    async def on_worker(self, worker: str) -> list[Session]:
        return [s for s in self._sessions.values() if s.worker == worker]

    async def count(self) -> int:
        return len(self._sessions)

    async def resident(self, workers: Sequence[str]) -> Mapping[str, int]:
        return self._resident

    async def keep(self, key: str, value: bytes, ttl: float) -> None:
        await self.discard(key)
        self._values[key] = (self._clock() + ttl, value)
        self._value_bytes += len(value)
        while self._value_bytes > MAX_VALUE_BYTES:
            await self.discard(next(iter(self._values)))

    async def recall(self, key: str) -> bytes | None:
        deadline, value = self._values.get(key, (0.0, b""))
        return value if deadline > self._clock() else None

    async def discard(self, key: str) -> None:
        self._value_bytes -= len(self._values.pop(key, (0.0, b""))[1])

    async def workers(self) -> dict[str, bytes] | None:
        return dict(self._workers)

    async def set_worker(self, worker: str, entry: bytes | None) -> None:
        if entry is None:
            self._workers.pop(worker, None)
        else:
            self._workers[worker] = entry

    async def sweep(self) -> list[Session]:
        gone = []
        horizon = self._clock() - self._ttl
        for key in [k for k, (deadline, _) in self._values.items() if deadline <= self._clock()]:
            await self.discard(key)
        for session in list(self._sessions.values()):
            if session.used > horizon:
                break
            if session.key not in self._leases:
                self._forget(session)
                gone.append(session)
        return gone

    async def _wait(self, key: str, seconds: float) -> bool:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(future)
        try:
            await asyncio.wait_for(future, seconds)
        except TimeoutError:
            return False
        finally:
            waiting = self._waiting.get(key, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiting.pop(key, None)
        return True

    def _held(self, lease: Lease) -> Session:
        if self._leases.get(lease.session.key) != lease.token:
            raise LeaseLost(lease.session.key)
        return self._sessions[lease.session.key]

    def _free(self, key: str) -> None:
        self._leases.pop(key, None)
        # All waiters look again; the first to run takes the lease, so order of arrival holds.
        for future in self._waiting.get(key, ()):
            if not future.done():
                future.set_result(None)

    def _make_room(self, tenant: str, limit: int) -> None:
        if self._per_tenant[tenant] < limit:
            return
        for session in self._sessions.values():
            if session.tenant == tenant and session.key not in self._leases:
                self._forget(session)
                return
        raise TooManySessions(tenant)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.key)
        self._per_tenant[session.tenant] -= 1
        self._place(session, -1)
        self._unindex(session, marks_of(session.ledger.turns.values()))

    def _place(self, session: Session, sign: int) -> None:
        if session.worker:
            self._resident[session.worker] += sign * session.kv_tokens

    def _unindex(self, session: Session, marks: Iterable[Mark]) -> None:
        for mark in marks:
            left = tuple(k for k in self._index.get((session.scope, mark), ()) if k != session.key)
            if left:
                self._index[session.scope, mark] = left
            else:
                self._index.pop((session.scope, mark), None)


def marks_of(turns: Iterable[Turn]) -> Iterator[Mark]:
    """What finds the session of these turns by content: each turn's digest and each tool-call id that it issued."""
    for turn in turns:
        yield turn.link
        for call in turn.call_ids:
            yield CALL_MARK + call.encode()
