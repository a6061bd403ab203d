"""Every store keeps the same rules: in process, in a real Valkey, and in Valkey with encrypted ledgers."""

from __future__ import annotations

import asyncio
import base64
import time
from array import array
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from agentkv_serve.gateway.sessions.ledger import Turn
from agentkv_serve.gateway.sessions.memory import MemoryStore
from agentkv_serve.gateway.sessions.opening import open_store
from agentkv_serve.gateway.sessions.session import Head
from agentkv_serve.gateway.sessions.store import CALL_MARK, LeaseLost, SessionBusy, SessionStore, TooManySessions
from tests.gateway.stores import Open, commit, fresh, store_settings, turn
from tests.gateway.valkey import ValkeyProcess

LEDGER_KEY = base64.b64encode(bytes(range(32))).decode()


@pytest.fixture(params=["memory", "valkey", "valkey, encrypted"])
async def open_one(request: pytest.FixtureRequest, valkey: ValkeyProcess) -> AsyncIterator[Open]:
    """Opens stores of one kind; those in Valkey share their sessions."""
    opened: list[SessionStore] = []
    if request.param != "memory":
        client = Redis.from_url(valkey.url)
        await client.flushall()
        await client.aclose()

    async def run(**sessions: float) -> SessionStore:
        url = None if request.param == "memory" else valkey.url
        key = LEDGER_KEY if "encrypted" in request.param else None
        opened.append(open_store(store_settings(url, sessions=sessions, ledger_key=key), lambda down: None))
        await opened[-1].open()
        return opened[-1]

    yield run
    for store in opened:
        await store.close()


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


async def test_residence_is_told_of_every_worker_that_is_asked_for(open_one: Open) -> None:
    store = await open_one()
    await commit(store, await store.claim(fresh("k1"), 0, 10), b"a", tokens=100)
    await commit(store, await store.claim(fresh("k2"), 0, 10), b"b", tokens=30, worker="w1")
    expected = {"w0": 100, "w1": 30}
    for workers in (["w0"], ["w1"], ["w0", "w1"]):
        found = await store.resident(workers)
        assert [found.get(worker) for worker in workers] == [expected[worker] for worker in workers]


async def test_a_session_that_makes_room_is_held_nowhere(open_one: Open) -> None:
    store = await open_one()
    await commit(store, await store.claim(fresh("k1"), 0, 1), b"a", tokens=100)
    await commit(store, await store.claim(fresh("k2"), 0, 1), b"b", tokens=30)
    assert (await store.peek("k1"))[0] is None
    assert (await store.resident(["w0"]))["w0"] == 30 and await store.count() == 1
    assert [session.key for session in await store.on_worker("w0")] == ["k2"]


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
