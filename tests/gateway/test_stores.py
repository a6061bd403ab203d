"""Every store keeps the same rules: in process, in a real Valkey, and in Valkey with local copies."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from agentkv_serve.gateway.sessions.ledger import Turn
from agentkv_serve.gateway.sessions.memory import MemoryStore
from agentkv_serve.gateway.sessions.opening import open_store
from agentkv_serve.gateway.sessions.packing import Seal, SealError, pack_turn, unpack_turn
from agentkv_serve.gateway.sessions.session import Head, Session
from agentkv_serve.gateway.sessions.store import CALL_MARK, Lease, LeaseLost, SessionBusy, SessionStore, TooManySessions
from agentkv_serve.gateway.settings import Settings
from tests.gateway.valkey import ValkeyProcess

LEDGER_KEY = base64.b64encode(bytes(range(32))).decode()


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyProcess]:
    server = ValkeyProcess()
    server.start()
    yield server
    server.kill()


Open = Callable[..., Awaitable[SessionStore]]


@pytest.fixture(params=["memory", "valkey", "valkey, encrypted"])
async def open_one(request: pytest.FixtureRequest, valkey: ValkeyProcess) -> AsyncIterator[Open]:
    """Opens stores of one kind; those in Valkey share their sessions."""
    opened: list[SessionStore] = []
    if request.param != "memory":
        client = Redis.from_url(valkey.url)
        await client.flushall()
        await client.aclose()

    async def run(**sessions: float) -> SessionStore:
        shared = {"url": valkey.url, "ledger_key": LEDGER_KEY if "encrypted" in request.param else None}
        settings = Settings(
            model_path=Path("/m"),
            secret="0123456789abcdef",  # type: ignore[arg-type]
            store={} if request.param == "memory" else shared,  # type: ignore[arg-type]
            sessions=sessions,  # type: ignore[arg-type]
        )
        opened.append(open_store(settings, lambda down: None))
        await opened[-1].open()
        return opened[-1]

    yield run
    for store in opened:
        await store.close()


def fresh(key: str = "k1", tenant: str = "t") -> Session:
    return Session(key, tenant, "m", f"id-{key}", time.time(), time.time())


def turn(link: bytes, parent: bytes | None = None, calls: tuple[str, ...] = ()) -> Turn:
    return Turn(
        link.ljust(16), parent and parent.ljust(16), array("i", [1, 2, 70000]), array("i", [0, 3, 4]), -1, b"r", calls
    )


async def commit(store: SessionStore, lease: Lease, link: bytes, *, tokens: int = 10, worker: str = "w0") -> None:
    session = lease.session
    parent = session.ledger.head.strip() if session.ledger.head else None
    session.ledger.add(turn(link, parent, (f"call-{link.decode()}",)), 1000)
    session.turns += 1
    session.worker, session.kv_tokens, session.head = worker, tokens, Head(b"s" * 16, b"t" * 16)
    await store.commit(lease)


async def test_a_session_comes_back_as_it_was_committed(open_one: Open) -> None:
    store = await open_one()
    lease = await store.claim(fresh(), 0, 10)
    assert lease.epoch == 0 and lease.session.ledger.head is None
    lease.session.budget, lease.session.policy, lease.session.token_limit = 512, "full", 9000
    await commit(store, lease, b"a")
    again = await store.claim(fresh(), 0, 10)
    session = again.session
    assert again.epoch == 1
    assert (session.id, session.tenant, session.model) == ("id-k1", "t", "m")
    assert (session.budget, session.policy, session.token_limit, session.turns) == (512, "full", 9000, 1)
    assert session.head == Head(b"s" * 16, b"t" * 16)
    assert session.incarnation == lease.session.incarnation
    assert session.ledger.path(session.ledger.head) == (turn(b"a", None, ("call-a",)),)
    await store.release(again, dispatched=True)
    peeked, busy = await store.peek("k1")
    assert peeked is not None and not busy and peeked.epoch == 2


async def test_what_was_not_committed_leaves_no_trace(open_one: Open) -> None:
    store = await open_one()
    lease = await store.claim(fresh(), 0, 10)
    lease.session.budget = 512
    lease.session.ledger.add(turn(b"a"), 1000)
    await store.release(lease, dispatched=False)
    assert await store.peek("k1") == (None, False)
    lease = await store.claim(fresh(), 0, 10)
    assert (lease.epoch, lease.session.budget, lease.session.ledger.turns) == (0, None, {})
    await store.release(lease, dispatched=True)
    assert (await store.claim(fresh(), 0, 10)).epoch == 1


async def test_one_turn_at_a_time(open_one: Open) -> None:
    store = await open_one()
    lease = await store.claim(fresh(), 0, 10)
    assert (await store.peek("k1"))[1]
    with pytest.raises(SessionBusy):
        await store.claim(fresh(), 0, 10)
    with pytest.raises(SessionBusy):
        await store.claim(fresh(), 0.05, 10)
    waiting = asyncio.create_task(store.claim(fresh(), 5, 10))
    await asyncio.sleep(0.02)
    await commit(store, lease, b"a")
    second = await waiting
    assert second.epoch == 1 and second.session.turns == 1


async def test_many_waiters_each_get_their_turn(open_one: Open) -> None:
    store = await open_one()
    epochs: list[int] = []
    running = 0

    async def run() -> None:
        nonlocal running
        lease = await store.claim(fresh(), 20, 10)
        running += 1
        assert running == 1
        await asyncio.sleep(0.001)
        running -= 1
        epochs.append(lease.epoch)
        await commit(store, lease, f"t{lease.epoch}".encode())

    await asyncio.gather(*(run() for _ in range(20)))
    assert epochs == list(range(20))
    session, _ = await store.peek("k1")
    assert session is not None and session.turns == 20 and len(session.ledger.path(session.ledger.head)) == 20


async def test_a_cancelled_waiter_takes_nothing(open_one: Open) -> None:
    store = await open_one()
    lease = await store.claim(fresh(), 0, 10)
    waiting = asyncio.create_task(store.claim(fresh(), 5, 10))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await store.release(lease, dispatched=True)
    assert (await store.claim(fresh(), 0, 10)).epoch == 1


async def test_a_dispatch_can_be_counted_again(open_one: Open) -> None:
    store = await open_one()
    lease = await store.claim(fresh(), 0, 10)
    await store.bump(lease)
    assert lease.epoch == 1
    await commit(store, lease, b"a")
    assert (await store.claim(fresh(), 0, 10)).epoch == 2


async def test_sessions_are_found_by_content_within_their_scope(open_one: Open) -> None:
    store = await open_one()
    for key in ("k1", "k2"):
        await commit(store, await store.claim(fresh(key), 0, 10), b"same")
    lease = await store.claim(fresh("k2"), 0, 10)
    await commit(store, lease, b"own")
    scope = fresh().scope
    assert await store.find(scope, [b"own".ljust(16), b"same".ljust(16)]) == (b"own".ljust(16), ["k2"])
    assert await store.find(scope, [b"none".ljust(16), b"same".ljust(16)]) == (b"same".ljust(16), ["k1", "k2"])
    assert await store.find(scope, [CALL_MARK + b"call-own"]) == (CALL_MARK + b"call-own", ["k2"])
    assert await store.find(scope, [b"none".ljust(16)]) is None
    assert await store.find(scope, []) is None
    assert await store.find(fresh(tenant="other").scope, [b"same".ljust(16)]) is None


async def test_a_deleted_session_is_gone_and_its_turn_cannot_be_committed(open_one: Open) -> None:
    store = await open_one()
    await commit(store, await store.claim(fresh(), 0, 10), b"a")
    lease = await store.claim(fresh(), 0, 10)
    deleted = await store.delete("k1")
    assert deleted is not None and deleted.worker == "w0"
    assert await store.delete("k1") is None
    with pytest.raises(LeaseLost):
        await commit(store, lease, b"b")
    assert await store.peek("k1") == (None, False)
    assert (await store.resident(["w0"])).get("w0", 0) == 0
    again = await store.claim(fresh(), 0, 10)
    assert again.epoch == 0 and again.session.incarnation != lease.session.incarnation


async def test_residence_follows_the_sessions(open_one: Open) -> None:
    store = await open_one()
    await commit(store, await store.claim(fresh("k1"), 0, 10), b"a", tokens=100)
    await commit(store, await store.claim(fresh("k2"), 0, 10), b"b", tokens=30, worker="w1")
    await commit(store, await store.claim(fresh("k1"), 0, 10), b"c", tokens=120)
    other = await open_one()  # asks the server itself, where there is one
    expected = {"w0": 120, "w1": 30}
    found = other if await other.count() or "Memory" not in type(other).__name__ else store
    assert dict(await found.resident(["w0", "w1"])) == expected
    await commit(store, await store.claim(fresh("k1"), 0, 10), b"d", tokens=50, worker="w1")
    assert [s.key for s in await store.on_worker("w0")] == []
    assert sorted(s.key for s in await store.on_worker("w1")) == ["k1", "k2"]


async def test_a_tenant_has_a_bounded_number_of_sessions(open_one: Open) -> None:
    store = await open_one()
    for key in ("k1", "k2"):
        await commit(store, await store.claim(fresh(key), 0, 2), b"a")
    busy = await store.claim(fresh("k1"), 0, 2)
    await commit(store, await store.claim(fresh("k3"), 0, 2), b"a")
    assert (await store.peek("k2"))[0] is None
    also = await store.claim(fresh("k3"), 0, 2)
    with pytest.raises(TooManySessions):
        await store.claim(fresh("k4"), 0, 2)
    assert sorted(s.key for s in await store.sessions("t")) == ["k1", "k3"]
    await store.claim(fresh("k4", tenant="other"), 0, 2)
    await store.release(busy, dispatched=True)
    await store.release(also, dispatched=True)


async def test_values_are_kept_for_their_time(open_one: Open) -> None:
    store = await open_one()
    await store.keep("v1", b"one", 60)
    await store.keep("v2", b"two", 0.05)
    assert await store.recall("v1") == b"one"
    await asyncio.sleep(0.1)
    assert await store.recall("v2") is None and await store.recall("v3") is None
    await store.discard("v1")
    assert await store.recall("v1") is None


async def test_idle_sessions_expire(open_one: Open) -> None:
    store = await open_one(idle_ttl=0.3)
    await commit(store, await store.claim(fresh(), 0, 10), b"a")
    await asyncio.sleep(0.5)
    await store.sweep()
    assert await store.peek("k1") == (None, False)
    assert (await store.claim(fresh(), 0, 10)).epoch == 0


# ---- several processes ------------------------------------------------------------------------------------------


@pytest.fixture
async def shared(valkey: ValkeyProcess) -> AsyncIterator[Open]:
    client = Redis.from_url(valkey.url)
    await client.flushall()
    opened: list[SessionStore] = []

    async def run(**store: object) -> SessionStore:
        settings = Settings(
            model_path=Path("/m"),
            secret="0123456789abcdef",  # type: ignore[arg-type]
            store={"url": valkey.url, **store},  # type: ignore[arg-type]
        )
        opened.append(open_store(settings, lambda down: None))
        await opened[-1].open()
        return opened[-1]

    yield run
    for store in opened:
        await store.close()
    await client.aclose()


async def test_another_process_goes_on_with_the_session(shared: Open) -> None:
    one, two = await shared(), await shared()
    await commit(one, await one.claim(fresh(), 0, 10), b"a")
    lease = await two.claim(fresh(), 0, 10)
    assert lease.epoch == 1 and list(lease.session.ledger.turns) == [b"a".ljust(16)]
    with pytest.raises(SessionBusy):
        await one.claim(fresh(), 0.05, 10)
    await commit(two, lease, b"b")
    lease = await one.claim(fresh(), 0, 10)
    assert lease.epoch == 2 and len(lease.session.ledger.path(lease.session.ledger.head)) == 2
    assert await two.find(fresh().scope, [b"b".ljust(16)]) == (b"b".ljust(16), ["k1"])


async def test_an_overtaken_turn_writes_nothing(shared: Open) -> None:
    """A process that stood still beyond its lease comes back: the other one's turn stays."""
    one, two = await shared(lease=0.2), await shared(lease=0.2)
    stuck = await one.claim(fresh(), 0, 10)
    one._shared._stop_renewing(stuck)  # type: ignore[attr-defined]
    await asyncio.sleep(0.3)
    lease = await two.claim(fresh(), 0, 10)
    assert lease.epoch == 1
    with pytest.raises(LeaseLost):
        await commit(one, stuck, b"stuck")
    with pytest.raises(LeaseLost):
        await one.bump(stuck)
    await commit(two, lease, b"b")
    again = await two.claim(fresh(), 0, 10)
    assert list(again.session.ledger.turns) == [b"b".ljust(16)] and again.epoch == 2


