"""`agentkv bench serve`: sessions of agents' turns on stock SGLang and on ours, interleaved on one machine.

Every preset has a stock server and one of ours, both running, one of them at work. The rows take turns; their order
moves on by one from repeat to repeat, so that a drift of the machine meets all alike. With a folder for results, a
benchmark that was cut off goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agentkv_serve.bench.report import machine, publish
from agentkv_serve.bench.serve import results
from agentkv_serve.bench.serve.client import Setting
from agentkv_serve.bench.serve.engine import Engine, EngineSettings, Kind, running
from agentkv_serve.bench.serve.job import Job, changed, configuration, named, ready, run_configuration
from agentkv_serve.bench.serve.load import Run, drive
from agentkv_serve.bench.serve.presets import PRESETS
from agentkv_serve.bench.serve.record import ALONE, Record
from agentkv_serve.bench.serve.workload import Turn
from agentkv_serve.children import ChildDied
from agentkv_serve.model import ModelError, default_model
from agentkv_serve.stack import StackError
from agentkv_serve.up import Stopped, progress, stop_signals

DEFAULT_PRESETS = ("cpu-pressured", "cpu-unpressured")


def serve(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    preset: Annotated[list[str] | None, typer.Option(help=f"One or more of {', '.join(PRESETS)}.")] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; default: SmolLM2-135M.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies of our rows.")] = None,
    budget: Annotated[list[int] | None, typer.Option(help="KV tokens per layer and KV head, per row.")] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Sessions.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Turns of a session.")] = None,
    prompt: Annotated[int | None, typer.Option(min=64, help="Tokens of a session's first prompt.")] = None,
    tool: Annotated[int | None, typer.Option(min=1, help="Tokens that a tool adds per turn.")] = None,
    output: Annotated[int | None, typer.Option(min=2, help="Sampled tokens of a turn, not ended by the model.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A recorded run; its turns have their own lengths.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Requests in flight in the closed loop.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals of sessions a minute, no closed loop.")] = None,
    pause: Annotated[float | None, typer.Option(help="Mean pause for a tool, in seconds.")] = None,
    pool: Annotated[int | None, typer.Option(help="KV pool in tokens, in place of the preset's share.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens of a prefill chunk.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Interleaved repeats of every row.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sessions' content, pauses and arrivals.")] = None,
    stall: Annotated[float, typer.Option(help="Give up turns after so many seconds without a token.")] = 60.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results and plots; a run that was cut off goes on.")
    ] = None,
    engine_flag: Annotated[list[str] | None, typer.Option(help="A flag for both servers, as --flag=value.")] = None,
) -> None:
    """Agents' load on stock SGLang, with everything kept, and on ours at budgets."""
    console = Console(stderr=True)
    work: dict[str, Any] = {
        "sessions": sessions,
        "turns": turns,
        "prompt": prompt,
        "tool": tool,
        "output": output,
        "seed": seed,
    }
    work |= {"trace": trace, "rate": rate, "pause_s": pause}
    own: dict[str, Any] = {"policies": tuple(policy or ()) or None, "budgets": tuple(budget or ()) or None}
    own |= {"chunk": chunk, "repeats": repeats}
    try:
        presets = [
            changed(named(name), {**work, "concurrency": parallel}, own)
            for name in preset or DEFAULT_PRESETS
            for parallel in concurrency or (None,)
        ]
        with stop_signals(), tempfile.TemporaryDirectory(prefix="agentkv-bench-") as scratch:
            folder = model.expanduser().resolve() if model else default_model(console)
            found = []
            for chosen in presets:
                job = ready(chosen, folder, pool, Path(scratch), tuple(engine_flag or ()))
                name = f"{chosen.name}-{chosen.work.concurrency}"
                record = Record(out / "runs" / name if out else None, {**run_configuration(job), "stall": stall})
                found.append(one(job, record, stall, Path(scratch), console))
    except Stopped:
        raise typer.Exit(130) from None
    except (ModelError, StackError, ChildDied) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    result = {**headline(found), "presets": found, "machine": machine()}
    if out is not None:
        save(out, result, console)
    publish(result, "serve", as_json)


