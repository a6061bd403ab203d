"""The breaker, and the choice of a worker."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.routing.breaker import Breaker
from agentkv_serve.gateway.routing.placement import place, place_pinned
from agentkv_serve.gateway.routing.registry import Registry
from agentkv_serve.gateway.routing.worker import Worker
from agentkv_serve.gateway.settings import RoutingSettings, WorkerSettings
from tests.gateway.conftest import Start, user
from tests.gateway.engine import Answer

SETTINGS = RoutingSettings(breaker_failures=3, breaker_window=10, breaker_rest=5)

STAYS_OPEN = RoutingSettings(breaker_failures=3, breaker_rest=1e6)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_breaker_opens_rests_and_tries_one() -> None:
    clock = Clock()
    breaker = Breaker(SETTINGS, clock)
    for _ in range(2):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows() and breaker.state == "open"
    clock.now = 5
    assert breaker.allows() and breaker.state == "half-open"
    breaker.chosen()
    assert not breaker.allows()
    breaker.failed()
    assert breaker.state == "open"
    clock.now = 10
    breaker.chosen()
    breaker.let_go()
    assert breaker.allows()
    breaker.chosen()
    breaker.succeeded()
    assert breaker.state == "closed"


def test_old_failures_do_not_count() -> None:
    clock = Clock()
    breaker = Breaker(SETTINGS, clock)
    for now in (0, 6, 12, 18):
        clock.now = now
        breaker.failed()
        assert breaker.allows()


def worker(name: str, **fields: Any) -> Worker:
    made = Worker.of(WorkerSettings(url=f"http://{name}:1", id=name), None, STAYS_OPEN)
    made.healthy, made.models = True, ("m",)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def broken(name: str) -> Worker:
    made = worker(name)
    for _ in range(3):
        made.breaker.failed()
    return made


@pytest.mark.parametrize(
    ("workers", "options", "expected"),
    [
        ([worker("a"), worker("b")], {"resident": {"a": 10, "b": 5}}, "b"),
        ([worker("a"), worker("b")], {"resident": {"a": 10, "b": 5}, "pinned": "a"}, "a"),
        ([worker("a", reserved=10), worker("b")], {"resident": {"b": 5}}, "b"),
        ([worker("a", inflight=2), worker("b", inflight=1)], {}, "b"),
        ([worker("a", healthy=False), worker("b")], {"pinned": "a"}, "b"),
        ([broken("a"), worker("b")], {"pinned": "a"}, "b"),
        ([worker("a", draining=True), worker("b")], {"resident": {"b": 50}}, "b"),
        ([worker("a", draining=True), worker("b")], {"pinned": "a"}, "a"),
        ([worker("a"), worker("b")], {"pinned": "a", "tried": ("a",)}, "b"),
        ([worker("a", models=("other",)), worker("b")], {"pinned": "a"}, "b"),
        ([worker("a", inflight=4), worker("b")], {"pinned": "a", "saturated": 4}, "b"),
        ([worker("a", inflight=4), worker("b", inflight=4)], {"pinned": "a", "saturated": 4}, "a"),
        ([worker("a", inflight=4), worker("b", inflight=9)], {"saturated": 10}, "a"),
        ([worker("a"), worker("b", inflight=9)], {"saturated": 9, "resident": {"a": 99}}, "a"),
    ],
)
def test_placement(workers: list[Worker], options: dict[str, Any], expected: str) -> None:
    given = {"pinned": "", "resident": {}, **options}
    assert place(workers, "m", **given).id == expected  # type: ignore[arg-type]
    # What the pin alone decides is what looking at all workers decides.
    registry = Registry(workers, client=None)  # type: ignore[arg-type]
    del given["resident"]
    pinned = place_pinned(registry, "m", **given)
    assert pinned is None or pinned.id == expected == given["pinned"]


def test_a_pinned_worker_with_room_is_found_without_the_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = start(engines=2)
    messages = [user("Hi")]
    home = stack.say(messages)["headers"]["x-agentkv-worker"]
    messages.append(user("More"))

    def place(*_: Any, **__: Any) -> Worker:
        raise AssertionError("all workers were looked at")

    monkeypatch.setattr("agentkv_serve.gateway.turns.dispatch.place", place)
    assert stack.say(messages)["headers"]["x-agentkv-worker"] == home


def test_workers_may_come_and_go_while_they_are_looked_at() -> None:
    registry = Registry([worker("a"), worker("b")], client=None)  # type: ignore[arg-type]
    seen = []
    for each in registry:
        seen.append(each.id)
        registry.remove("b")
        registry.add(worker(f"new-{len(seen)}"))
    assert seen == ["a", "b"]


def test_models_are_counted_anew_when_workers_change() -> None:
    registry = Registry([worker("a", context_length=100)], client=None)  # type: ignore[arg-type]
    assert registry.models() == {"m": 100}
    registry.add(worker("b", context_length=50, models=("m", "n")))
    assert registry.models() == {"m": 50, "n": 50}
    registry.remove("b")
    assert registry.models() == {"m": 100}


@pytest.mark.parametrize("workers", [[], [worker("a", healthy=False)], [broken("a")], [worker("a", draining=True)]])
def test_no_worker_is_said_so(workers: list[Worker]) -> None:
    with pytest.raises(ApiError) as caught:
        place(workers, "m", pinned="", resident={})  # type: ignore[arg-type]
    assert caught.value.status == 503


def test_broken_streams_open_the_breaker_and_sessions_move(start: Start) -> None:
    stack = start(engines=2, routing={"breaker_failures": 2, "breaker_rest": 60, "health_interval": 60})
    messages = [user("Hi")]
    home = int(stack.say(messages, headers={"X-AgentKV-Session": "s"})["headers"]["x-agentkv-worker"][1])
    messages.append(user("More"))
    stack.engines[home].script = lambda body: Answer("one two", die_after=1)
    for _ in range(2):
        stack.post(messages, headers={"X-AgentKV-Session": "s"}, stream=True)
    reply = stack.say(messages, headers={"X-AgentKV-Session": "s"})
    assert (reply["agentkv"]["state"], reply["headers"]["x-agentkv-worker"]) == ("moved", f"w{1 - home}")


@pytest.mark.parametrize(("affinity", "moves"), [("soft", True), ("hard", False)])
def test_a_saturated_worker_is_left_by_soft_sessions_only(start: Start, affinity: str, moves: bool) -> None:
    stack = start(engines=2, routing={"saturated": 1})
    messages = [user("Hi")]
    home = stack.say(messages, headers={"X-AgentKV-Session": "s"})["headers"]["x-agentkv-worker"]
    stack.runtime.registry.get(home).inflight += 1  # type: ignore[union-attr]
    messages.append(user("More"))
    reply = stack.say(messages, headers={"X-AgentKV-Session": "s", "X-AgentKV-Affinity": affinity})
    assert (reply["headers"]["x-agentkv-worker"] != home) is moves
    assert stack.post(messages, headers={"X-AgentKV-Affinity": "sticky"}).status_code == 400