async def test_a_lease_that_ran_out_unnoticed_still_commits(shared: Open) -> None:
    store = await shared(lease=0.1)
    lease = await store.claim(fresh(), 0, 10)
    store._shared._stop_renewing(lease)  # type: ignore[attr-defined]
    await asyncio.sleep(0.2)
    await commit(store, lease, b"a")
    assert (await store.claim(fresh(), 0, 10)).session.turns == 1


async def test_long_turns_keep_their_lease(shared: Open) -> None:
    one, two = await shared(lease=0.3), await shared(lease=0.3)
    lease = await one.claim(fresh(), 0, 10)
    with pytest.raises(SessionBusy):
        await two.claim(fresh(), 0.8, 10)
    await commit(one, lease, b"a")


async def test_every_key_has_a_prefix_and_a_time_to_live(shared: Open, valkey: ValkeyProcess) -> None:
    store = await shared()
    await commit(store, await store.claim(fresh(), 0, 10), b"a")
    await store.claim(fresh("k2"), 0, 10)
    await store.keep("v", b"x", 60)
    client = Redis.from_url(valkey.url)
    keys = [key async for key in client.scan_iter()]
    assert len(keys) > 8
    keys.remove(b"agentkv:v1:memory")
    for key in keys:
        assert key.startswith(b"agentkv:v1:")
        assert await client.pttl(key) > 0, key
    await client.aclose()