def one(job: Job, record: Record, stall: float, scratch: Path, console: Console) -> dict[str, Any]:
    """Runs what the record lacks of a preset. Returns the figures of all its runs.

    Raises:
        StackError: a server is not healthy in time, or refuses the work.
        ChildDied: a server ended.
    """
    preset = job.preset
    runs: dict[str, list[Run]] = {setting.name: [] for setting in job.settings}
    costs: dict[str, results.Costs] = {}
    with ExitStack() as cleanup:
        engines = _servers(job, scratch, console, cleanup)
        kept = record.load(ALONE, job.settings)
        for setting in job.settings:
            alone = kept.get(setting.name) or asyncio.run(_drive(job, engines(), setting, stall, [job.plan[0][:2]]))
            if len(alone.good) < min(2, len(job.plan[0])):
                raise StackError(f"{setting.name} cannot run a session alone: {alone.replies[-1].error}")
            if setting.name not in kept:
                record.save(ALONE, alone)
            costs[setting.name] = results.Costs.of(alone)
        for number in range(preset.repeats):
            due = [row for row in _rotated(job.settings, number) if _worth_repeating(runs[row.name], job.plan)]
            kept = record.load(number, due)
            for setting in due:
                run = kept.get(setting.name) or asyncio.run(_drive(job, engines(), setting, stall, job.plan))
                runs[setting.name].append(run)
                if setting.name not in kept:
                    record.save(number, run)
                console.print(
                    f"{preset.name} {number + 1}/{preset.repeats} {setting.name}: {run.tok_s:.2f} tok/s, "
                    f"{len(run.ended)} of {len(job.plan)} sessions in {run.wall:.0f} s"
                )
    return {**figures(job, runs, costs), "machines": list(record.machines.values())}


def _servers(job: Job, scratch: Path, console: Console, cleanup: ExitStack) -> Callable[[], dict[Kind, Engine]]:
    """Both servers, started when they are asked for first."""
    from agentkv_serve.engine.launch import has_gpu

    kinds: tuple[Kind, ...] = ("stock", "agentkv")
    engines: dict[Kind, Engine] = {}

    def started() -> dict[Kind, Engine]:
        for kind in kinds:
            if kind not in engines:
                settings = EngineSettings(kind, job.model, job.pool, job.preset.chunk, job.flags)
                with progress(console) as report:
                    engines[kind] = cleanup.enter_context(running(settings, scratch, report, has_gpu()))
        return engines

    return started


async def _drive(job: Job, engines: dict[Kind, Engine], setting: Setting, stall: float, plan: list[list[Turn]]) -> Run:
    for engine in engines.values():
        engine.child.check()
    return await drive(engines[setting.kind], setting, plan, job.preset.work, job.family, stall)


def _rotated(settings: Sequence[Setting], by: int) -> list[Setting]:
    by %= len(settings)
    return [*settings[by:], *settings[:by]]


def _worth_repeating(runs: Sequence[Run], plan: Sequence[Sequence[Turn]]) -> bool:
    """A setting that could not even finish half of its turns is not given more of the machine's time."""
    return not runs or 2 * len(runs[0].good) >= sum(len(session) for session in plan)


def figures(job: Job, runs: dict[str, list[Run]], costs: dict[str, results.Costs]) -> dict[str, Any]:
    """A preset's rows, the ratios of ours to the faster stock setting, and where the first row's gain comes from."""
    preset = job.preset
    whole = [rows for rows in runs.values() if len(rows) == preset.repeats]
    stock = [rows for rows in whole if rows[0].setting.kind == "stock"]
    ours = [rows for rows in whole if rows[0].setting.kind == "agentkv"]
    found: dict[str, Any] = {
        "preset": preset.name,
        "regime": preset.regime,
        "configuration": configuration(job),
        "rows": [results.row(rows, job.plan) for rows in runs.values()],
    }
    same_order = [rows for rows in stock if rows[0].setting.admitted is None]
    if not same_order or not ours:
        return found
    best = results.fastest(same_order)
    found["denominator"] = best[0].setting.name
    found["ratios"] = {rows[0].setting.name: _ratio(rows, best) for rows in ours}
    limited = [rows for rows in stock if rows[0].setting.admitted is not None]
    if limited:
        found["ratios_to_fewer_sessions_at_a_time"] = {rows[0].setting.name: _ratio(rows, limited[0]) for rows in ours}
    first = ours[0]
    found["split"] = {
        "setting": first[0].setting.name,
        **results.split(best, first, min(costs.values(), key=lambda cost: cost.held)),
    }
    return found


def _ratio(ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Any]:
    return results.ratio([run.tok_s for run in ours], [run.tok_s for run in theirs])


def headline(presets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`ratio_<regime>` of every regime: the ratio of its first row of ours."""
    return {
        f"ratio_{found['regime']}": next(iter(found["ratios"].values())) for found in presets if found.get("ratios")
    }


def save(out: Path, result: dict[str, Any], console: Console) -> None:
    """Writes the result and the plots into a folder; its `runs` has every turn."""
    from agentkv_serve.bench.serve.plots import plot

    out.mkdir(parents=True, exist_ok=True)
    (out / "serve.json").write_text(json.dumps(result, indent=2) + "\n")
    for path in plot(result, out):
        console.print(f"wrote {path}")
