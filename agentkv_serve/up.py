"""`agentkv up`: engines and gateway together, until Ctrl-C or the death of any of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer
from rich.console import Console

from agentkv_serve.children import STOP_SIGNALS, ChildDied
from agentkv_serve.model import ModelError, check_model, default_model
from agentkv_serve.stack import Report, Stack, StackError, StackSettings, running

AGENT = """\
from openai import OpenAI
ask = OpenAI(base_url="{base_url}/v1", api_key="any").chat.completions.create
chat = [{{"role": "user", "content": "Name a colour."}}]
chat += [ask(model="{model}", messages=chat, max_tokens=32).choices[0].message]
print(ask(model="{model}", messages=[*chat, {{"role": "user", "content": "Another one?"}}], max_tokens=32))
"""


class Stopped(Exception):
    """The user or the system asked us to stop."""


@contextmanager
def stop_signals() -> Iterator[None]:
    """Turns a stop signal into `Stopped` in the main thread."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress(console: Console) -> Iterator[Report]:
    """Yields a report function: a live spinner in a terminal, one line per step elsewhere."""
    if not console.is_terminal:
        yield lambda name, text: console.print(f"{name}: {text}")
        return
    state: dict[str, str] = {}
    with console.status("starting …") as status:

        def report(name: str, text: str) -> None:
            state[name] = text
            status.update(", ".join(f"{child}: {doing}" for child, doing in state.items()) + " …")

        yield report


@contextmanager
def started(settings: StackSettings, console: Console) -> Iterator[Stack]:
    """`running` with its progress on the console."""
    with ExitStack() as cleanup:
        with progress(console) as report:
            stack = cleanup.enter_context(running(settings, report))
        yield stack


def model_id(base_url: str) -> str:
    """Returns the name under which the gateway serves its model."""
    reply = httpx.get(f"{base_url}/v1/models", trust_env=False, timeout=10)
    reply.raise_for_status()
    return str(reply.json()["data"][0]["id"])


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up(
    context: typer.Context,
    workers: Annotated[int, typer.Option(min=1, help="Engine processes.")] = 1,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; default: SmolLM2-135M.")] = None,
    budget: Annotated[str, typer.Option(help="KV tokens per layer and KV head: a number, full, auto.")] = "4096",
    port: Annotated[int | None, typer.Option(help="The gateway's port; default: 8000, or a free one.")] = None,
    engine_port: Annotated[list[int] | None, typer.Option(help="An engine's port; once per worker.")] = None,
) -> None:
    """Start workers and gateway together. Unknown options go to every engine as SGLang's own flags."""
    console = Console()
    try:
        with stop_signals():
            folder = model.expanduser().resolve() if model else default_model(console)
            check_model(folder)
            settings = StackSettings(folder, workers, budget, port, tuple(engine_port or ()), tuple(context.args))
            with started(settings, console) as stack:
                console.print(f"[bold]{stack.base_url}/v1[/bold]  (logs in {stack.logs}; Ctrl-C stops)\n")
                print(AGENT.format(base_url=stack.base_url, model=model_id(stack.base_url)), flush=True)
                watch(stack)
    except Stopped:
        console.print("stopped")
    except (ModelError, StackError, ChildDied) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def watch(stack: Stack) -> None:
    """Blocks for as long as every child lives.

    Raises:
        ChildDied: one of them has exited.
    """
    while True:
        stack.check()
        time.sleep(0.25)