async def test_encrypted_ledgers_show_nothing_and_need_their_key(shared: Open, valkey: ValkeyProcess) -> None:
    store = await shared(ledger_key=LEDGER_KEY)
    await commit(store, await store.claim(fresh(), 0, 10), b"a")
    await store.keep("v", b"a secret text", 60)
    client = Redis.from_url(valkey.url)
    stored = await client.hvals("agentkv:v1:t:k1")
    assert stored and array("i", [1, 2, 70000]).tobytes() not in stored[0]
    assert b"secret" not in await client.get("agentkv:v1:v:v")
    await client.aclose()
    other = await shared(ledger_key=base64.b64encode(os.urandom(32)).decode())
    assert await other.recall("v") is None
    lease = await other.claim(fresh(), 0, 10)
    assert lease.session.ledger.turns == {}


def test_sealed_values_are_bound_to_their_place() -> None:
    seal = Seal(bytes(32))
    stored = seal.close(b"value", b"place")
    assert seal.open(stored, b"place") == b"value"
    for wrong, name in ((stored, b"other"), (stored[:-1] + b"x", b"place"), (b"\x01value", b"place")):
        with pytest.raises(SealError):
            seal.open(wrong, name)
    with pytest.raises(SealError):
        Seal(None).open(stored, b"place")


