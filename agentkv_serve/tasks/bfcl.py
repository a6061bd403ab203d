"""`agentkv eval bfcl`: the Berkeley Function-Calling Leaderboard through the gateway, one session per task."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentkv_serve.bench.report import machine
from agentkv_serve.children import ChildDied
from agentkv_serve.model import ModelError
from agentkv_serve.stack import StackError
from agentkv_serve.tasks import runs
from agentkv_serve.tasks.environment import EnvironmentFailed, environment
from agentkv_serve.tasks.paper import references
from agentkv_serve.up import Stopped, stop_signals

PACKAGE = "bfcl-eval==2026.3.23"
UNDECLARED = "soundfile"
"""What the package imports by way of qwen-agent without asking for it."""
VECTOR = ("sentence-transformers", "faiss-cpu")
"""Only the category memory_vector needs these; they bring a second copy of torch."""
SEARCH_KEY = "SERPAPI_API_KEY"


def bfcl(
    category: Annotated[
        list[str] | None, typer.Option(help="The package's names: multi_turn_base, memory_kv, …")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First tasks of each category; default: all.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies; default: agentkv.")] = None,
    budget: Annotated[
        list[int] | None, typer.Option(help="KV tokens per layer and KV head; default: 512, 1024.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; default: SmolLM2-135M.")] = None,
    base_url: Annotated[str | None, typer.Option(help="A running gateway, in place of one of our own.")] = None,
    key: Annotated[str, typer.Option(envvar="AGENTKV_API_KEY", help="Its API key.")] = "any",
    max_tokens: Annotated[int | None, typer.Option(help="Cap of one reply; default: 64 for the default model.")] = None,
    task_seconds: Annotated[float, typer.Option(help="A task that takes longer counts as failed.")] = 90.0,
    parallel: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the results; a run that is there already goes on.")] = Path(
        "bfcl"
    ),
    venv: Annotated[Path, typer.Option(help="The package's own environment; made where missing.")] = Path(".venv-bfcl"),
    engine_flag: Annotated[list[str] | None, typer.Option(help="A flag for our engine, as --flag=value.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Berkeley Function-Calling Leaderboard: scores at budgets against everything kept."""
    console = Console(stderr=True)
    categories = category or ["multi_turn_base"]
    check_categories(categories)
    rows = runs.settings(policy or ["agentkv"], budget or [512, 1024])
    if max_tokens is None and model is None and base_url is None:
        max_tokens = runs.SMALL_MODEL_TOKENS
    vector = any(name in ("memory", "memory_vector", "agentic", "all") for name in categories)
    out = out.resolve()
    try:
        without = () if vector else VECTOR
        python = environment(venv.resolve(), [PACKAGE, UNDECLARED], console, python="3.11", without=without)
        with stop_signals(), runs.target(base_url, key, model, engine_flag or [], console) as target:
            spec = {**asdict(target), "out": str(out), "categories": categories, "limit": limit}
            spec |= {"max_tokens": max_tokens, "task_seconds": task_seconds, "parallel": parallel}
            for row in rows:
                console.print(f"{row.name}: log in {out / 'bfcl.log'}")
                program = Path(__file__).with_name("bfcl_runner.py")
                search = {SEARCH_KEY: os.environ[SEARCH_KEY]} if SEARCH_KEY in os.environ else {}
                runs.run_program(python, program, spec | {"settings": [asdict(row)]}, out, "bfcl.log", **search)
    except Stopped:
        raise typer.Exit(130) from None
    except (ModelError, StackError, ChildDied, EnvironmentFailed, runs.RunnerFailed) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    groups = {group for group in ("multi_turn", "memory", "web_search") for name in categories if group in name}
    result = {
        "benchmark": PACKAGE,
        **runs.summary(rows, out, references("bfcl", groups)),
        "configuration": {
            "model": target.model,
            "categories": categories,
            "limit": limit,
            "max_tokens": max_tokens,
            "task_seconds": task_seconds,
            "parallel": parallel,
            "engine_flags": engine_flag or [],
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
        "machine": machine(),
    }
    (out / "bfcl.json").write_text(json.dumps(result, indent=2))
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        runs.show(result, "BFCL", Console())


def check_categories(categories: list[str]) -> None:
    """Raises:
    typer.BadParameter: web search without its search key.
    """
    searches = any(name in ("agentic", "all") or "web_search" in name for name in categories)
    if searches and not os.environ.get(SEARCH_KEY):
        raise typer.BadParameter(f"web_search asks a live search engine: set {SEARCH_KEY}, or leave it out")
