"""The servers that benchmarks measure: stock SGLang, and SGLang with the AgentKV cache, one process each."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentkv_serve.children import Child, free_port
from agentkv_serve.stack import AGENTKV, Report, await_healthy

Kind = Literal["stock", "agentkv"]

CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--max-running-requests", "32", "--sleep-on-idle"),
)
"""What stock SGLang needs to run on a CPU; the rest of its settings are its own defaults."""

_USAGE = re.compile(r"(?:Prefill|Decode) batch.*?token usage: ([0-9.]+)")
_QUEUE = re.compile(r"#queue-req: (\d+)")


@dataclass(frozen=True)
class EngineSettings:
    """One server. `pool` is its KV pool in tokens (None: as SGLang plans it), `chunk` a prefill chunk's tokens."""

    kind: Kind
    model: Path
    pool: int | None = None
    chunk: int | None = None
    flags: tuple[str, ...] = ()
    start_seconds: float = 900.0

    def command(self, port: int, key: str, gpu: bool) -> list[str]:
        """The command line of the server."""
        # --enable-streaming-session changes nothing for plain requests: one stock server answers in both settings.
        if self.kind == "stock":
            own = ["--enable-streaming-session", "--enable-cache-report", *(() if gpu else self._cpu_flags())]
            words = [sys.executable, "-P", "-m", "sglang.launch_server", "--host", "127.0.0.1", *own]
        else:
            words = [*AGENTKV, "engine", "--no-agentkv-metrics"]  # as the stock one: counting costs a little
        words += ["--model-path", str(self.model), "--port", str(port), "--api-key", key]
        words += [] if self.pool is None else ["--max-total-tokens", str(self.pool)]
        words += [] if self.chunk is None else ["--chunked-prefill-size", str(self.chunk)]
        return [*words, *self.flags]

    def _cpu_flags(self) -> Iterator[str]:
        from agentkv_serve.engine.launch import cpu_dtype

        yield from CPU_FLAGS
        if not any(flag.split("=")[0] == "--dtype" for flag in self.flags):  # as the server with the cache chooses it
            for flag, value in cpu_dtype(self.model).items():
                yield from (flag, value)

    def environment(self, gpu: bool) -> dict[str, str]:
        """The environment of the server: a stock one loads our CPU platform (torch alone does the work) and no more."""
        if self.kind == "agentkv":
            return dict(os.environ)
        platform = {} if gpu else {"SGLANG_PLATFORM": "agentkv_cpu"}
        return {**os.environ, "SGLANG_PLUGINS": "agentkv_cpu", "PYTHONSAFEPATH": "1", **platform}


@dataclass(frozen=True)
class Engine:
    """A running server."""

    kind: Kind
    url: str
    key: str
    child: Child

    @property
    def headers(self) -> dict[str, str]:
        """What every request must carry."""
        return {"authorization": f"Bearer {self.key}"}

    def log_size(self) -> int:
        """Bytes that the server has logged so far."""
        return self.child.log.stat().st_size

    def pressure(self, since: int) -> Pressure:
        """What the server logged about its pool from byte `since` on."""
        with self.child.log.open("rb") as log:
            log.seek(since)
            return Pressure.read(log.read().decode(errors="replace"))

    def scheduler_pid(self) -> int:
        """The process that runs the model: the descendant that used the most CPU time.

        Raises:
            ProcessLookupError: the server has no descendants.
        """
        return max(_descendants(self.child.pid), key=cpu_seconds, default=0) or _no_scheduler(self.child.pid)


@dataclass(frozen=True)
class Pressure:
    """How full the KV pool was (shares of it that could not be evicted), and what had to wait or to start over."""

    usage_mean: float
    usage_max: float
    queue_max: int
    retractions: int

    @classmethod
    def read(cls, log: str) -> Pressure:
        """From SGLang's lines about prefill and decode batches."""
        usage = [float(value) for value in _USAGE.findall(log)]
        queue = [int(value) for value in _QUEUE.findall(log)]
        return cls(
            usage_mean=sum(usage) / len(usage) if usage else 0.0,
            usage_max=max(usage, default=0.0),
            queue_max=max(queue, default=0),
            retractions=log.count("Retract requests"),
        )


@contextlib.contextmanager
def running(settings: EngineSettings, folder: Path, report: Report, gpu: bool = False) -> Iterator[Engine]:
    """Starts a server with its log in `folder`, yields it once it is healthy, and stops it on the way out.

    Raises:
        StackError: it is not healthy in time.
        ChildDied: it ended while starting.
    """
    port, key = free_port(), secrets.token_hex(16)
    command, environment = settings.command(port, key, gpu), settings.environment(gpu)
    log = folder / f"{settings.kind}-{port}.log"
    child = Child(f"engine ({settings.kind})", command, log, environment)
    try:
        url = f"http://127.0.0.1:{port}"
        await_healthy(child, f"{url}/health", key, time.monotonic() + settings.start_seconds, report)
        yield Engine(settings.kind, url, key, child)
    finally:
        child.stop()


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, 0 when it is gone."""
    total = 0
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _no_scheduler(pid: int) -> int:
    raise ProcessLookupError(f"server {pid} has started no scheduler")
