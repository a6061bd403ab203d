"""A real gateway in front of engine doubles, all on real ports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentkv_serve.gateway.app import create_app
from agentkv_serve.gateway.runtime import Runtime
from agentkv_serve.gateway.sessions.rendering import Renderer
from agentkv_serve.gateway.settings import Settings
from tests.gateway.engine import Body, FakeEngine
from tests.gateway.model_folder import byte_tokenizer, write_model_folder
from tests.gateway.serving import Serving
from tests.gateway.valkey import ValkeyProcess


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyProcess]:
    """A Valkey that no test stops."""
    server = ValkeyProcess()
    server.start()
    yield server
    server.kill()


class Stack:
    """A gateway and its engines."""

    def __init__(self, engines: list[FakeEngine], servers: list[Serving], gateway: Serving, app: Any) -> None:
        self.engines = engines
        self.servers = servers
        self.url = gateway.url
        self.app = app
        self.runtime: Runtime = app.state.runtime
        self.http = httpx.Client(base_url=gateway.url, timeout=20)

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    def post(self, messages: list[Body], *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """One chat request that is not streamed."""
        body = {"model": "tiny", "messages": messages, **fields}
        return self.http.post("/v1/chat/completions", json=body, headers=headers)

    def say(self, messages: list[Body], *, headers: dict[str, str] | None = None, **fields: Any) -> Body:
        """A chat turn that must succeed: appends the assistant's message to `messages`, returns the reply."""
        reply = self.post(messages, headers=headers, **fields)
        assert reply.status_code == 200, reply.text
        body = reply.json()
        messages.append(body["choices"][0]["message"])
        return {**body, "headers": reply.headers, "agentkv": body["usage"]["agentkv"]}

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


Start = Callable[..., Stack]


def starter(model_folder: Path, running: ExitStack) -> Start:
    """Starts stacks that end with `running`; keyword arguments are gateway settings."""

    def run(engines: int = 1, **settings: Any) -> Stack:
        doubles = [FakeEngine(byte_tokenizer()) for _ in range(engines)]
        servers = [running.enter_context(Serving(double.app)) for double in doubles]
        workers = [{"url": server.url, "id": f"w{i}"} for i, server in enumerate(servers)]
        app = create_app(Settings(**{"model_path": model_folder, "workers": workers, **settings}))
        gateway = running.enter_context(Serving(app))
        stack = Stack(doubles, servers, gateway, app)
        running.callback(stack.http.close)
        return stack

    return run


@pytest.fixture(scope="session", autouse=True)
def one_renderer_for_each_model() -> Iterator[None]:
    """Tables of a vocabulary are built once, not for every gateway of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Renderer, "load", functools.cache(Renderer.load))
        yield


@pytest.fixture
def start(model_folder: Path) -> Iterator[Start]:
    """Starts stacks: `start(engines=2, api_key="k", …)`; keyword arguments are gateway settings."""
    with ExitStack() as running:
        yield starter(model_folder, running)


@pytest.fixture
def stack(start: Start) -> Stack:
    """One gateway with one engine and the default settings."""
    return start()


@pytest.fixture(scope="module")
def _shared(model_folder: Path) -> Iterator[Stack]:
    with ExitStack() as running:
        yield starter(model_folder, running)()


@pytest.fixture
def shared(_shared: Stack) -> Stack:
    """As `stack`, but one for all tests of a module that do not mind the sessions of others."""
    _shared.engine.forget()
    return _shared


def user(text: str) -> Body:
    return {"role": "user", "content": text}


def system(text: str) -> Body:
    return {"role": "system", "content": text}


def tool_result(call_id: str, text: str) -> Body:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


WEATHER: Body = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
