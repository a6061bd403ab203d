"""`agentkv bench overhead`: what compressions cost, and what capturing queries costs a session below its budget.

`compaction_share` is the engine's own seconds in compressions over the time that a client waits for tokens, in a
session of `context` tokens held at `budget`, whose KV is compressed every 128 tokens.

`below_budget_share` compares two sessions in one server on the same attention path (SGLang's own: nothing of them is
compressed). One has a budget that it never reaches, so its queries are captured and its phases followed; the other one
keeps everything. They take turns, and the scheduler's CPU time for the decode steps of each is read. A stock server
takes a third turn, for comparison.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console

from agentkv_serve.bench.report import machine, publish, spread
from agentkv_serve.bench.serve.client import Reply, Session, Setting, connect
from agentkv_serve.bench.serve.engine import Engine, EngineSettings, Kind, cpu_seconds, running
from agentkv_serve.bench.serve.workload import Turn, Workload
from agentkv_serve.children import ChildDied
from agentkv_serve.model import ModelError, check_model, default_model
from agentkv_serve.parsers import chat_template
from agentkv_serve.phase_tagger import Vocabulary, detect_family
from agentkv_serve.stack import StackError
from agentkv_serve.up import Stopped, progress, stop_signals

EVERY = 128  # decode tokens between two compressions
GOALS = {"compaction_share": 0.05, "below_budget_share_upper": 0.03}
_SECONDS = re.compile(r"^agentkv_compaction_seconds_sum(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_COUNT = re.compile(r"^agentkv_compaction_seconds_count(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def overhead(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    context: Annotated[int, typer.Option(min=1024, help="Prompt tokens of the compressed session.")] = 3000,
    budget: Annotated[int, typer.Option(min=128, help="Its KV tokens per layer and KV head.")] = 512,
    periods: Annotated[int, typer.Option(min=1, help="Compressions in decode that are measured.")] = 4,
    length: Annotated[int, typer.Option(min=64, help="Prompt tokens of the sessions below their budget.")] = 512,
    steps: Annotated[int, typer.Option(min=4, help="Decode steps of each turn below the budget.")] = 24,
    pairs: Annotated[int, typer.Option(min=2, help="Turns of each session below its budget.")] = 30,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; default: SmolLM2-135M.")] = None,
    engine_flag: Annotated[list[str] | None, typer.Option(help="A flag for both servers, as --flag=value.")] = None,
) -> None:
    """What compressions cost, and capture below the budget."""
    from agentkv_serve.engine.launch import has_gpu

    console = Console(stderr=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # CPU time of threads that wait for one another means nothing
    try:
        with stop_signals(), tempfile.TemporaryDirectory(prefix="agentkv-bench-") as scratch, ExitStack() as cleanup:
            folder = model.expanduser().resolve() if model else default_model(console)
            needed = max(context + EVERY * (periods + 1), length + pairs * (steps + 8))
            if needed >= (limit := check_model(folder).context):
                raise typer.BadParameter(f"{needed} tokens do not fit into {limit} of context")
            vocabulary = Vocabulary(folder)
            family = detect_family(vocabulary, chat_template(folder)).name
            engines: dict[Kind, Engine] = {}
            kinds: tuple[Kind, ...] = ("stock", "agentkv")
            for kind in kinds:
                flags = (*(engine_flag or ()), *(("--enable-metrics",) if kind == "agentkv" else ()))
                settings = EngineSettings(kind, folder, flags=flags)
                with progress(console) as report:
                    engines[kind] = cleanup.enter_context(running(settings, Path(scratch), report, has_gpu()))
            below = asyncio.run(_below(engines, vocabulary, family, length, steps, pairs, console))
            compactions = asyncio.run(_compactions(engines["agentkv"], vocabulary, family, context, budget, periods))
    except Stopped:
        raise typer.Exit(130) from None
    except (ModelError, StackError, ChildDied) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    setting: dict[str, Any] = {
        "context": context,
        "budget": budget,
        "every": EVERY,
        "length": length,
        "steps": steps,
        "pairs": pairs,
    }
    setting |= {"model": folder.name, "engine_flags": engine_flag or []}
    setting |= {"omp_num_threads": os.environ["OMP_NUM_THREADS"]}
    publish(
        {**compactions, **below, "goals": GOALS, "configuration": setting, "machine": machine()}, "overhead", as_json
    )


async def _compactions(
    engine: Engine, vocabulary: Vocabulary, family: str, context: int, budget: int, periods: int
) -> dict[str, Any]:
    """A first turn that ends at the budget, then one turn of `periods` times 128 tokens and a few more."""
    tokens = EVERY * periods + 8
    first, second = Workload(sessions=1, turns=2, prompt=context, tool=8, output=8).plan(vocabulary)[0]
    replies: list[Reply] = []
    async with connect() as http:
        session = Session(engine, http, Setting("ours", "agentkv", "agentkv", budget), 0, family)
        before = await compaction_seconds(engine, http)
        prefilled = _good(await session.run(first, replies))
        between = await compaction_seconds(engine, http)
        decoded = _good(await session.run(Turn(second.ids, second.runs, tokens), replies))
        after = await compaction_seconds(engine, http)
        await session.close()
    if after[1] == between[1]:
        raise StackError("the engine's metrics tell of no compression in decode: nothing was measured")
    return shares(prefilled, decoded, before, between, after)


def shares(
    prefilled: Reply,
    decoded: Reply,
    before: tuple[float, int],
    between: tuple[float, int],
    after: tuple[float, int],
) -> dict[str, Any]:
    """`compaction_share` of the second turn's time, and the same of the first turn's prefill.

    The pairs are the engine's seconds in compressions and their number, before, between and after the two turns. The
    excess of the longest of every 128 gaps over the median one is what a client sees of them.
    """
    seconds = decoded.ended - decoded.sent
    gaps = decoded.gaps
    typical = statistics.median(gaps)
    windows = [gaps[start : start + EVERY] for start in range(0, len(gaps) - EVERY + 1, EVERY)]
    seen = [max(window) - typical for window in windows]
    return {
        "compaction_share": (after[0] - between[0]) / seconds,
        "compaction": {
            "seconds": after[0] - between[0],
            "number": after[1] - between[1],
            "turn_seconds": seconds,
            "ms_between_tokens": 1000 * typical,
            "longest_gaps_over_the_median_share": sum(seen) / sum(sum(window) for window in windows) if seen else None,
            "prefill_share": (between[0] - before[0]) / prefilled.ttft,
            "prefill_number": between[1] - before[1],
        },
    }


async def compaction_seconds(engine: Engine, http: aiohttp.ClientSession) -> tuple[float, int]:
    """The engine's seconds in compressions so far, and their number.

    Raises:
        StackError: its metrics lack them.
    """
    async with http.get(f"{engine.url}/metrics", headers=engine.headers) as response:
        text = await response.text()
    seconds, count = _SECONDS.search(text), _COUNT.search(text)
    if seconds is None or count is None:
        return 0.0, 0  # a labelled series appears with its first value
    return float(seconds[1]), int(float(count[1]))


async def _below(
    engines: dict[Kind, Engine],
    vocabulary: Vocabulary,
    family: str,
    length: int,
    steps: int,
    pairs: int,
    console: Console,
) -> dict[str, Any]:
    """Turns of three sessions, in an order drawn anew for each round; the first round warms up."""
    rows = (
        Setting("on", "agentkv", "agentkv", 1 << 20),
        Setting("off", "agentkv", "full", 0),
        Setting("stock", "prefix"),
    )
    plans = Workload(sessions=1, turns=pairs + 1, prompt=length, tool=8, output=steps).plan(vocabulary)[0]
    pids = {kind: engine.scheduler_pid() for kind, engine in engines.items()}
    spent: dict[str, list[float]] = {row.name: [] for row in rows}
    order = random.Random(7)
    async with connect() as http:
        sessions = {row.name: Session(engines[row.kind], http, row, number, family) for number, row in enumerate(rows)}
        for number, turn in enumerate(plans):
            for row in order.sample(rows, len(rows)):
                used = await _decode_cpu(sessions[row.name], turn, pids[row.kind])
                if number:
                    spent[row.name].append(used / (turn.output - 1))
            if number and number % 10 == 0:
                console.print(f"{number}/{pairs} " + ", ".join(f"{n} {1e3 * v[-1]:.1f} ms" for n, v in spent.items()))
        for session in sessions.values():
            await session.close()
    return {
        **share("below_budget_share", spent["on"], spent["off"]),
        "against_stock": share("share", spent["on"], spent["stock"]),
        "cpu_ms_per_step": {name: spread([1e3 * value for value in values]) for name, values in spent.items()},
        "steps_a_side": pairs * (steps - 1),
    }


async def _decode_cpu(session: Session, turn: Turn, pid: int) -> float:
    """CPU seconds of the scheduler between the first token of a turn and its end."""
    replies: list[Reply] = []
    running_turn = asyncio.create_task(session.run(turn, replies))
    while not running_turn.done() and not (replies and replies[0].arrivals):
        await asyncio.sleep(0.0005)
    before, at = cpu_seconds(pid), len(replies[0].arrivals)
    _good(await running_turn)
    # The clock was read after token `at` came: scale to all steps after the first.
    return (cpu_seconds(pid) - before) * (turn.output - 1) / (turn.output - at)


def share(name: str, ours: Sequence[float], theirs: Sequence[float], draws: int = 10_000) -> dict[str, Any]:
    """`name`: how much more CPU time ours takes, summed over the turns; its 95% interval by a paired bootstrap."""
    draw = random.Random(7)
    count = range(len(ours))
    samples = []
    for _ in range(draws):
        picked = draw.choices(count, k=len(ours))
        samples.append(sum(ours[i] for i in picked) / sum(theirs[i] for i in picked) - 1)
    samples.sort()
    interval = [samples[int(0.025 * draws)], samples[int(0.975 * draws) - 1]]
    return {name: sum(ours) / sum(theirs) - 1, f"{name}_interval": interval}


def _good(reply: Reply) -> Reply:
    if reply.error:
        raise StackError(f"the engine ended a turn: {reply.error}")
    return reply
