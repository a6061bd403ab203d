"""Several gateway processes on one Valkey: leases, fences, what stands there."""

from __future__ import annotations

import asyncio
import base64
import os
from array import array
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from agentkv_serve.gateway.sessions.opening import open_store
from agentkv_serve.gateway.sessions.store import LeaseLost, SessionBusy, SessionStore
from tests.gateway.stores import Open, commit, fresh, store_settings
from tests.gateway.valkey import ValkeyProcess

LEDGER_KEY = base64.b64encode(bytes(range(32))).decode()


@pytest.fixture
async def shared(valkey: ValkeyProcess) -> AsyncIterator[Open]:
    client = Redis.from_url(valkey.url)
    await client.flushall()
    opened: list[SessionStore] = []

    async def run(**store: object) -> SessionStore:
        opened.append(open_store(store_settings(valkey.url, **store), lambda down: None))
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


async def test_a_new_life_of_a_session_is_not_taken_for_the_old_one(shared: Open) -> None:
    """As many commits as before do not make the ledger that another process remembers the current one."""
    one, two = await shared(), await shared()
    await commit(one, await one.claim(fresh(), 0, 10), b"old")
    await two.delete("k1")
    await commit(two, await two.claim(fresh(), 0, 10), b"new")
    lease = await one.claim(fresh(), 0, 10)
    assert list(lease.session.ledger.turns) == [b"new".ljust(16)] and lease.session.ledger.head == b"new".ljust(16)


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
