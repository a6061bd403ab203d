"""`agentkv demo`: the same recorded agent run at a small budget and with everything kept, one row per turn."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import openai
import typer
from rich.console import Console

from agentkv_serve.bench.report import machine
from agentkv_serve.children import ChildDied
from agentkv_serve.demo.agent import converse
from agentkv_serve.demo.recording import load_recording
from agentkv_serve.demo.turns import MAX_TOKENS
from agentkv_serve.model import ModelError, check_model, default_model
from agentkv_serve.stack import StackError, StackSettings
from agentkv_serve.up import Stopped, model_id, started, stop_signals

Turns = list[dict[str, Any]]
Converse = Callable[[str], Iterator[dict[str, Any]]]

PREFILL_SLACK = 64  # tokens that a resumed turn may compute besides its new ones
KV_SLACK = 128 + 16  # tokens over the budget between two compressions, and the largest page
COLUMNS = ("turn", "state", "logical", "kv", "evicted", "think", "act", "tool", "others", "prefill", "tok/s", "did")
ROW = "{:>4} {:<8} {:>7} {:>5} {:>7}  {:>5} {:>5} {:>5} {:>6}  {:>7} {:>5}  {}"
# Runs a module of this package in another environment without that of this one on its path.
LANGCHAIN = """
import runpy, sys, types
package = types.ModuleType("agentkv_serve")
package.__path__ = [sys.argv.pop(1)]
sys.modules["agentkv_serve"] = package
runpy.run_module("agentkv_serve.demo.langchain_agent", run_name="__main__")
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def demo(
    budget: Annotated[int, typer.Option(min=128, help="KV tokens per layer and KV head.")] = 512,
    turns: Annotated[int, typer.Option(min=2, help="Turns to run of the recording's 13.")] = 13,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; default: SmolLM2-135M.")] = None,
    url: Annotated[str | None, typer.Option(help="A running `agentkv up` to use instead of an own one.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every turn's facts there.")] = None,
    langchain: Annotated[bool, typer.Option("--langchain", help="Run the agent with LangChain.")] = False,
    clients_python: Annotated[Path, typer.Option(help="The Python that has langchain-openai.")] = Path(
        ".venv-clients/bin/python"
    ),
) -> None:
    """Run an agent of many turns at a small KV budget, then the same one with everything kept."""
    console = Console()
    recording = load_recording()
    if langchain and not clients_python.exists():
        raise typer.BadParameter(f"{clients_python} does not exist: run `make setup`, or name --clients-python")
    try:
        with stop_signals(), contextlib.ExitStack() as cleanup:
            if url is None:
                folder = model.expanduser().resolve() if model else default_model(console)
                check_model(folder)
                url = cleanup.enter_context(started(StackSettings(folder), console)).base_url
            name = model_id(url)
            console.print(f"{name} at {url}; the run: {recording.origin}\n")

            def run(kv_budget: str) -> Iterator[dict[str, Any]]:
                if langchain:
                    return in_langchain(clients_python, url, name, kv_budget, turns)
                return converse(url, name, recording, kv_budget, turns)

            small = show(f"budget {budget}", run(str(budget)))
            full = show("budget full", run("full"))
    except Stopped:
        raise typer.Exit(130) from None
    except (ModelError, StackError, ChildDied) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except openai.OpenAIError as error:
        typer.echo(f"error: the agent's call failed: {error}", err=True)
        raise typer.Exit(1) from error
    if json_file:
        head = {"budget": budget, "model": name, "client": "langchain" if langchain else "openai"}
        setting = {"temperature": 0, "max_tokens": MAX_TOKENS, "recording": recording.origin, "machine": machine()}
        json_file.write_text(json.dumps({**head, "turns": small, "full": {"turns": full}, **setting}, indent=2))
    wrong = [*broken_promises(small, budget), *(f"full: {p}" for p in broken_promises(full, None))]
    for promise in wrong:
        console.print(f"[red]not as promised:[/red] {promise}")
    if wrong:
        raise typer.Exit(1)
    console.print(summary(small, full))


def show(title: str, turns: Iterable[dict[str, Any]]) -> Turns:
    """Prints a row for each turn as it ends; returns the turns."""
    done: Turns = []
    print(f"{title}\n{ROW.format(*COLUMNS)}", flush=True)
    for number, turn in enumerate(turns, 1):
        done.append(turn)
        phases = turn["phases"] or {}
        speed = turn["decode_tok_s"]
        cells = [turn[key] for key in ("state", "logical_tokens", "kv_tokens", "evicted_tokens")]
        cells += [round(phases.get(phase, 0)) for phase in ("think", "act", "tool", "others")]
        cells += [turn["prefill_tokens"], "-" if speed is None else f"{speed:.1f}", turn["did"]]
        print(ROW.format(*map(str, (number, *cells))), flush=True)
    print()
    return done


def broken_promises(turns: Turns, budget: int | None) -> list[str]:
    """Says which of the product's promises a run broke: resumed from the second turn on, only new tokens
    computed, and (with a budget) never more KV held than the budget allows."""
    broken: list[str] = []
    for number, (before, turn) in enumerate(zip([None, *turns], turns, strict=False), 1):
        expected = "resumed" if before else "new"
        if turn["state"] != expected:
            broken.append(f"turn {number} is {turn['state']} ({turn['reason']}), not {expected}")
        elif before:
            new = turn["prompt_tokens"] - before["prompt_tokens"] - before["completion_tokens"]
            if turn["prefill_tokens"] > new + PREFILL_SLACK:
                broken.append(f"turn {number} computed {turn['prefill_tokens']} prompt tokens for {new} new ones")
        if budget is not None and (turn["kv_tokens"] or 0) > budget + KV_SLACK:
            broken.append(f"turn {number} held {turn['kv_tokens']} KV tokens at a budget of {budget}")
    return broken


def summary(small: Turns, full: Turns) -> str:
    """One sentence on both runs."""
    held, kept = small[-1]["kv_tokens"], full[-1]["kv_tokens"]
    return (
        f"{len(small)} turns: {small[-1]['logical_tokens']} tokens of conversation on {held} KV tokens a layer and "
        f"head, {full[-1]['logical_tokens']} on {kept} with everything kept. Every turn after the first was resumed."
    )


def in_langchain(python: Path, url: str, model: str, budget: str, turns: int) -> Iterator[dict[str, Any]]:
    """Runs the LangChain loop in its own environment and yields its turns.

    Raises:
        ChildDied: the loop failed; its own words are on stderr.
    """
    package = Path(__file__).resolve().parent.parent
    command = [str(python), "-c", LANGCHAIN, str(package), url, model, budget, str(turns)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise ChildDied(f"the LangChain agent failed (exit {process.returncode})")
