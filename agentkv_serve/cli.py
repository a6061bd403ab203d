"""The `agentkv` command. Each sub-command lives with its part and is imported only when it runs."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
import typer._click as click  # typer ships its own click
from typer.core import TyperGroup

# name -> (module that defines `app` (a typer.Typer), one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "model": ("agentkv_serve.model", "Fetch the default model into the cache folder, or check a given one."),
    "calibrate": ("agentkv_serve.engine.calibrate", "Write a model's query statistics for the triattention policy."),
    "engine": ("agentkv_serve.engine.launch", "Start one SGLang worker with the AgentKV cache."),
    "gateway": ("agentkv_serve.gateway.cli", "Start the session gateway."),
    "up": ("agentkv_serve.up", "Start workers and gateway together."),
    "top": ("agentkv_serve.top", "Watch workers and sessions of a gateway, live."),
    "simulate": ("agentkv_serve.simulate.cli", "Simulate a fleet from measured service times."),
    "demo": ("agentkv_serve.demo.cli", "Run an agent of many turns against `agentkv up`."),
    "label": ("agentkv_serve.phase_tagger.cli", "Show the phase of every token of a transcript."),
    "check": ("agentkv_serve.check.cli", "Check this machine: kernels, decode loop and engine on its GPU."),
    "eval": ("agentkv_serve.evaluation.cli", "Quality of the policies on recorded agent runs."),
    "analyze": ("agentkv_serve.evaluation.analyze", "What a model's queries look like, phase by phase."),
    "bench": ("agentkv_serve.bench.cli", "Benchmarks; each prints its full configuration."),
}


class LazyGroup(TyperGroup):
    """A command group that imports a sub-command's module on first use, so that `--help` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        return typer.main.get_command(importlib.import_module(module).app)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """AgentKV Serve: serve LLM agents from a compressed KV cache."""


def main(*args: Any) -> None:
    """Entry point of the `agentkv` console script."""
    app(*args or (sys.argv[1:],))
