"""`agentkv eval`: how much each policy costs in quality, and what its parts are worth."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from agentkv_serve.evaluation.arms import with_settings
from agentkv_serve.tasks.commands import register as register_tasks

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
register_tasks(app)

Traces = Annotated[list[Path], typer.Option("--traces", help="Trace files; more may follow the options' values.")]
More = Annotated[list[Path] | None, typer.Argument(help="Further trace files.")]
Out = Annotated[Path, typer.Option("--json", help="Summary to write; Markdown and plots go beside it.")]
Model = Annotated[Path | None, typer.Option(help="Hugging Face folder; default: the default model.")]
Split = Annotated[Literal["development", "report"] | None, typer.Option(help="Only this half of the tasks.")]
Limit = Annotated[int | None, typer.Option(help="At most this many trajectories.")]
Length = Annotated[int, typer.Option(help="Cut trajectories to this many tokens.")]
Least = Annotated[int, typer.Option(help="Leave shorter trajectories out.")]
Chunk = Annotated[int, typer.Option(help="Tokens of a prefill chunk.")]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of weights and cache.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, …")]
Folder = Annotated[Path | None, typer.Option(help="Per-trajectory results; default: a folder beside the summary.")]
Say = Annotated[Literal["others", "act", "think"], typer.Option(help="Phase that visible text counts as.")]

GROUPS = "queries,phases,labels,samplers,redundancy"


@app.callback()
def root() -> None:
    """Quality of the policies on recorded agent runs."""


@app.command()
def quality(
    traces: Traces,
    json_out: Out,
    more: More = None,
    policies: Annotated[str, typer.Option(help="Names, comma-separated; `name[setting=value;…]`; or `all`.")] = "all",
    budget: Annotated[str, typer.Option(help="Shares (12.5%), tokens (512), auto or auto:PRICE; comma-separated.")] = (
        "12.5%,25%,50%"
    ),
    model: Model = None,
    split: Split = None,
    limit: Limit = None,
    length: Length = 3072,
    least: Least = 2048,
    chunk: Chunk = 128,
    say_phase: Say = "others",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    measured_from: Annotated[
        str | None, typer.Option(help="Budget from whose first compression on all arms count; default: its own.")
    ] = None,
    folder: Folder = None,
    statistics: Annotated[Path | None, typer.Option(help="Of triattention; default: made from the other half.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw plots beside the summary.")] = True,
) -> None:
    """Compare policies with full KV on recorded runs: KL by phase, long copies, sharp misses, coverage.

    Teacher-forced and stepwise, every policy on its own compressed cache. Resumable: one JSON per trajectory.
    """
    import torch

    from agentkv_serve.evaluation import quality as runner
    from agentkv_serve.evaluation import report
    from agentkv_serve.evaluation.arms import Budget
    from agentkv_serve.model import default_model

    try:
        settings = runner.Settings(
            model=(model or default_model()).expanduser().resolve(),
            traces=(*traces, *(more or [])),
            entrants=(),
            budgets=tuple(Budget.parse(part.strip()) for part in budget.split(",")),
            split=split,
            length=length,
            least=least,
            limit=limit,
            measured_from=Budget.parse(measured_from) if measured_from else None,
            chunk=chunk,
            say_phase=say_phase,
            dtype=getattr(torch, dtype),
            device=device,
        )
        settings = runner.with_policies(settings, parse_policies(policies), statistics)
        records = runner.run(settings, folder or json_out.with_suffix(""))
    except (ValueError, KeyError, TypeError) as error:
        Console(stderr=True).print(f"agentkv eval quality: {error}", markup=False)
        raise typer.Exit(1) from error
    report.publish(settings, records, json_out, plots)


def parse_policies(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(shown name, policy, settings) of a list like `agentkv,agentkv[queries_per_phase=16;value_power=1]`.

    Raises:
        ValueError: a name or setting that cannot be read.
    """
    from agentkv_serve.engine.policies import policy_names

    if text == "all":
        return [(name, name, {}) for name in policy_names() if name != "full"]
    found = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", text):
        name, settings = with_settings(part)
        if not name.isidentifier():
            raise ValueError(f"policy {part!r} is not of the form name or name[setting=value;…]")
        found.append((part.strip(), name, settings))
    return found


