"""`agentkv bench sessions`: how many sessions one KV pool holds at once, on ours and on stock SGLang.

All sessions begin at once, with a first turn of `context` tokens. When all of these have ended, or nothing moves any
more, each session that got through has a short second turn, the newest first: if it finds its state, the pool held it.
A first turn that waits for memory which nobody will give back is given up. How long that takes depends on the machine:
it is measured with a session of its own, which is closed before the others begin.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agentkv_serve.bench.report import machine, publish
from agentkv_serve.bench.serve.client import Reply, Session, Setting, connect
from agentkv_serve.bench.serve.engine import Engine, EngineSettings, running
from agentkv_serve.bench.serve.load import Watch, flush
from agentkv_serve.bench.serve.workload import Turn, Workload
from agentkv_serve.children import ChildDied
from agentkv_serve.model import ModelError, check_model, default_model
from agentkv_serve.parsers import chat_template
from agentkv_serve.phase_tagger import Vocabulary, detect_family
from agentkv_serve.stack import StackError
from agentkv_serve.up import Stopped, progress, stop_signals

GOAL = 0.9  # of min(N, P / (B + SLACK))
SLACK = 128  # decode tokens between two compressions
LEAST_STALL, STALL_TURNS = 60.0, 3.0  # seconds; times that a first turn takes alone


@dataclass(frozen=True)
class Held:
    """What became of the sessions: `held` found their state at the second turn, `finished` ended both turns."""

    held: int
    finished: int
    first_turns: int
    given_up: int
    seconds: float
    alone_s: float  # what a first turn took by itself
    stall_s: float
    states: dict[str, int]


def sessions(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    pool: Annotated[int, typer.Option(min=1024, help="KV pool in tokens.")] = 8192,
    context: Annotated[int, typer.Option(min=128, help="Prompt tokens of a first turn.")] = 3000,
    budget: Annotated[int, typer.Option(min=128, help="KV tokens per layer and KV head.")] = 512,
    number: Annotated[int, typer.Option("--sessions", min=1, help="Sessions.")] = 16,
    chunk: Annotated[int, typer.Option(min=64, help="Tokens of a prefill chunk.")] = 512,
    policy: Annotated[str, typer.Option(help="Policy of our sessions.")] = "agentkv",
    stall: Annotated[
        float | None,
        typer.Option(help="Give up turns after so many seconds without a token; default: thrice a first turn, or 60."),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; default: SmolLM2-135M.")] = None,
    engine_flag: Annotated[list[str] | None, typer.Option(help="A flag for both servers, as --flag=value.")] = None,
) -> None:
    """How many sessions one KV pool holds at once."""
    from agentkv_serve.engine.launch import has_gpu

    console = Console(stderr=True)
    work = Workload(sessions=number + 1, turns=2, prompt=context, tool=8, output=8, concurrency=number)
    rows = (Setting("ours", "agentkv", policy, budget), Setting("stock", "session"))
    try:
        with stop_signals(), tempfile.TemporaryDirectory(prefix="agentkv-bench-") as scratch:
            folder = model.expanduser().resolve() if model else default_model(console)
            if context + 64 >= (limit := check_model(folder).context):
                raise typer.BadParameter(f"{context} tokens do not fit into {limit} of context")
            vocabulary = Vocabulary(folder)
            family = detect_family(vocabulary, chat_template(folder)).name
            plan = work.plan(vocabulary)
            found: dict[str, Held] = {}
            for row in rows:  # one server after the other
                settings = EngineSettings(row.kind, folder, pool, chunk, tuple(engine_flag or ()))
                with progress(console) as report, running(settings, Path(scratch), report, has_gpu()) as engine:
                    found[row.name] = asyncio.run(measure(engine, row, plan, family, stall))
                console.print(f"{row.name}: {found[row.name]}")
    except Stopped:
        raise typer.Exit(130) from None
    except (ModelError, StackError, ChildDied) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    setting = {"chunk": chunk, "policy": policy, "stall_s": stall, "model": folder.name}
    setting |= {"engine_flags": engine_flag or [], "omp_num_threads": os.environ.get("OMP_NUM_THREADS")}
    result = {**results(pool, context, budget, number, found), "configuration": setting, "machine": machine()}
    publish(result, "sessions", as_json)


def results(pool: int, context: int, budget: int, number: int, found: dict[str, Held]) -> dict[str, Any]:
    """The counts, against the goal and what arithmetic allows."""
    room = min(number, pool / (budget + SLACK))
    return {
        "pool_tokens": pool,
        "context": context,
        "budget": budget,
        "sessions": number,
        "ours": found["ours"].held,
        "stock": found["stock"].held,
        "room": {"ours": room, "stock": min(number, pool / context)},
        "goal": GOAL * room,
        "reached": found["ours"].held >= GOAL * room,
        "details": {name: vars(held) for name, held in found.items()},
    }


async def measure(
    engine: Engine, setting: Setting, plan: Sequence[Sequence[Turn]], family: str, stall: float | None
) -> Held:
    """All first turns at once; then second turns one by one, of the session that ended last first.

    The plan's last session is the one that is timed by itself before. Newest first, since a second turn may push out an
    older session but never brings one back: whoever finds its state had it when the first turns were over.
    """
    *plan, warm_up = plan
    alone = await _alone(engine, setting, warm_up[0], len(plan), family)
    stall = stall or stall_after(alone)
    replies: list[Reply] = []
    ended: list[int] = []
    began = time.perf_counter()
    async with connect() as http, Watch(replies, stall) as watch:
        open_sessions = [Session(engine, http, setting, number, family) for number in range(len(plan))]

        async def first(number: int) -> None:
            if await watch.turn(open_sessions[number].run(plan[number][0], replies)):
                ended.append(number)

        await asyncio.gather(*(first(number) for number in range(len(plan))))
        finished, states = [], []
        for number in reversed(ended):
            if await watch.turn(open_sessions[number].run(plan[number][1], replies)):
                finished.append(replies[-1])
                states.append(state(replies[-1]))
        for session in open_sessions:
            await session.close()
    return Held(
        held=states.count("resumed"),
        finished=len(finished),
        first_turns=len(ended),
        given_up=len(plan) - len(ended),
        seconds=time.perf_counter() - began,
        alone_s=alone,
        stall_s=stall,
        states={name: states.count(name) for name in sorted(set(states))},
    )


def stall_after(alone: float) -> float:
    """Seconds without a token after which a server is taken to be stuck; `alone`: seconds of a turn on an idle one."""
    return max(LEAST_STALL, STALL_TURNS * alone)


async def _alone(engine: Engine, setting: Setting, turn: Turn, number: int, family: str) -> float:
    """Seconds of a session's only turn on an idle server, which it leaves empty.

    Raises:
        StackError: the server's cache cannot be emptied afterwards.
    """
    async with connect() as http:
        session = Session(engine, http, setting, number, family)
        reply = await session.run(turn, [])
        await session.close()
        await flush(engine, http)
    return reply.ended - reply.sent


def state(reply: Reply) -> str:
    """`resumed` when no token of the session was computed again; for our sessions also in the engine's own word."""
    if reply.facts:
        return str(reply.facts["state"])
    return "resumed" if reply.computed <= reply.needed else "rebuilt"