@pytest.mark.parametrize("parent", [None, b"p" * 16])
@pytest.mark.parametrize("calls", [(), ("c1",), ("c1", "c2")])
def test_turns_survive_packing(parent: bytes | None, calls: tuple[str, ...]) -> None:
    original = Turn(b"l" * 16, parent, array("i", range(1000)), array("i", [0, 1000, 3]), 1, b"r" * 16, calls)
    assert unpack_turn(b"l" * 16, pack_turn(original)) == original


# ---- without the server -----------------------------------------------------------------------------------------


@pytest.fixture
def mortal() -> Iterator[ValkeyProcess]:
    server = ValkeyProcess()
    server.start()
    yield server
    server.kill()


async def recovered(store: SessionStore) -> None:
    for _ in range(500):
        if not store.degraded:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the store was not found again")


async def written_back(store: SessionStore, memory: bytes) -> None:
    for _ in range(500):
        await asyncio.sleep(0.02)
        if not store.degraded and not store._changed and store._memory != memory:  # type: ignore[attr-defined]
            return
    raise AssertionError("the sessions were not written back")


@pytest.mark.parametrize("outage", ["killed", "frozen"])
async def test_sessions_go_on_while_the_server_is_gone(mortal: ValkeyProcess, outage: str) -> None:
    changes: list[bool] = []
    settings = Settings(
        model_path=Path("/m"),
        secret="0123456789abcdef",  # type: ignore[arg-type]
        store={"url": mortal.url, "timeout": 0.1},  # type: ignore[arg-type]
    )
    store = open_store(settings, changes.append)
    await store.open()
    await commit(store, await store.claim(fresh(), 0, 10), b"a")
    running = await store.claim(fresh("k2"), 0, 10)
    (mortal.kill if outage == "killed" else mortal.freeze)()
    started = time.monotonic()
    lease = await store.claim(fresh(), 0, 10)
    assert time.monotonic() - started < 2
    assert store.degraded and changes == [True]
    assert lease.epoch == 1 and list(lease.session.ledger.turns) == [b"a".ljust(16)]
    await commit(store, lease, b"b")
    # A turn that was leased before the outage keeps its session, and is recorded.
    with pytest.raises(SessionBusy):
        await store.claim(fresh("k2"), 0.05, 10)
    await commit(store, running, b"x")
    assert (await store.find(fresh().scope, [b"b".ljust(16)])) == (b"b".ljust(16), ["k1"])
    (mortal.start if outage == "killed" else mortal.thaw)()
    await recovered(store)
    assert changes == [True, False]
    other = open_store(settings, lambda down: None)
    for key, turns in (("k1", [b"a", b"b"]), ("k2", [b"x"])):
        session, busy = await other.peek(key)
        assert session is not None and not busy
        assert [t.link.strip() for t in session.ledger.path(session.ledger.head)] == turns
    lease = await store.claim(fresh(), 0, 10)
    assert lease.epoch >= 2 and not lease.local
    await commit(store, lease, b"c")
    await other.close()
    await store.close()


