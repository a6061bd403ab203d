"""The whole product on one machine: engine workers and a gateway as child processes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from agentkv_serve.children import Child, ChildDied, free_port, port_is_free, uninterrupted
from agentkv_serve.engine.keys import ENVIRONMENT as ENGINE_KEY

PORT = 8000
AGENTKV = (sys.executable, "-m", "agentkv_serve")
# Text in an engine's log -> what it is doing from then on.
STAGES = (
    ("", "importing SGLang"),
    ("server_args=", "starting the scheduler"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "reserving KV memory"),
    ("max_total_num_tokens", "warming up"),
)

Report = Callable[[str, str], None]
"""Called with a child's name and what it is doing now, whenever that changes."""


class StackError(Exception):
    """The stack cannot be started as asked; the message says what to do."""


@dataclass(frozen=True)
class StackSettings:
    """What to start. `budget` is KV tokens per layer and KV head, `full` or `auto`; ports None mean free ones."""

    model: Path
    workers: int = 1
    budget: str = "4096"
    port: int | None = None
    engine_ports: tuple[int, ...] = ()
    engine_flags: tuple[str, ...] = ()
    start_seconds: float = 600.0


@dataclass(frozen=True)
class Stack:
    """A running stack. `engine_key` is the bearer key that every engine demands."""

    base_url: str
    engine_urls: tuple[str, ...]
    engine_key: str
    logs: Path
    children: tuple[Child, ...]

    def check(self) -> None:
        """Raises:
        ChildDied: one of the children has exited.
        """
        for child in self.children:
            child.check()


@contextlib.contextmanager
def running(settings: StackSettings, report: Report = lambda name, text: None) -> Iterator[Stack]:
    """Starts engines and gateway, yields once all are healthy, and stops every child on the way out.

    Raises:
        StackError: a given port is taken, or a child is not healthy in time.
        ChildDied: a child ended, while starting or while the stack was in use and something failed for it.
    """
    engine_ports, port = choose_ports(settings)
    key = secrets.token_hex(16)
    logs = Path(tempfile.mkdtemp(prefix="agentkv-"))
    engine_urls = tuple(f"http://127.0.0.1:{p}" for p in engine_ports)
    deadline = time.monotonic() + settings.start_seconds
    children: list[Child] = []
    failed = False
    try:
        for i, engine_port in enumerate(engine_ports):
            name = "engine" if settings.workers == 1 else f"engine {i}"
            command = [*AGENTKV, "engine", "--model-path", str(settings.model), "--port", str(engine_port)]
            command += settings.engine_flags
            with_key = {**os.environ, ENGINE_KEY: key}  # a command line is everybody's to read
            children.append(Child(name, command, logs / f"engine-{i}.log", with_key))
        for engine, url in zip(children, engine_urls, strict=True):
            await_healthy(engine, f"{url}/health", key, deadline, report)
        environment = {
            **os.environ,
            "AGENTKV_GATEWAY_MODEL_PATH": str(settings.model),
            "AGENTKV_GATEWAY_PORT": str(port),
            "AGENTKV_GATEWAY_WORKERS": json.dumps([{"url": url} for url in engine_urls]),
            "AGENTKV_GATEWAY_WORKER_KEY": key,
            "AGENTKV_GATEWAY_BUDGET__DEFAULT": settings.budget,
        }
        gateway = Child("gateway", [*AGENTKV, "gateway"], logs / "gateway.log", environment)
        children.append(gateway)
        await_healthy(gateway, f"http://127.0.0.1:{port}/readyz", "", deadline, report)
        yield Stack(f"http://127.0.0.1:{port}", engine_urls, key, logs, tuple(children))
    except (StackError, ChildDied):
        failed = True
        raise
    except Exception:  # a child's death explains a failed call better than the call's own error
        failed = True
        for child in children:
            child.check()
        raise
    finally:
        with uninterrupted():
            for child in reversed(children):  # the gateway first: it lets running turns end
                child.stop()
            if not failed:  # else the logs are what the user needs next
                shutil.rmtree(logs, ignore_errors=True)


def choose_ports(settings: StackSettings) -> tuple[list[int], int]:
    """Returns the engines' ports and the gateway's: the given ones checked, the others free."""
    if len(settings.engine_ports) > settings.workers:
        raise StackError(f"{len(settings.engine_ports)} engine ports given for {settings.workers} workers")
    given = [*settings.engine_ports, *([] if settings.port is None else [settings.port])]
    if len(set(given)) < len(given):
        raise StackError(f"the same port is given twice: {given}")
    for taken in (port for port in given if not port_is_free(port)):
        raise StackError(f"port {taken} is in use: give another one, or none to have a free one chosen")
    port = free_port(0 if PORT in given else PORT) if settings.port is None else settings.port
    engines = list(settings.engine_ports)
    while len(engines) < settings.workers:
        candidate = free_port()
        if candidate not in (*engines, port):
            engines.append(candidate)
    return engines, port


def await_healthy(child: Child, url: str, key: str, deadline: float, report: Report) -> None:
    """Returns once `url` answers 200; says on the way what the child is doing. `deadline` is of `time.monotonic`.

    Raises:
        StackError: not in time.
        ChildDied: the child has exited.
    """
    stage = ""
    with httpx.Client(headers={"authorization": f"Bearer {key}"} if key else {}, trust_env=False) as client:
        while time.monotonic() < deadline:
            child.check()
            now = _stage(child.text()) if child.name.startswith("engine") else "starting"
            if now != stage:
                stage = now
                report(child.name, stage)
            with contextlib.suppress(httpx.TransportError):
                if client.get(url, timeout=5).status_code == 200:
                    report(child.name, "ready")
                    return
            time.sleep(0.25)
    raise StackError(f"{child.name} is not healthy in time. {child.log} ends:\n{child.tail()}")


def _stage(log: str) -> str:
    return [text for mark, text in STAGES if mark in log][-1]
