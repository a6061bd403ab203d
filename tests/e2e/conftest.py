"""Servers and models that the end-to-end tests share. An engine takes half a minute to start: each starts once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "models"))
pytest.register_assert_rewrite("duel")

from fleet import PAGED, Arena, Fleet  # noqa: E402
from tiny_models import write_model  # noqa: E402

from agentkv_serve.model import default_model  # noqa: E402


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


@pytest.fixture(scope="session")
def arena(fleet: Fleet, tiny: Callable[..., Path]) -> Arena:
    """A tiny model with pages of 16 and prefill chunks of 256, strict checks on."""
    folder = tiny("llama-gqa")
    return Arena.of(fleet.agentkv(folder, *PAGED), folder)


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
