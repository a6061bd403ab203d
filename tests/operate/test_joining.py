"""Workers that register themselves: signed, again and again, forgotten when they are gone."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentkv_serve import joining
from agentkv_serve.joining import PATH, SIGNATURE, Announcer, message, sign
from tests.gateway.conftest import Stack, Start, user
from tests.gateway.engine import FakeEngine
from tests.gateway.model_folder import byte_tokenizer
from tests.gateway.serving import Serving
from tests.gateway.valkey import ValkeyProcess

TOKEN = "a-token-of-some-length"
OPERATOR = {"authorization": "Bearer operator"}


@pytest.fixture
def stack(start: Start) -> Stack:
    """A gateway that knows no worker but lets them register."""
    return start(engines=0, join_token=TOKEN, admin_key="operator")


@pytest.fixture
def engine() -> Iterator[tuple[FakeEngine, str]]:
    double = FakeEngine(byte_tokenizer())
    with Serving(double.app) as serving:
        yield double, serving.url


def workers(stack: Stack) -> dict[str, Any]:
    data = stack.http.get("/admin/workers", headers=OPERATOR).json()["data"]
    return {worker["url"]: worker for worker in data}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@contextmanager
def announcing(stack: Stack, url: str, token: str = TOKEN) -> Iterator[Announcer]:
    announcer = Announcer([stack.url], token, url, f"{url}/health")
    thread = threading.Thread(target=announcer.run, daemon=True)
    thread.start()
    yield announcer
    announcer.stop()
    thread.join(20)
    assert not thread.is_alive()


def post(stack: Stack, body: bytes, token: str = TOKEN) -> httpx.Response:
    return stack.http.post(PATH, content=body, headers={SIGNATURE: sign(token, body)})


def test_a_worker_registers_serves_and_takes_leave(stack: Stack, engine: tuple[FakeEngine, str]) -> None:
    double, url = engine
    assert stack.post([user("Hello")]).status_code == 503
    with announcing(stack, url):
        until(lambda: url in workers(stack) and workers(stack)[url]["healthy"])
        assert stack.say([user("Hello")])["agentkv"]["state"] == "new"
    assert workers(stack) == {}
    assert len(double.requests) == 1


def test_a_worker_is_announced_only_once_it_is_healthy(stack: Stack, engine: tuple[FakeEngine, str]) -> None:
    double, url = engine
    double.loading = True
    with announcing(stack, url) as announcer:
        until(lambda: bool(announcer._known) is False and announcer._healthy() is False)
        assert workers(stack) == {}
        double.loading = False
        until(lambda: url in workers(stack))


def test_registering_again_changes_nothing(stack: Stack, engine: tuple[FakeEngine, str]) -> None:
    _, url = engine
    for _ in range(3):
        assert post(stack, message(url)).status_code == 200
    assert len(workers(stack)) == 1
    worker = next(iter(workers(stack).values()))
    stack.http.post(f"/admin/workers/{worker['id']}/drain", headers=OPERATOR)
    assert post(stack, message(url)).status_code == 200
    assert workers(stack)[url]["draining"] is True


def test_only_the_holder_of_the_token_can_register(
    stack: Stack, engine: tuple[FakeEngine, str], capfd: pytest.CaptureFixture[str]
) -> None:
    _, url = engine
    assert post(stack, message(url), "another-token-of-that-length").json()["error"]["code"] == "invalid_signature"
    assert stack.http.post(PATH, content=message(url)).status_code == 401
    forged = json.dumps({**json.loads(message(url)), "url": "http://10.0.0.1:1"}).encode()
    taken = stack.http.post(PATH, content=forged, headers={SIGNATURE: sign(TOKEN, message(url))})
    assert taken.status_code == 401 and workers(stack) == {}
    with announcing(stack, url, "another-token-of-that-length") as announcer:
        until(lambda: bool(announcer._known))
    assert "refused (401)" in capfd.readouterr().err


def test_an_old_message_is_worth_nothing(stack: Stack, engine: tuple[FakeEngine, str]) -> None:
    _, url = engine
    old = json.dumps({"url": url, "time": time.time() - 3600}).encode()
    assert post(stack, old).json()["error"]["code"] == "stale_announcement"
    first = message(url)
    leaving = message(url, leaving=True)
    assert post(stack, first).status_code == 200
    assert post(stack, first).json()["error"]["code"] == "stale_announcement"
    assert post(stack, leaving).status_code == 200 and workers(stack) == {}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"url": 1, "time": 1}',
        json.dumps({"url": "ftp://x", "time": time.time()}).encode(),
        json.dumps({"url": "http://u:p@x:1", "time": time.time()}).encode(),
        json.dumps({"url": "http://x:1", "time": time.time(), "key": "k"}).encode(),
    ],
)
def test_a_malformed_message_is_refused(stack: Stack, body: bytes) -> None:
    assert post(stack, body).status_code == 400


def test_a_long_message_is_refused(stack: Stack) -> None:
    assert post(stack, b" " * 5000).status_code == 413


def test_without_a_join_token_nobody_can_register(start: Start, engine: tuple[FakeEngine, str]) -> None:
    stack = start(engines=0)
    assert post(stack, message(engine[1])).status_code == 404


def test_a_configured_worker_stays_as_it_is(start: Start) -> None:
    stack = start(join_token=TOKEN, admin_key="operator")
    (url,) = workers(stack)
    for leaving in (False, True):
        assert post(stack, message(url, leaving=leaving)).status_code == 200
        assert [worker["id"] for worker in workers(stack).values()] == ["w0"]
        assert len(list(stack.runtime.registry)) == 1


def test_two_workers_of_one_name_are_told_apart_by_their_owner(start: Start, engine: tuple[FakeEngine, str]) -> None:
    _, url = engine
    taken = {"url": "http://127.0.0.1:1", "id": url.removeprefix("http://").replace(":", "-")}
    stack = start(engines=0, workers=[taken], join_token=TOKEN, admin_key="operator")
    reply = post(stack, message(url))
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "worker_exists")


def test_a_gateway_that_speaks_no_http_does_not_end_the_announcer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"what?\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        gateway = f"http://127.0.0.1:{server.getsockname()[1]}"
        announcer = Announcer([gateway], TOKEN, "http://w:1", f"{gateway}/health")
        announcer._tell(leaving=False)
        thread.join(20)
    assert "not reached" in announcer._known[gateway]


def test_who_is_down_and_silent_is_forgotten(
    start: Start, engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentkv_serve.gateway.runtime.FORGET_AFTER", 0.1)
    stack = start(engines=0, join_token=TOKEN, admin_key="operator", routing={"health_interval": 0.05})
    double, url = engine
    assert post(stack, message(url)).status_code == 200
    time.sleep(0.3)
    assert url in workers(stack), "a healthy worker stays, however silent"
    double.loading = True
    until(lambda: workers(stack) == {})


def test_the_token_may_stand_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTKV_JOIN_TOKEN", raising=False)
    assert joining.read_token() == ""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("AGENTKV_JOIN_TOKEN_FILE", str(tmp_path / "token"))
    assert joining.read_token() == TOKEN


def test_gateways_with_one_store_hear_of_one_anothers_workers(start: Start, engine: tuple[FakeEngine, str]) -> None:
    _, url = engine
    valkey = ValkeyProcess()
    valkey.start()
    try:
        shared = {"store": {"url": valkey.url}, "secret": "one-secret-for-both", "routing": {"health_interval": 0.05}}
        here, there = (start(engines=0, join_token=TOKEN, admin_key="operator", **shared) for _ in range(2))
        assert post(here, message(url)).status_code == 200
        until(lambda: url in workers(there) and workers(there)[url]["healthy"])
        assert there.say([user("Hello")])["agentkv"]["state"] == "new"
        assert post(there, message(url, leaving=True)).status_code == 200
        until(lambda: workers(here) == {})
    finally:
        valkey.kill()
