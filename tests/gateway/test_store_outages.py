"""Sessions without their shared store: while it is gone, when it comes back, when it comes late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from agentkv_serve.gateway.sessions.opening import open_store
from agentkv_serve.gateway.sessions.store import Lease, SessionBusy, SessionStore, StoreDown
from tests.gateway.stores import commit, fresh, store_settings
from tests.gateway.valkey import ValkeyProcess


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
    settings = store_settings(mortal.url, timeout=0.1)
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
    settings = store_settings(mortal.url)
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
    settings = store_settings(mortal.url)
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


async def test_what_was_deleted_meanwhile_does_not_come_back(mortal: ValkeyProcess) -> None:
    settings = store_settings(mortal.url, timeout=0.1)
    store = open_store(settings, lambda down: None)
    await store.open()
    for key in ("k1", "k2"):
        await commit(store, await store.claim(fresh(key), 0, 10), b"a")
    await store.keep("v1", b"one", 60)
    mortal.freeze()
    await store.delete("k1")
    await store.delete("k2")
    await store.discard("v1")
    assert store.degraded
    await commit(store, await store.claim(fresh("k2"), 0, 10), b"b")  # the id is used again
    mortal.thaw()
    await recovered(store)
    other = open_store(settings, lambda down: None)
    assert await other.peek("k1") == (None, False)
    again, _ = await other.peek("k2")
    assert again is not None and [turn.link.strip() for turn in again.ledger.turns.values()] == [b"b"]
    assert await other.recall("v1") is None
    await other.close()
    await store.close()


async def test_a_session_is_free_when_writing_it_back_failed_once(
    mortal: ValkeyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = store_settings(mortal.url, timeout=0.1)
    store = open_store(settings, lambda down: None)
    await store.open()
    mortal.freeze()
    await commit(store, await store.claim(fresh(), 0, 10), b"a")
    assert store.degraded
    commit_there = store._shared.commit  # type: ignore[attr-defined]
    failed: list[Lease] = []

    async def fails_once(lease: Lease) -> None:
        if not failed:
            failed.append(lease)
            raise StoreDown("gone again")
        await commit_there(lease)

    monkeypatch.setattr(store._shared, "commit", fails_once)  # type: ignore[attr-defined]
    mortal.thaw()
    await recovered(store)
    assert failed and not store._changed  # type: ignore[attr-defined]
    lease = await store.claim(fresh(), 0, 10)
    assert not lease.local
    await commit(store, lease, b"b")
    await store.close()