@app.command("auto")
def automatic(
    traces: Traces,
    json_out: Out,
    more: More = None,
    policy: Annotated[str, typer.Option(help="Name or name[setting=value;…].")] = "agentkv_plus",
    auto: Annotated[str, typer.Option(help="Prices, or auto:PRICE[setting=value;…]; comma-separated.")] = (
        "0.0012,0.0024,0.005"
    ),
    fixed: Annotated[str, typer.Option(help="Fixed budgets: tokens and shares, comma-separated.")] = (
        "256,512,768,1024,1536,2048"
    ),
    model: Model = None,
    split: Split = None,
    limit: Limit = None,
    length: Length = 8192,
    least: Least = 2048,
    chunk: Chunk = 128,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    measured_from: Annotated[str, typer.Option(help="All budgets count from where this one is exceeded.")] = "256",
    folder: Folder = None,
    statistics: Annotated[Path | None, typer.Option(help="Of triattention; default: made from the other half.")] = None,
) -> None:
    """Budgets that set themselves against one budget for all: KL at equal tokens, tokens at equal KL."""
    import torch

    from agentkv_serve.evaluation import frontier
    from agentkv_serve.evaluation import quality as runner
    from agentkv_serve.evaluation.arms import Budget
    from agentkv_serve.model import default_model

    try:
        settings = runner.Settings(
            model=(model or default_model()).expanduser().resolve(),
            traces=(*traces, *(more or [])),
            entrants=(),
            budgets=frontier.budgets_of(auto, fixed),
            split=split,
            length=length,
            least=least,
            limit=limit,
            measured_from=Budget.parse(measured_from),
            chunk=chunk,
            dtype=getattr(torch, dtype),
            device=device,
        )
        settings = runner.with_policies(settings, parse_policies(policy), statistics)
        frontier.run(settings, folder or json_out.with_suffix(""), json_out)
    except (ValueError, KeyError, TypeError) as error:
        Console(stderr=True).print(f"agentkv eval auto: {error}", markup=False)
        raise typer.Exit(1) from error


@app.command()
def ablate(
    traces: Traces,
    json_out: Out,
    more: More = None,
    budget: Annotated[str, typer.Option(help="Shares (12.5%) or tokens (512), comma-separated.")] = "12.5%,25%",
    only: Annotated[str, typer.Option(help="Comma-separated groups, of: " + GROUPS + ".")] = GROUPS,
    model: Model = None,
    split: Split = "development",
    limit: Limit = None,
    length: Length = 3072,
    least: Least = 2048,
    chunk: Chunk = 128,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    folder: Folder = None,
) -> None:
    """The paper's ablations: number of queries, phases, wrong labels, samplers, redundancy; its figures beside ours."""
    import torch

    from agentkv_serve.evaluation import ablate as runner
    from agentkv_serve.evaluation.arms import Budget
    from agentkv_serve.evaluation.quality import Settings
    from agentkv_serve.model import default_model

    try:
        settings = Settings(
            model=(model or default_model()).expanduser().resolve(),
            traces=(*traces, *(more or [])),
            entrants=runner.entrants(only.split(",")),
            budgets=tuple(Budget.parse(part.strip()) for part in budget.split(",")),
            split=split,
            length=length,
            least=least,
            limit=limit,
            chunk=chunk,
            dtype=getattr(torch, dtype),
            device=device,
        )
        runner.run(settings, folder or json_out.with_suffix(""), json_out)
    except (ValueError, KeyError) as error:
        Console(stderr=True).print(f"agentkv eval ablate: {error}", markup=False)
        raise typer.Exit(1) from error


@app.command("bfcl-traces")
def bfcl_traces(
    out: Annotated[Path, typer.Argument(help="JSON lines file to write.")],
    categories: Annotated[str, typer.Option(help="Comma-separated.")] = "base,long_context",
    environment: Annotated[Path, typer.Option(help="Virtual environment; made on first use.")] = Path(".venv-bfcl"),
    all_tools: Annotated[bool, typer.Option(help="Print every tool of an item, not only those it calls.")] = False,
) -> None:
    """Build BFCL multi-turn transcripts by executing the ground truth on bfcl-eval's own simulators."""
    from agentkv_serve.evaluation import bfcl

    try:
        count = bfcl.build(out, categories.split(","), environment, all_tools)
    except bfcl.BuildError as error:
        Console(stderr=True).print(f"agentkv eval bfcl-traces: {error}", markup=False)
        raise typer.Exit(1) from error
    typer.echo(json.dumps({"file": str(out), "transcripts": count, "licence": bfcl.LICENCE}))
