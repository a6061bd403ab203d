"""What both task benchmarks share: their settings, the gateway that they talk to, and the table of their scores."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentkv_serve.children import ChildDied
from agentkv_serve.evaluation.statistics import compare_shares, interval
from agentkv_serve.model import ModelError, check_model, default_model
from agentkv_serve.stack import StackError, StackSettings
from agentkv_serve.tasks.environment import EnvironmentFailed
from agentkv_serve.tasks.paper import Reference
from agentkv_serve.up import Stopped, model_id, started, stop_signals

SMALL_MODEL_TOKENS = 64
"""Cap of a reply by the default model, which rarely ends one by itself."""


@dataclass(frozen=True)
class Setting:
    """A policy at a budget; `full` keeps everything."""

    name: str
    policy: str
    budget: int | str


@dataclass(frozen=True)
class Target:
    """The gateway that the tasks run through, and the name of its model."""

    base_url: str
    key: str
    model: str


class RunnerFailed(Exception):
    """The benchmark's own program ended with an error; its output says why."""


def settings(policies: Sequence[str], budgets: Sequence[int]) -> list[Setting]:
    """Everything kept first, then every policy at every budget."""
    rows = [Setting("full", "full", "full")]
    return rows + [Setting(f"{policy}-{budget}", policy, budget) for policy in policies for budget in budgets]


@contextlib.contextmanager
def target(
    base_url: str | None, key: str, model: Path | None, engine_flags: Sequence[str], console: Console
) -> Iterator[Target]:
    """The given gateway, or one with an engine started for the run.

    Raises:
        ModelError, StackError, ChildDied: the model cannot be served.
    """
    if base_url is not None:
        base_url = base_url.rstrip("/").removesuffix("/v1")
        yield Target(base_url, key, model_id(base_url))
        return
    folder = model.expanduser().resolve() if model else default_model(console)
    check_model(folder)
    with started(StackSettings(folder, budget="full", engine_flags=tuple(engine_flags)), console) as stack:
        yield Target(stack.base_url, key, model_id(stack.base_url))


