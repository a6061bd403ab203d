"""Servers and models that the end-to-end tests share. An engine takes half a minute to start, so each is started once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "models"))

from server import STOCK_ENV, Server, agentkv_command, stock_command
from tiny_models import write_model

from agentkv_serve.model import default_model

FP32 = ("--dtype", "float32")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's folder (`agentkv model` makes it)."""
    return default_model()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny(name) is the folder of a tiny random model."""
    root = tmp_path_factory.mktemp("models")

    def make(name: str, **overrides: Any) -> Path:
        folder = root / "-".join([name, *(f"{key}{value}" for key, value in overrides.items())])
        return folder if (folder / "config.json").exists() else write_model(folder, name, **overrides)

    return make


class Fleet:
    """Starts servers on demand, each kind once; `stop` ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: dict[tuple[str, ...], Server] = {}

    def stock(self, model: Path, *flags: str, **env: str) -> Server:
        """SGLang without the plug-in."""
        return self._get(stock_command(model, *FP32, *flags), {**STOCK_ENV, **env})

    def agentkv(self, model: Path, *flags: str, **env: str) -> Server:
        """SGLang with the plug-in; `server.dumps` is the folder where its compactions are written."""
        dumps = self.folder / f"dumps-{len(self.servers)}"
        server = self._get(agentkv_command(model, *FP32, *flags), {"AGENTKV_DUMP": str(dumps), **env})
        if not hasattr(server, "dumps"):
            server.dumps = dumps
        return server

    def _get(self, command: list[str], env: dict[str, str]) -> Server:
        key = (*command, *(f"{name}={env[name]}" for name in sorted(env) if name != "AGENTKV_DUMP"))
        server = self.servers.get(key)
        if server is None or server.process.poll() is not None:
            server = self.servers[key] = Server(command, env, self.folder)
        return server

    def stop(self, keep: set[tuple[str, ...]] = frozenset()) -> None:
        for key in [key for key in self.servers if key not in keep]:
            self.servers.pop(key).stop()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Servers that live as long as the test run."""
    fleet = Fleet(tmp_path_factory.mktemp("servers"))
    yield fleet
    fleet.stop()


@pytest.fixture(scope="module")
def module_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Servers that end with the module."""
    fleet = Fleet(tmp_path_factory.mktemp("servers"))
    yield fleet
    fleet.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test shows the end of the log of every server that it could have used."""
    report = yield
    if report.failed:
        for name in ("fleet", "module_fleet"):
            fleet = getattr(item, "funcargs", {}).get(name)
            for server in fleet.servers.values() if fleet else ():
                report.sections.append((f"server on port {server.port}", server.tail()))
    return report
