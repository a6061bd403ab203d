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
from agentkv_serve.children import ChildDied
from agentkv_serve.model import ModelError
from agentkv_serve.stack import StackError
from agentkv_serve.tasks import runs
from agentkv_serve.tasks.environment import EnvironmentFailed, environment
from agentkv_serve.tasks.paper import references
from agentkv_serve.up import Stopped, stop_signals

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
    policy: Annotated[list[str] | None, typer.Option(help="Policies; default: agentkv.")] = None,
    budget: Annotated[
        list[int] | None, typer.Option(help="KV tokens per layer and KV head; default: 512, 1024.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; default: SmolLM2-135M.")] = None,
    base_url: Annotated[str | None, typer.Option(help="A running gateway, in place of one of our own.")] = None,
    key: Annotated[str, typer.Option(envvar="AGENTKV_API_KEY", help="Its API key.")] = "any",
    user_llm: Annotated[str | None, typer.Option(help="The user's model, as litellm names it; default: ours.")] = None,
    user_args: Annotated[str, typer.Option(help="JSON object of litellm arguments for it.")] = "{}",
    judge_llm: Annotated[
        str | None, typer.Option(help="Model that judges the tasks which need it; default: the benchmark's own.")
    ] = None,
    judge_args: Annotated[str, typer.Option(help="JSON object of litellm arguments for it.")] = "{}",
    user_script: Annotated[
        Path | None, typer.Option(help='JSON file {task id or "*": [what the user says, …]}: no model for the user.')
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Cap of one reply; default: 64 for the default model.")] = None,
    max_steps: Annotated[int, typer.Option(min=1, help="Messages until a task is given up.")] = 200,
    task_seconds: Annotated[float, typer.Option(help="A task that takes longer counts as failed.")] = 600.0,
    seed: Annotated[int, typer.Option(help="The benchmark's seed of agent and user.")] = 300,
    out: Annotated[Path, typer.Option(help="Folder of the results; a run that is there already goes on.")] = Path(
        "tau2"
    ),
    venv: Annotated[Path, typer.Option(help="Its own environment; made where missing.")] = Path(".venv-tau2"),
    engine_flag: Annotated[list[str] | None, typer.Option(help="A flag for our engine, as --flag=value.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """tau2-bench: rewards at budgets against everything kept."""
    console = Console(stderr=True)
    path, out = path.resolve(), out.resolve()
    domains = domain or list(DOMAINS)
    check_tree(path, domains)
    user = script_of(user_script) if user_script else model_of(user_llm, user_args, "--user-args")
    judge = model_of(judge_llm, judge_args, "--judge-args")
    rows = runs.settings(policy or ["agentkv"], budget or [512, 1024])
    if max_tokens is None and model is None and base_url is None:
        max_tokens = runs.SMALL_MODEL_TOKENS
    try:
        python = environment(venv.resolve(), ["-e", str(path)], console, python="3.12")
        with stop_signals(), runs.target(base_url, key, model, engine_flag or [], console) as target:
            spec = {**asdict(target), "out": str(out), "domains": domains, "split": split, "tasks": task}
            spec |= {"limit": limit, "max_tokens": max_tokens, "task_seconds": task_seconds, "max_steps": max_steps}
            spec |= {"seed": seed, "user": user, "judge": judge}
            for row in rows:
                console.print(f"{row.name}: log in {out / 'tau2.log'}")
                program = Path(__file__).with_name("tau2_runner.py")
                kept = {name: value for name, value in os.environ.items() if name.endswith("_API_KEY")}
                data = {"TAU2_DATA_DIR": str(path / "data")}
                runs.run_program(python, program, spec | {"settings": [asdict(row)]}, out, "tau2.log", **kept, **data)
    except Stopped:
        raise typer.Exit(130) from None
    except (ModelError, StackError, ChildDied, EnvironmentFailed, runs.RunnerFailed) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
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
    (out / "tau2.json").write_text(json.dumps(result, indent=2))
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        runs.show(result, "tau2-bench", Console())


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
