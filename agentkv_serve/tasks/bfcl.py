"""`agentkv eval bfcl`: the Berkeley Function-Calling Leaderboard through the gateway, one session per task."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentkv_serve.bench.report import machine
from agentkv_serve.tasks import options, runs
from agentkv_serve.tasks.environment import environment
from agentkv_serve.tasks.paper import references

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
    policy: options.Policies = None,
    budget: options.Budgets = None,
    model: options.Model = None,
    base_url: options.BaseUrl = None,
    key: options.Key = "any",
    max_tokens: options.MaxTokens = None,
    task_seconds: options.TaskSeconds = 90.0,
    parallel: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 1,
    out: options.Out = Path("bfcl"),
    venv: options.Venv = Path(".venv-bfcl"),
    engine_flag: options.EngineFlags = None,
    as_json: options.AsJson = False,
) -> None:
    """Berkeley Function-Calling Leaderboard: scores at budgets against everything kept."""
    console = Console(stderr=True)
    categories = category or ["multi_turn_base"]
    check_categories(categories)
    rows = runs.settings(policy or ["agentkv"], budget or [512, 1024])
    max_tokens = runs.reply_cap(max_tokens, model, base_url)
    vector = any(name in ("memory", "memory_vector", "agentic", "all") for name in categories)
    out = out.resolve()
    with runs.ending():
        without = () if vector else VECTOR
        python = environment(venv.resolve(), [PACKAGE, UNDECLARED], console, python="3.11", without=without)
        with runs.target(base_url, key, model, engine_flag or [], console) as target:
            spec = {**asdict(target), "out": str(out), "categories": categories, "limit": limit}
            spec |= {"max_tokens": max_tokens, "task_seconds": task_seconds, "parallel": parallel}
            program = Path(__file__).with_name("bfcl_runner.py")
            search = {SEARCH_KEY: os.environ[SEARCH_KEY]} if SEARCH_KEY in os.environ else {}
            runs.run_rows(rows, python, program, spec, out / "bfcl.log", console, **search)
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
    runs.publish(result, out / "bfcl.json", "BFCL", as_json)


def check_categories(categories: list[str]) -> None:
    """Raises:
    typer.BadParameter: web search without its search key.
    """
    searches = any(name in ("agentic", "all") or "web_search" in name for name in categories)
    if searches and not os.environ.get(SEARCH_KEY):
        raise typer.BadParameter(f"web_search asks a live search engine: set {SEARCH_KEY}, or leave it out")
