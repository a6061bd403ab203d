"""`agentkv bench gateway`: what a request and a streamed chunk cost on their way through the gateway.

The same requests go straight to a worker that costs next to nothing, through a proxy that does nothing (the floor: the
gateway's own HTTP server and client), through our gateway (with API key, session, and the labelling of what was
appended), and through the router of SGLang, if that is to be had. Each proxy has a core of its own while it is
measured; load and worker share another.

`runs`: bodies of some KB, 1 KB of them new. Times are those to the first content frame while as many streams run, each
paced as a model paces it, so that nothing is saturated. Requests and chunks per second, and CPU, are of replies that
the worker gives at once. `small`: requests of 1 KB, 0.25 KB of it new, one behind the other on each connection.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from agentkv_serve.bench.gateway_load import Load, conversation, run
from agentkv_serve.bench.gateway_targets import KEY, ROUTER, Target, ready, targets
from agentkv_serve.bench.gateway_upstream import PACED
from agentkv_serve.bench.report import machine
from agentkv_serve.model import default_model

SMALL = (1024, 256)  # bytes of a small body, and how many of them are new


@dataclass
class Line:
    """One target under one load: medians over the repeats, except for the times, whose percentiles are over the
    requests of all repeats. `spread`: the least and the greatest of the repeats. Times are to the first content frame
    (of small requests: to the reply); added ones are against the worker itself."""

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
    chunks_s: float | None
    failures: int
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass
class _Measured:
    """One repeat of one load on one target. `whole`, `burst`, `paced`: see `_second_turns`; with CPU seconds."""

    whole: Load
    cpu: float
    burst: Load = field(default_factory=Load)
    burst_cpu: float = 0.0
    paced: Load = field(default_factory=Load)

    @property
    def times(self) -> list[float]:
        return self.paced.latencies or self.whole.latencies

    @property
    def failures(self) -> list[str]:
        return self.whole.failures + self.burst.failures + self.paced.failures

    def figures(self) -> dict[str, float]:
        """What is told of a repeat by itself."""
        done = max(1, len(self.whole.latencies))
        told = {
            "p50_ms": _percentiles(self.times)[0],
            "cpu_ms_per_request": self.cpu / done * 1e3,
            "requests_s": done / self.whole.seconds,
        }
        if self.burst.chunks:
            # What a stream costs beyond its request, spread over its chunks.
            extra = self.burst_cpu - self.cpu / done * len(self.burst.latencies)
            told["cpu_us_per_chunk"] = max(0.0, extra) / self.burst.chunks * 1e6
            told["chunks_s"] = self.burst.chunks / self.burst.seconds
        return told


def gateway(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: Annotated[Path | None, typer.Option(help="Model folder with tokenizer and template.")] = None,
    body_kb: Annotated[list[int] | None, typer.Option(help="Body sizes in KB (default 8 and 250).")] = None,
    streams: Annotated[list[int] | None, typer.Option(help="Parallel requests (default 1, 16 and 64).")] = None,
    requests: Annotated[int, typer.Option(help="Measured requests of each kind, load and repeat.")] = 500,
    repeats: Annotated[int, typer.Option(help="How often each load is measured.")] = 3,
    frames: Annotated[int, typer.Option(help="Content frames of a streamed reply.")] = 128,
    pause_ms: Annotated[float, typer.Option(help="Time between the frames of paced streams.")] = 5.0,
    small: Annotated[bool, typer.Option(help="Measure small requests too.")] = True,
    redis: Annotated[
        str | None, typer.Option(help="Redis URL, or memory; default: a Valkey of our own, if installed.")
    ] = None,
    router: Annotated[Path | None, typer.Option(help=f"Python that has {ROUTER}; its router is then measured.")] = None,
) -> None:
    """What the gateway adds to a request, beside SGLang's own router and a proxy that does nothing."""
    sizes, loads = body_kb or [8, 250], streams or [1, 16, 64]
    seconds = frames * pause_ms / 1000
    with targets(model or default_model(), frames, pause_ms, redis, router) as (found, store):
        little = [
            line for parallel in (loads if small else []) for line in _small(found, parallel, 2 * requests, repeats)
        ]
        lines = [
            line
            for size in sizes
            for parallel in loads
            for line in _chats(found, size, parallel, _count(requests, size), seconds, repeats)
        ]
        state = ready(found)
    configuration = {
        "requests": requests,
        "repeats": repeats,
        "frames": frames,
        "pause_ms": pause_ms,
        "store": store,
        "gateway": state,
        "log_level": "warning",
        "router": ROUTER if router else None,
    }
    result = {
        "machine": machine(),
        "configuration": configuration,
        "runs": [asdict(line) for line in lines],
        "small": [asdict(line) for line in little],
    }
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print(json.dumps({"machine": result["machine"], "configuration": configuration}))
        print(_table("chats: times to the first frame", lines) + "\n" + _table("small requests", little))


