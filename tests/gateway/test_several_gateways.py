"""Two gateways that share a Valkey behave as one, and go on when it is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.conftest import Stack, Start, user
from tests.gateway.engine import FakeEngine
from tests.gateway.test_bad_input import expect
from tests.gateway.test_leaving import wait_for
from tests.gateway.valkey import ValkeyProcess

EXHAUSTED = "session_budget_exhausted"
ADMIN = {"authorization": "Bearer operator"}


@pytest.fixture
def valkey() -> Iterator[ValkeyProcess]:
    server = ValkeyProcess()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def pair(start: Start, valkey: ValkeyProcess) -> tuple[Stack, Stack]:
    """Two gateways; the second has the workers of the first only by what they share."""
    settings = {
        "store": {"url": valkey.url, "timeout": 0.25},
        "secret": "one-secret-for-both",
        "admin_key": "operator",
        "routing": {"health_interval": 0.1},
    }
    one = start(**settings)
    two = start(engines=0, **settings)
    body = {"url": one.servers[0].url, "id": "shared"}
    assert two.http.post("/admin/workers", json=body, headers=ADMIN).status_code == 201
    return one, two


def test_a_session_goes_on_at_the_other_gateway(pair: tuple[Stack, Stack]) -> None:
    one, two = pair
    wait_for(lambda: (w := one.runtime.registry.get("shared")) and w.healthy)
    one.http.delete("/admin/workers/w0", headers=ADMIN)
    messages = [user("Hi")]
    states = []
    for turn in range(4):
        reply = pair[turn % 2].say(messages)
        states.append((reply["agentkv"]["state"], reply["headers"]["x-agentkv-session-source"]))
        messages.append(user(f"More {turn}"))
    assert states == [("new", "issued"), *[("resumed", "content")] * 3]
    assert [FakeEngine.control(r)["epoch"] for r in one.engine.requests] == [0, 1, 2, 3]  # type: ignore[index]
    session = reply["headers"]["x-agentkv-session"]
    assert two.http.delete(f"/v1/agentkv/sessions/{session}").status_code == 204
    assert one.http.get(f"/v1/agentkv/sessions/{session}").status_code == 404
    assert one.say(messages)["agentkv"]["state"] == "new"


def test_workers_are_shared(pair: tuple[Stack, Stack]) -> None:
    one, two = pair
    wait_for(lambda: (w := one.runtime.registry.get("shared")) and w.healthy)
    assert one.http.post("/admin/workers/shared/drain", headers=ADMIN).json()["draining"]
    wait_for(lambda: two.runtime.registry.get("shared").draining)  # type: ignore[union-attr]
    expect(two.post([user("Hi")]), 503, "no_worker_available")
    two.http.post("/admin/workers/shared/undrain", headers=ADMIN)
    assert two.say([user("Hi")])["agentkv"]["state"] == "new"
    assert one.http.delete("/admin/workers/shared", headers=ADMIN).status_code == 204
    wait_for(lambda: two.runtime.registry.get("shared") is None)
    assert [w.id for w in one.runtime.registry] == ["w0"]


@pytest.mark.parametrize("outage", ["killed", "frozen"])
def test_pinned_sessions_go_on_without_valkey(pair: tuple[Stack, Stack], valkey: ValkeyProcess, outage: str) -> None:
    _, two = pair
    messages = [user("Hi")]
    headers = {"X-AgentKV-Session": "s"}
    limit = {"X-AgentKV-Session-Token-Limit": "2000"}
    two.say(messages, headers={**headers, **limit})
    (valkey.kill if outage == "killed" else valkey.freeze)()
    for turn in range(4):
        messages.append(user(f"More {turn}"))
        reply = two.say(messages, headers=headers)
        assert reply["agentkv"]["state"] == "resumed"
        assert reply["headers"]["x-agentkv-session-source"] == "header"
    # The session's own limit still holds: this process knows what was spent.
    spent = two.http.get("/v1/agentkv/sessions/s").json()["tokens_used"]
    expect(two.post(messages, headers={**headers, "X-AgentKV-Session-Token-Limit": str(spent)}), 402, EXHAUSTED)
    assert two.say(messages, headers={**headers, **limit})["agentkv"]["state"] in ("resumed", "rebuilt")
    messages.append(user("More"))
    ready = two.http.get("/readyz")
    assert (ready.status_code, ready.json()["status"], ready.json()["store"]) == (200, "degraded", "down")
    assert two.metric("agentkv_store_down") == 1
    assert two.http.get("/healthz").status_code == 200
    expect(two.http.delete("/admin/workers/shared", headers=ADMIN), 503, "store_down")
    (valkey.start if outage == "killed" else valkey.thaw)()
    wait_for(lambda: two.http.get("/readyz").json()["status"] == "ready")
    messages.append(user("Again"))
    assert two.say(messages, headers=headers)["agentkv"]["state"] == "resumed"
    assert two.metric("agentkv_store_down") == 0
