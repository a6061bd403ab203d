"""Sessions in Redis or Valkey (6.2 or newer): several gateway processes behave as one."""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from redis.exceptions import NoScriptError, RedisError

from agentkv_serve.gateway.encoding import digest
from agentkv_serve.gateway.sessions import scripts
from agentkv_serve.gateway.sessions.ledger import Turn
from agentkv_serve.gateway.sessions.link import Command, Link
from agentkv_serve.gateway.sessions.memory import marks_of
from agentkv_serve.gateway.sessions.packing import (
    Seal,
    SealError,
    pack_session,
    pack_turn,
    unpack_session,
    unpack_turn,
)
from agentkv_serve.gateway.sessions.scripts import Script
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
        link: Link,
        *,
        idle_ttl: float,
        clock: Callable[[], float],
        seal: Seal,
        lease: float = 30.0,
        cached_sessions: int = 10_000,
        on_call: Callable[[float, bool], None] = lambda seconds, well: None,
    ) -> None:
        self._link = link
        self._ttl = int(idle_ttl * 1000)
        self._clock = clock
        self._seal = seal
        self._lease = lease
        self._cached = cached_sessions
        self._on_call = on_call
        self._cache: OrderedDict[str, tuple[str, dict[bytes, Turn]]] = OrderedDict()
        self._leases: dict[str, str] = {}  # keys of sessions by the tokens of their leases
        self._renewer: asyncio.Task[None] | None = None
        self._unheard: list[tuple[str, str]] = []
        self._workers: set[str] = set()
        self._resident: tuple[float, dict[str, int]] = (-1e9, {})

    @property
    def degraded(self) -> bool:
        return False

    async def close(self) -> None:
        """Stop renewing leases and close the connections."""
        if self._renewer:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
        await self._link.close()

    async def memory(self) -> bytes:
        """A mark that lives as long as the server's memory: another one means that all sessions were lost. Raises
        StoreDown when the server does not answer. Frees leases that were given when nobody heard it."""
        name, mark = f"{PREFIX}memory", secrets.token_hex(8)
        *_, memory = await self._calls(
            ("SET", name, mark, "NX", "PX", _MEMORY_TTL), ("PEXPIRE", name, _MEMORY_TTL), ("GET", name)
        )
        while self._unheard:
            key, token = self._unheard[-1]
            await self._script(scripts.FREE, [_name("l", key)], token)
            self._unheard.pop()
        return bytes(memory or b"")

    def abandon(self, lease: Lease) -> None:
        """Let the lease go although the server cannot be told now."""
        self._stop_renewing(lease)
        self._unheard.append((lease.session.key, lease.token))

    async def peek(self, key: str) -> tuple[Session | None, bool]:
        flat, busy = await self._calls(("HGETALL", _name("s", key)), ("EXISTS", _name("l", key)))
        session = await self._load(key, _fields(flat)) if flat else None
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
        try:
            session = await self._load(fresh.key, _fields(flat), version=version, links=links)
        except BaseException:
            # Nothing was dispatched; the lease would only run out.
            await self._script(scripts.RELEASE, self._keys(fresh), token, epoch, 0, fresh.key)
            raise
        if session is None:
            # What stands there cannot be read (another ledger key): this life of the session begins anew.
            session = copy.copy(fresh)
        session.epoch = epoch + 1
        lease = Lease(session, epoch, token)
        self._leases[token] = fresh.key
        if self._renewer is None:
            self._renewer = asyncio.create_task(self._renew())
        return lease

    async def _claim(self, fresh: Session, token: str, limit: int, least_epoch: int) -> Any:
        known = self._cache.get(fresh.key, ("", {}))[0]
        # Lives of a session count on from numbers of their own: no process takes one's ledger for another's.
        first = {"version": str(secrets.randbelow(1 << 48)).encode(), **pack_session(fresh)}
        fields = [part for item in first.items() for part in item]
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
        marks = [_mark(session.scope, mark) for mark in marks_of(new.values())]
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
        marks = marks[:_MAX_MARKS]
        found = await self._calls(*(("SMEMBERS", _mark(scope, mark)) for mark in marks))
        for mark, keys in zip(marks, found, strict=True):
            if keys:
                return mark, sorted(key.decode() for key in keys)
        return None

    async def sessions(self, tenant: str) -> list[Session]:
        keys = await self._call("ZRANGE", _name("n", _short(tenant)), 0, -1)
        return await self._without_ledgers(key.decode() for key in keys)

    async def on_worker(self, worker: str) -> list[Session]:
        keys = await self._call("HKEYS", _name("wk", worker))
        return await self._without_ledgers(key.decode() for key in keys)

    async def count(self) -> int:
        return sum(await self._calls(*(("HLEN", _name("wk", worker)) for worker in sorted(self._workers))))

    async def resident(self, workers: Sequence[str]) -> Mapping[str, int]:
        self._workers.update(workers)
        now = self._clock()
        taken, sums = self._resident
        if now - taken >= 0.5:
            taken, sums = now, {}
        unknown = [worker for worker in workers if worker not in sums]
        if unknown:
            values = await self._call("MGET", *(_name("ws", worker) for worker in unknown))
            sums = sums | {worker: max(0, int(value or 0)) for worker, value in zip(unknown, values, strict=True)}
            self._resident = (taken, sums)
        return sums

    async def keep(self, key: str, value: bytes, ttl: float) -> None:
        sealed = self._seal.close(value, key.encode())
        await self._call("SET", _name("v", key), sealed, "PX", max(1, int(ttl * 1000)))

    async def recall(self, key: str) -> bytes | None:
        stored = await self._call("GET", _name("v", key))
        try:
            return None if stored is None else self._seal.open(stored, key.encode())
        except SealError:
            return None

    async def discard(self, key: str) -> None:
        await self._call("DEL", _name("v", key))

    async def workers(self) -> dict[str, bytes] | None:
        entries = _fields(await self._call("HGETALL", f"{PREFIX}workers"))
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
            await self._call("HDEL", name, worker)
        else:
            sealed = self._seal.close(entry, worker.encode())
            await self._calls(("HSET", name, worker, sealed), ("PEXPIRE", name, _MEMORY_TTL))

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
                links = await self._call("HKEYS", _name("t", key))
            missing = [link for link in links if link not in turns]
            values = await self._call("HMGET", _name("t", key), *missing) if missing else []
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
        found = await self._calls(*(("HGETALL", _name("s", key)) for key in keys))
        return [unpack_session(_fields(flat)) for flat in found if flat]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            for token, key in list(self._leases.items()):
                try:
                    held = await self._script(scripts.RENEW, [_name("l", key)], token, int(self._lease * 1000))
                except StoreDown:
                    break
                if not held:
                    self._leases.pop(token, None)

    def _stop_renewing(self, lease: Lease) -> None:
        self._leases.pop(lease.token, None)

    def _keys(self, session: Session) -> list[str]:
        kinds = [_name(kind, session.key) for kind in ("s", "l", "t")]
        return [*kinds, _name("n", _short(session.tenant))]

    async def _script(self, script: Script, keys: Sequence[bytes | str], *arguments: bytes | str | int | float) -> Any:
        try:
            return await self._call("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except NoScriptError:
            # EVAL loads it as well, and unlike SCRIPT LOAD it is allowed by every proxy.
            return await self._call("EVAL", script.text, len(keys), *keys, *arguments)

    async def _call(self, *command: bytes | str | int | float) -> Any:
        return (await self._calls(command))[0]

    async def _calls(self, *commands: Command) -> list[Any]:
        if not commands:
            return []
        started = time.perf_counter()
        try:
            replies = await self._link.calls(*commands)
        except NoScriptError:
            raise
        except (RedisError, OSError, TimeoutError) as error:
            self._on_call(time.perf_counter() - started, False)
            raise StoreDown(f"{type(error).__name__}: {error}") from error
        self._on_call(time.perf_counter() - started, True)
        return replies


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _name(kind: str, key: str) -> str:
    return f"{PREFIX}{kind}:{key}"


def _mark(scope: str, mark: Mark) -> str:
    return _name("i", digest(scope.encode(), mark).hex())


def _short(text: str) -> str:
    return digest(text.encode()).hex()
