"""`agentkv eval tau2`: tau2-bench through the gateway, one session per task. The user gives its source tree."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agentkv_serve.bench.report import machine
from agentkv_serve.tasks import options, runs
from agentkv_serve.tasks.environment import environment
from agentkv_serve.tasks.paper import references

DOMAINS = ("airline", "retail", "telecom")
NEEDED = {
    "airline": ("db.json", "tasks.json", "split_tasks.json", "policy.md"),
    "retail": ("db.json", "tasks.json", "split_tasks.json", "policy.md"),
    "telecom": ("db.toml", "user_db.toml", "tasks.json", "split_tasks.json", "main_policy.md"),
}


def tau2(
    path: Annotated[Path, typer.Option(help="A checkout of tau2-bench (github.com/sierra-research/tau2-bench).")],
    domain: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(DOMAINS)}; default: all.")] = None,
    split: Annotated[str, typer.Option(help="The benchmark's name of a task split.")] = "base",
    task: Annotated[list[str] | None, typer.Option(help="Task ids; default: all of the split.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First tasks of each domain.")] = None,
    policy: options.Policies = None,
    budget: options.Budgets = None,
    model: options.Model = None,
    base_url: options.BaseUrl = None,
    key: options.Key = "any",
    user_llm: Annotated[str | None, typer.Option(help="The user's model, as litellm names it; default: ours.")] = None,
    user_args: Annotated[str, typer.Option(help="JSON object of litellm arguments for it.")] = "{}",
    judge_llm: Annotated[
        str | None, typer.Option(help="Model that judges the tasks which need it; default: the benchmark's own.")
    ] = None,
    judge_args: Annotated[str, typer.Option(help="JSON object of litellm arguments for it.")] = "{}",
    user_script: Annotated[
        Path | None, typer.Option(help='JSON file {task id or "*": [what the user says, …]}: no model for the user.')
    ] = None,
    max_tokens: options.MaxTokens = None,
    max_steps: Annotated[int, typer.Option(min=1, help="Messages until a task is given up.")] = 200,
    task_seconds: options.TaskSeconds = 600.0,
    seed: Annotated[int, typer.Option(help="The benchmark's seed of agent and user.")] = 300,
    out: options.Out = Path("tau2"),
    venv: options.Venv = Path(".venv-tau2"),
    engine_flag: options.EngineFlags = None,
    as_json: options.AsJson = False,
) -> None:
    """tau2-bench: rewards at budgets against everything kept."""
    console = Console(stderr=True)
    path, out = path.resolve(), out.resolve()
    domains = domain or list(DOMAINS)
    check_tree(path, domains)
    user = script_of(user_script) if user_script else model_of(user_llm, user_args, "--user-args")
    judge = model_of(judge_llm, judge_args, "--judge-args")
    rows = runs.settings(policy or ["agentkv"], budget or [512, 1024])
    max_tokens = runs.reply_cap(max_tokens, model, base_url)
    with runs.ending():
        python = environment(venv.resolve(), ["-e", str(path)], console, python="3.12")
        with runs.target(base_url, key, model, engine_flag or [], console) as target:
            spec = {**asdict(target), "out": str(out), "domains": domains, "split": split, "tasks": task}
            spec |= {"limit": limit, "max_tokens": max_tokens, "task_seconds": task_seconds, "max_steps": max_steps}
            spec |= {"seed": seed, "user": user, "judge": judge}
            program = Path(__file__).with_name("tau2_runner.py")
            kept = {name: value for name, value in os.environ.items() if name.endswith("_API_KEY")}
            kept["TAU2_DATA_DIR"] = str(path / "data")
            runs.run_rows(rows, python, program, spec, out / "tau2.log", console, **kept)
    result = {
        "benchmark": "tau2-bench",
        **runs.summary(rows, out, references("tau2", set(domains))),
        "configuration": {
            "model": target.model,
            "domains": domains,
            "split": split,
            "tasks": task,
            "limit": limit,
            "user": "script" if user_script else user_llm or target.model,
            "judge": judge_llm,
            "max_tokens": max_tokens,
            "task_seconds": task_seconds,
            "max_steps": max_steps,
            "seed": seed,
            "engine_flags": engine_flag or [],
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
        "machine": machine(),
    }
    runs.publish(result, out / "tau2.json", "tau2-bench", as_json)


def check_tree(path: Path, domains: list[str]) -> None:
    """Raises:
    typer.BadParameter: the folder is no checkout of tau2-bench, or lacks a domain's data; says which files.
    """
    if unknown := sorted(set(domains) - set(DOMAINS)):
        raise typer.BadParameter(f"no domain {', '.join(unknown)}; there are {', '.join(DOMAINS)}")
    if not (path / "src" / "tau2").is_dir():
        raise typer.BadParameter(f"{path} is no checkout of tau2-bench: it has no src/tau2")
    folder = path / "data" / "tau2" / "domains"
    missing = [
        str((folder / domain / name).relative_to(path))
        for domain in domains
        for name in NEEDED[domain]
        if not (folder / domain / name).is_file()
    ]
    if missing:
        raise typer.BadParameter(f"{path} lacks {', '.join(missing)}: give a whole checkout, or leave the domain out")


def script_of(path: Path) -> dict[str, Any]:
    """The user's side of the spec: what a scripted user says.

    Raises:
        typer.BadParameter: the file is no such script.
    """
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    if not isinstance(lines, dict) or not all(isinstance(said, list) for said in lines.values()):
        raise typer.BadParameter(f'{path} must be a JSON object {{task id or "*": [text, …]}}')
    return {"script": lines}


def model_of(name: str | None, arguments: str, option: str) -> dict[str, Any]:
    """A model of litellm's with its arguments; {} where none is named.

    Raises:
        typer.BadParameter: the arguments are no JSON object.
    """
    try:
        given = json.loads(arguments)
    except ValueError as error:
        raise typer.BadParameter(f"{option} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{option} must be a JSON object")
    return {"llm": name, "llm_args": given} if name else {}