def reply_cap(given: int | None, model: Path | None, base_url: str | None) -> int | None:
    """Cap of a reply in tokens: the given one, else one for the default model alone."""
    return SMALL_MODEL_TOKENS if given is None and model is None and base_url is None else given


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Ends a command as its user expects.

    Raises:
        typer.Exit: 130 for a stop signal; 1, its message printed, for what could not be had or failed.
    """
    try:
        with stop_signals():
            yield
    except Stopped:
        raise typer.Exit(130) from None
    except (ModelError, StackError, ChildDied, EnvironmentFailed, RunnerFailed) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def run_rows(
    rows: Sequence[Setting],
    python: Path,
    program: Path,
    spec: dict[str, Any],
    log: Path,
    console: Console,
    **environment: str,
) -> None:
    """Runs a benchmark's program once for each setting, with `log`'s folder for its results.

    Raises:
        RunnerFailed: it ended with an error.
    """
    for row in rows:
        console.print(f"{row.name}: log in {log}")
        run_program(python, program, spec | {"settings": [asdict(row)]}, log.parent, log.name, **environment)


def run_program(python: Path, program: Path, spec: dict[str, Any], out: Path, log: str, **environment: str) -> None:
    """Runs a benchmark's program with its spec; its output goes to `out/log`.

    Raises:
        RunnerFailed: it ended with an error.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "spec.json").write_text(json.dumps(spec, indent=1))
    with (out / log).open("ab") as output:
        done = subprocess.run(
            [str(python), "-P", str(program), str(out / "spec.json")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1", "HOME": str(Path.home()), **environment},
        )
    if done.returncode:
        tail = "\n".join((out / log).read_text(errors="replace").splitlines()[-20:])
        raise RunnerFailed(f"{program.name} ended with {done.returncode}; {out / log} ends:\n{tail}")


def summary(rows: Sequence[Setting], out: Path, references: Sequence[Reference]) -> dict[str, Any]:
    """Scores of all settings with intervals, against everything kept, and what the engine said of the turns."""
    outcomes = {row.name: _outcomes(out / f"{row.name}.json") for row in rows}
    turns = {row.name: _lines(out / f"{row.name}.turns.jsonl") for row in rows}
    base = outcomes[rows[0].name]
    return {
        "rows": [
            {
                "setting": row.name,
                "policy": row.policy,
                "budget": row.budget,
                **_scores(outcomes[row.name]),
                "against_full": None if row is rows[0] else _paired(outcomes[row.name], base),
                **_turns(turns[row.name], outcomes[row.name]),
            }
            for row in rows
        ],
        "references": [asdict(reference) for reference in references],
    }


def publish(result: dict[str, Any], file: Path, title: str, as_json: bool) -> None:
    """Writes a benchmark's result to `file`, and prints it: as JSON, or as a table."""
    text = json.dumps(result, indent=2)
    file.write_text(text)
    if as_json:
        print(text)
    else:
        show(result, title, Console())


def show(result: dict[str, Any], title: str, console: Console) -> None:
    """Prints a summary as a table, and the published scores in one beneath it that fits 80 columns."""
    table = Table("setting", "tasks", "score % [95%]", "− full [95%]", "overtime", "errors", "resumed", title=title)
    table.columns[0].no_wrap = True
    for row in result["rows"]:
        against = row["against_full"] or {}
        low, high = (100 * bound for bound in row["score_interval"])
        score = f"{100 * row['score']:.1f} [{low:.1f}, {high:.1f}]"
        difference = f"{100 * against['difference']:+.1f}" if "difference" in against else ""
        if "difference_95" in against:
            low, high = (100 * bound for bound in against["difference_95"])
            difference += f" [{low:+.1f}, {high:+.1f}]"
        resumed = f"{row['later_turns_resumed']} of {row['later_turns']}"
        counts = str(row["overtime"]), str(row["errors"]), resumed
        table.add_row(row["setting"], str(row["tasks"]), escape(score), escape(difference), *counts)
    console.print(table)
    published: dict[tuple[str, str, str], list[str]] = {}
    for reference in result["references"]:
        row_name = reference["group"], reference["model"], reference["policy"]
        score = (f"{reference['budget']}: " if reference["budget"] else "") + f"{reference['score']:.1f}"
        published.setdefault(row_name, []).append(score)
    if published:
        table = Table("group", "model", "policy", "KV tokens: score %", title="published, on other machines")
        for names, scores in published.items():
            table.add_row(*names, "  ".join(scores))
        console.print(table)


def _outcomes(path: Path) -> dict[str, dict[str, Any]]:
    return {outcome["task"]: outcome for outcome in json.loads(path.read_text())}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _scores(outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    values = np.asarray([float(outcome["valid"]) for outcome in outcomes.values()])
    return {
        "tasks": len(values),
        "score": float(values.mean()),
        "score_interval": interval(values),
        "overtime": sum(bool(outcome["overtime"]) for outcome in outcomes.values()),
        "errors": sum(bool(outcome["error"]) for outcome in outcomes.values()),
        "error_texts": sorted({outcome["error"] for outcome in outcomes.values() if outcome["error"]}),
    }


def _paired(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    both = sorted(ours.keys() & theirs.keys())
    values = [np.asarray([float(side[task]["valid"]) for task in both]) for side in (ours, theirs)]
    return compare_shares(values[0], values[1], np.ones(len(both)))


def _turns(turns: Sequence[dict[str, Any]], outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the engine said: one session a task, whose later turns go on from where it was."""
    later: list[dict[str, Any]] = []
    seen: set[str] = set()
    for turn in turns:
        if turn["task"] in seen:
            later.append(turn)
        seen.add(turn["task"])
    return {
        "sessions": len(seen & outcomes.keys()),
        "turns": len(turns),
        "later_turns": len(later),
        "later_turns_resumed": sum(turn.get("state") == "resumed" for turn in later),
        "states": dict(Counter(str(turn.get("state")) for turn in turns)),
        "turns_compressed": sum(bool(turn.get("evicted_tokens")) for turn in turns),
        "logical_tokens_max": max((int(turn.get("logical_tokens", 0)) for turn in turns), default=0),
        "kv_tokens_max": max((int(turn.get("kv_tokens", 0)) for turn in turns), default=0),
    }
