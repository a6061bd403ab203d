"""Sessions in Redis or Valkey (6.2 or newer): several gateway processes behave as one."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from agentkv_serve.gateway.encoding import digest
from agentkv_serve.gateway.sessions import scripts
from agentkv_serve.gateway.sessions.ledger import Turn
from agentkv_serve.gateway.sessions.memory import marks_of
from agentkv_serve.gateway.sessions.packing import (
    Seal,
    SealError,
    pack_session,
    pack_turn,
    unpack_session,
    unpack_turn,
)
from agentkv_serve.gateway.sessions.session import Session
from agentkv_serve.gateway.sessions.store import (
    Lease,
    LeaseLost,
    Mark,
    SessionBusy,
    StoreDown,
    TooManySessions,
)

PREFIX = "agentkv:v1:"
_MAX_MARKS = 64  # marks looked up for one request: the newest ones identify a conversation
_MEMORY_TTL = 30 * 24 * 3600 * 1000  # milliseconds
_POLL = (0.01, 0.1)  # seconds between looks at a taken lease, growing


class RedisStore:
    """A SessionStore in Redis. Ledgers are cached here by version, so that a session that stays with one gateway
    process moves nothing but its newest turn."""

    def __init__(
        self,
        client: Redis,
        *,
        idle_ttl: float,
        clock: Callable[[], float],
        seal: Seal,
        lease: float = 30.0,
        cached_sessions: int = 10_000,
        on_call: Callable[[float, bool], None] = lambda seconds, well: None,
    ) -> None:
        self._redis = client
        self._ttl = int(idle_ttl * 1000)
        self._clock = clock
        self._seal = seal
        self._lease = lease
        self._cached = cached_sessions
        self._on_call = on_call
        self._cache: OrderedDict[str, tuple[str, dict[bytes, Turn]]] = OrderedDict()
        self._renewals: dict[str, asyncio.Task[None]] = {}
        self._unheard: list[tuple[str, str]] = []
        self._workers: set[str] = set()
        self._resident: tuple[float, dict[str, int]] = (-1e9, {})

    @property
    def degraded(self) -> bool:
        return False

    async def close(self) -> None:
        """Stop renewing leases and close the connections."""
        for task in self._renewals.values():
            task.cancel()
        await asyncio.gather(*self._renewals.values(), return_exceptions=True)
        await self._redis.aclose()

    async def memory(self) -> bytes:
        """A mark that lives as long as the server's memory: another one means that all sessions were lost. Raises
        StoreDown when the server does not answer. Frees leases that were given when nobody heard it."""
        name, mark = f"{PREFIX}memory", secrets.token_hex(8)
        await self._call(self._redis.set(name, mark, nx=True, px=_MEMORY_TTL))
        await self._call(self._redis.pexpire(name, _MEMORY_TTL))
        while self._unheard:
            key, token = self._unheard[-1]
            await self._script(scripts.FREE, [_name("l", key)], token)
            self._unheard.pop()
        return bytes(await self._call(self._redis.get(name)) or b"")

    def abandon(self, lease: Lease) -> None:
        """Let the lease go although the server cannot be told now."""
        self._stop_renewing(lease)
        self._unheard.append((lease.session.key, lease.token))

    async def peek(self, key: str) -> tuple[Session | None, bool]:
        pipe = self._redis.pipeline(transaction=False)
        pipe.hgetall(_name("s", key))
        pipe.exists(_name("l", key))
        fields, busy = await self._call(pipe.execute())
        session = await self._load(key, fields) if fields else None
        return session, bool(busy)

    async def claim(self, fresh: Session, wait: float, limit: int, *, least_epoch: int = 0) -> Lease:
        deadline = self._clock() + wait
        pause = _POLL[0]
        token = secrets.token_hex(16)
        while True:
            try:
                reply = await self._claim(fresh, token, limit, least_epoch)
            except (StoreDown, asyncio.CancelledError):
                self._unheard.append((fresh.key, token))
                raise
            if reply[0] == b"ok":
                break
            if reply[0] == b"full":
                raise TooManySessions(fresh.tenant)
            left = deadline - self._clock()
            if left <= 0:
                raise SessionBusy(fresh.key)
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 1.5, _POLL[1])
        _, epoch, version, flat, links = reply
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        try:
            session = await self._load(fresh.key, fields, version=version, links=links)
        except BaseException:
            # Nothing was dispatched; the lease would only run out.
            await self._script(scripts.RELEASE, self._keys(fresh), token, epoch, 0, fresh.key)
            raise
        if session is None:
            # What stands there cannot be read (another ledger key): this life of the session begins anew.
            session = copy.copy(fresh)
        session.epoch = epoch + 1
        lease = Lease(session, epoch, token)
        self._renewals[token] = asyncio.create_task(self._renew(lease))
        return lease

    async def _claim(self, fresh: Session, token: str, limit: int, least_epoch: int) -> Any:
        known = self._cache.get(fresh.key, ("", {}))[0]
        fields = [part for item in pack_session(fresh).items() for part in item]
        return await self._script(
            scripts.CLAIM,
            self._keys(fresh),
            *(token, int(self._lease * 1000), self._ttl, self._clock(), limit, known, least_epoch),
            *(PREFIX, fresh.key, *fields),
        )

    async def bump(self, lease: Lease) -> None:
        key = lease.session.key
        epoch = await self._script(scripts.BUMP, [_name("s", key), _name("l", key)], lease.token, lease.epoch)
        if epoch < 0:
            raise LeaseLost(key)
        lease.epoch = int(epoch)
        lease.session.epoch = lease.epoch + 1

    async def commit(self, lease: Lease) -> None:
        session = lease.session
        key = session.key
        session.used = self._clock()
        version, known = self._cache.get(key, ("0", {}))
        new = {link: turn for link, turn in session.ledger.turns.items() if link not in known}
        gone = [link for link in known if link not in session.ledger.turns]
        turns = [part for link, turn in new.items() for part in (link, self._sealed(key, link, turn))]
        fields = [part for item in pack_session(session).items() for part in item]
        marks = [_mark(session.scope, mark) for mark in marks_of_turns(new.values())]
        done = await self._script(
            scripts.COMMIT,
            [*self._keys(session)[:3], *marks],
            *(lease.token, lease.epoch, self._ttl, self._clock(), PREFIX, key),
            *(len(new), *turns, len(gone), *gone, *fields),
        )
        self._stop_renewing(lease)
        if not done:
            self._cache.pop(key, None)
            raise LeaseLost(key)
        self._workers.add(session.worker)
        self._remember(key, str(int(version) + 1), dict(session.ledger.turns))

    async def release(self, lease: Lease, *, dispatched: bool) -> None:
        self._stop_renewing(lease)
        session = lease.session
        await self._script(scripts.RELEASE, self._keys(session), lease.token, lease.epoch, int(dispatched), session.key)

    async def delete(self, key: str) -> Session | None:
        session, _ = await self.peek(key)
        if session is None:
            return None
        await self._script(scripts.DELETE, self._keys(session), PREFIX, key)
        self._cache.pop(key, None)
        return session

    async def find(self, scope: str, marks: Sequence[Mark]) -> tuple[Mark, list[str]] | None:
        pipe = self._redis.pipeline(transaction=False)
        marks = marks[:_MAX_MARKS]
        for mark in marks:
            pipe.smembers(_mark(scope, mark))
        for mark, keys in zip(marks, await self._call(pipe.execute()) if marks else [], strict=True):
            if keys:
                return mark, sorted(key.decode() for key in keys)
        return None

    async def sessions(self, tenant: str) -> list[Session]:
        keys = await self._call(self._redis.zrange(_name("n", _short(tenant)), 0, -1))
        return await self._without_ledgers(key.decode() for key in keys)

    async def on_worker(self, worker: str) -> list[Session]:
        keys = await self._call(self._redis.hkeys(_name("wk", worker)))
        return await self._without_ledgers(key.decode() for key in keys)

    async def count(self) -> int:
        pipe = self._redis.pipeline(transaction=False)
        for worker in sorted(self._workers):
            pipe.hlen(_name("wk", worker))
        return sum(await self._call(pipe.execute())) if self._workers else 0

    async def resident(self, workers: Sequence[str]) -> Mapping[str, int]:
        self._workers.update(workers)
        taken, sums = self._resident
        if self._clock() - taken < 0.5:
            return sums
        values = await self._call(self._redis.mget([_name("ws", w) for w in workers])) if workers else []
        sums = {w: max(0, int(v or 0)) for w, v in zip(workers, values, strict=True)}
        self._resident = (self._clock(), sums)
        return sums

    async def keep(self, key: str, value: bytes, ttl: float) -> None:
        sealed = self._seal.close(value, key.encode())
        await self._call(self._redis.set(_name("v", key), sealed, px=int(ttl * 1000)))

    async def recall(self, key: str) -> bytes | None:
        stored = await self._call(self._redis.get(_name("v", key)))
        try:
            return None if stored is None else self._seal.open(stored, key.encode())
        except SealError:
            return None

    async def discard(self, key: str) -> None:
        await self._call(self._redis.delete(_name("v", key)))

    async def workers(self) -> dict[str, bytes] | None:
        entries = await self._call(self._redis.hgetall(f"{PREFIX}workers"))
        found = {}
        for name, entry in entries.items():
            try:
                found[name.decode()] = self._seal.open(entry, name)
            except SealError:
                continue
        return found

    async def set_worker(self, worker: str, entry: bytes | None) -> None:
        name = f"{PREFIX}workers"
        if entry is None:
            await self._call(self._redis.hdel(name, worker))
        else:
            await self._call(self._redis.hset(name, worker, self._seal.close(entry, worker.encode())))
            await self._call(self._redis.pexpire(name, _MEMORY_TTL))

    async def sweep(self) -> list[Session]:
        for worker in sorted(self._workers):
            names = [_name(kind, worker) for kind in ("wk", "wx", "ws")]
            await self._script(scripts.EXPIRE_WORKER, names, self._clock())
        return []

    # ---- within -------------------------------------------------------------------------------------------

    async def _load(
        self,
        key: str,
        fields: Mapping[bytes, bytes],
        *,
        version: bytes | None = None,
        links: list[bytes] | None = None,
    ) -> Session | None:
        """The session of `fields` with its ledger, from the cache as far as that is current. None: unreadable."""
        session = unpack_session(fields)
        current = (version or fields[b"version"]).decode()
        cached, turns = self._cache.get(key, ("", {}))
        if cached != current:
            if links is None:
                links = await self._call(self._redis.hkeys(_name("t", key)))
            missing = [link for link in links if link not in turns]
            values = await self._call(self._redis.hmget(_name("t", key), missing)) if missing else []
            try:
                read = {
                    link: unpack_turn(link, self._seal.open(value, key.encode() + link))
                    for link, value in zip(missing, values, strict=True)
                    if value is not None
                }
            except SealError:
                return None
            turns = {link: turn for link, turn in {**turns, **read}.items() if link in set(links)}
            self._remember(key, current, turns)
        self._cache.move_to_end(key)
        session.ledger.turns = dict(turns)
        if session.ledger.head not in turns:
            session.ledger.head = None
        return session

    def _sealed(self, key: str, link: bytes, turn: Turn) -> bytes:
        return self._seal.close(pack_turn(turn), key.encode() + link)

    def _remember(self, key: str, version: str, turns: dict[bytes, Turn]) -> None:
        self._cache[key] = (version, turns)
        self._cache.move_to_end(key)
        while len(self._cache) > self._cached:
            self._cache.popitem(last=False)

    async def _without_ledgers(self, keys: Iterable[str]) -> list[Session]:
        pipe = self._redis.pipeline(transaction=False)
        for key in keys:
            pipe.hgetall(_name("s", key))
        found = await self._call(pipe.execute()) if len(pipe) else []
        return [unpack_session(fields) for fields in found if fields]

    async def _renew(self, lease: Lease) -> None:
        name = [_name("l", lease.session.key)]
        while True:
            await asyncio.sleep(self._lease / 3)
            try:
                if not await self._script(scripts.RENEW, name, lease.token, int(self._lease * 1000)):
                    return
            except StoreDown:
                continue

    def _stop_renewing(self, lease: Lease) -> None:
        task = self._renewals.pop(lease.token, None)
        if task:
            task.cancel()

    def _keys(self, session: Session) -> list[str]:
        kinds = [_name(kind, session.key) for kind in ("s", "l", "t")]
        return [*kinds, _name("n", _short(session.tenant))]

    async def _script(self, text: str, keys: Sequence[Any], *arguments: Any) -> Any:
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        try:
            return await self._call(self._redis.evalsha(sha, len(keys), *keys, *arguments))
        except NoScriptError:
            # EVAL loads it as well, and unlike SCRIPT LOAD it is allowed by every proxy.
            return await self._call(self._redis.eval(text, len(keys), *keys, *arguments))

    async def _call(self, command: Any) -> Any:
        started = time.perf_counter()
        try:
            reply = await cast("asyncio.Future[Any]", command)
        except NoScriptError:
            raise
        except (RedisError, OSError, TimeoutError) as error:
            self._on_call(time.perf_counter() - started, False)
            raise StoreDown(f"{type(error).__name__}: {error}") from error
        self._on_call(time.perf_counter() - started, True)
        task = asyncio.current_task()
        if task and task.cancelling():
            # The client library may swallow a cancellation that meets a command on its way.
            raise asyncio.CancelledError
        return reply


def marks_of_turns(turns: Iterable[Turn]) -> list[Mark]:
    """What finds the session of these turns by content."""
    session = Session("", "", "", "", 0, 0)
    session.ledger.turns = {turn.link: turn for turn in turns}
    return marks_of(session)


def _name(kind: str, key: str) -> str:
    return f"{PREFIX}{kind}:{key}"


def _mark(scope: str, mark: Mark) -> str:
    return _name("i", digest(scope.encode(), mark).hex())


def _short(text: str) -> str:
    return digest(text.encode()).hex()
