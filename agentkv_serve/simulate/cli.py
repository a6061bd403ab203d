"""`agentkv simulate`: fleets of any size from the measured times of one worker."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agentkv_serve.simulate.fleet import Fleet, Scenario, summary
from agentkv_serve.simulate.parameters import FOLDER, ParameterError, load
from agentkv_serve.simulate.report import plot, table

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def simulate() -> None:
    """What a fleet of workers would do under many agents."""


@app.command()
def fleet(
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "10,100,1000",
    budget: Annotated[str, typer.Option(help="Budgets: KV tokens or full, separated by commas.")] = "full,1024,512",
    arrivals: Annotated[float, typer.Option(min=0.001, help="New agents per worker and minute.")] = 0.5,
    minutes: Annotated[float, typer.Option(min=1, help="Simulated time.")] = 60.0,
    leaving: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the workers lost at half time.")] = 0.0,
    pool: Annotated[int, typer.Option(min=0, help="KV pool of a worker in tokens; 0 = as measured.")] = 0,
    parameters: Annotated[Path, typer.Option(help="Measured times of one worker.")] = FOLDER / "smollm2-cpu.json",
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a PNG (needs agentkv-serve[eval]).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Agents arrive, pause for their tools and come back; shows hit rate, queueing and KV use."""
    try:
        known = load(parameters)
        if pool:
            known = replace(known, service=replace(known.service, pool_tokens=pool))
        sizes, budgets = numbers(workers, "--workers"), [0 if b == "full" else n for b, n in chosen(budget)]
    except (ParameterError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    rows: list[dict[str, Any]] = []
    series: dict[str, list[tuple[float, float, float]]] = {}
    for size in sizes:
        for tokens in budgets:
            scenario = Scenario(size, tokens, arrivals, minutes, leaving, seed)
            tally = Fleet(known, scenario).run()
            rows.append(summary(scenario, tally))
            if size == max(sizes):
                series[f"budget {tokens or 'full'}"] = [(t, use, n / size) for t, use, n in tally.series]
    tokens_of_pool = known.service.pool_tokens
    settings = {"pool": tokens_of_pool, "arrivals": arrivals, "minutes": minutes, "leaving": leaving, "seed": seed}
    if as_json:
        typer.echo(json.dumps({"parameters": asdict(known), "settings": settings, "runs": rows}, indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=180)  # the table has many columns, and a file has room for them
        console.print(f"times: {', '.join(f'{k} {v}' for k, v in known.source.items())}")
        console.print(f"load: {', '.join(f'{k} {v}' for k, v in settings.items())}")
        console.print(table(rows))
    if plot_file:
        plot(rows, series, plot_file)


def numbers(text: str, flag: str) -> list[int]:
    """Positive whole numbers, separated by commas.

    Raises:
        ValueError: with the flag's name.
    """
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"{flag} takes whole numbers from 1, separated by commas, not {text!r}")
    return found


def chosen(text: str) -> list[tuple[str, int]]:
    """Budgets as words with their numbers; `full` has 0."""
    return [(word, 0 if word == "full" else numbers(word, "--budget")[0]) for word in text.split(",")]


@app.command()
def measure(
    url: Annotated[str, typer.Option(help="An idle engine worker.")],
    model_path: Annotated[Path, typer.Option(help="The worker's model folder.")],
    output: Annotated[Path, typer.Option(help="The parameter file to write.")],
    key: Annotated[str, typer.Option(help="The worker's API key.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 3,
) -> None:
    """Measure one worker's times and write them as a parameter file."""
    from agentkv_serve.simulate.measuring import measured

    known = measured(url, model_path, key, repeats)
    output.write_text(known.dump())
    typer.echo(known.dump())