def _count(requests: int, size: int) -> int:
    return requests if size <= 32 else max(20, requests // 10)


def _chats(
    found: Sequence[Target], size: int, parallel: int, count: int, stream_seconds: float, repeats: int
) -> list[Line]:
    def measure(target: Target) -> _Measured:
        sizes = (size << 10, 1024)
        whole, cpu = _second_turns(target, sizes, parallel, count)
        burst, burst_cpu = _second_turns(target, sizes, parallel, max(parallel, count // 10), stream=True)
        paced_count = min(count, max(20, 8 * parallel))
        paced, _ = _second_turns(target, sizes, parallel, paced_count, stream=True, spread=stream_seconds)
        return _Measured(whole, cpu, burst, burst_cpu, paced)

    return _lines(found, size, parallel, measure, repeats)


def _small(found: Sequence[Target], parallel: int, count: int, repeats: int) -> list[Line]:
    def measure(target: Target) -> _Measured:
        return _Measured(*_second_turns(target, SMALL, parallel, count))

    return _lines(found, SMALL[0] >> 10, parallel, measure, repeats)


def _lines(
    found: Sequence[Target], size: int, parallel: int, measure: Callable[[Target], _Measured], repeats: int
) -> list[Line]:
    """Each target in turn, again and again, so that a slow moment of the machine hits all of them."""
    measured: dict[str, list[_Measured]] = {target.name: [] for target in found}
    for _ in range(repeats):
        for target in found:
            measured[target.name].append(measure(target))
            for failure in measured[target.name][-1].failures[:1]:
                print(f"{target.name}: {failure}", file=sys.stderr)
    direct = _percentiles([time for each in measured[found[0].name] for time in each.times])
    return [_line(target, size, parallel, measured[target.name], direct) for target in found]


def _line(target: Target, size: int, parallel: int, repeats: Sequence[_Measured], direct: tuple[float, float]) -> Line:
    own = target.pid is not None
    figures = [each.figures() for each in repeats]
    names = [name for name in figures[0] if own or not name.startswith("cpu")]
    median = {name: statistics.median(each[name] for each in figures) for name in names}
    p50, p99 = _percentiles([time for each in repeats for time in each.times])
    return Line(
        target.name,
        size,
        parallel,
        p50,
        p99,
        p50 - direct[0] if own else None,
        p99 - direct[1] if own else None,
        median.get("cpu_ms_per_request"),
        median.get("cpu_us_per_chunk"),
        median["requests_s"],
        median.get("chunks_s"),
        sum(len(each.failures) for each in repeats),
        {name: (min(each[name] for each in figures), max(each[name] for each in figures)) for name in names},
    )


def _second_turns(
    target: Target, sizes: tuple[int, int], parallel: int, count: int, *, stream: bool = False, spread: float = 0.0
) -> tuple[Load, float]:
    """Second turns of `count` conversations: only what was appended is new. The first turns are not measured. `sizes`:
    bytes of a body, and of its new message. `spread`: seconds of a paced stream. Returns the load and the target's CPU
    seconds."""
    mark = os.urandom(4).hex()
    seed = PACED if spread else None
    bodies = [conversation(*sizes, stream, number, seed) for number in range(count)]
    names = [f"{mark}-{number}" for number in range(count)]
    first = uvloop.run(run(target.port, KEY, [(n, b[0]) for n, b in zip(names, bodies, strict=True)], parallel))
    before = target.cpu_seconds
    second = [(n, b[1]) for n, b in zip(names, bodies, strict=True)]
    load = uvloop.run(run(target.port, KEY, second, parallel, spread))
    load.failures += first.failures
    return load, target.cpu_seconds - before


def _percentiles(latencies: Sequence[float]) -> tuple[float, float]:
    if len(latencies) < 2:
        return float("nan"), float("nan")
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return cuts[49] * 1e3, cuts[98] * 1e3


def _table(title: str, lines: Sequence[Line]) -> str:
    head = "target          KB  streams   p50 ms  p99 ms    +p50    +p99  CPU ms/req  us/chunk  req/s [all]  chunks/s"

    def number(value: float | None, width: int, digits: int = 2) -> str:
        return f"{value:{width}.{digits}f}" if value is not None else " " * (width - 1) + "-"

    rows: list[Any] = [
        f"{x.target:14s}{x.body_kb:4d}{x.streams:9d}{number(x.p50_ms, 9)}{number(x.p99_ms, 8)}"
        f"{number(x.added_p50_ms, 8)}{number(x.added_p99_ms, 8)}{number(x.cpu_ms_per_request, 12, 3)}"
        f"{number(x.cpu_us_per_chunk, 10, 1)}{number(x.requests_s, 8, 0)} "
        f"[{x.spread['requests_s'][0]:.0f}, {x.spread['requests_s'][1]:.0f}]{number(x.chunks_s, 10, 0)}"
        for x in lines
    ]
    return "\n".join([title, head, *rows])