async def test_a_server_that_lost_its_memory_gets_the_sessions_back(mortal: ValkeyProcess) -> None:
    settings = Settings(
        model_path=Path("/m"),
        secret="0123456789abcdef",  # type: ignore[arg-type]
        store={"url": mortal.url},  # type: ignore[arg-type]
    )
    store = open_store(settings, lambda down: None)
    await store.open()
    await commit(store, await store.claim(fresh(), 0, 10), b"a")
    memory = store._memory  # type: ignore[attr-defined]
    mortal.kill()
    mortal.start()
    await written_back(store, memory)
    lease = await store.claim(fresh(), 0, 10)
    assert lease.epoch >= 1 and not lease.local and b"a".ljust(16) in lease.session.ledger.turns
    await commit(store, lease, b"b")
    await store.close()


async def test_a_server_that_is_absent_at_first_is_used_when_it_comes(mortal: ValkeyProcess) -> None:
    mortal.kill()
    settings = Settings(
        model_path=Path("/m"),
        secret="0123456789abcdef",  # type: ignore[arg-type]
        store={"url": mortal.url},  # type: ignore[arg-type]
    )
    store = open_store(settings, lambda down: None)
    await store.open()
    await commit(store, await store.claim(fresh(), 0, 10), b"a")
    assert store.degraded
    mortal.start()
    await recovered(store)
    other = open_store(settings, lambda down: None)
    assert (await other.peek("k1"))[0] is not None
    await other.close()
    await store.close()


async def test_idle_sessions_stay_small() -> None:
    import tracemalloc

    store = MemoryStore(3600, time.time)
    ids = array("i", [0])
    runs = array("i", [0, 1, 0])
    tracemalloc.start()
    count = 10_000
    before = tracemalloc.get_traced_memory()[0]
    for i in range(count):
        lease = await store.claim(fresh(f"{i:064x}"), 0, count + 1)
        lease.session.ledger.add(Turn(i.to_bytes(16, "big"), None, ids, runs, -1, b"", ()), 1000)
        await store.commit(lease)
    used = (tracemalloc.get_traced_memory()[0] - before) / count
    tracemalloc.stop()
    assert used < 2048, f"{used:.0f} bytes a session"
