"""`agentkv bench`: one command per benchmark, each imported only when it runs."""

from __future__ import annotations

import importlib
import importlib.util

import typer
import typer._click as click  # typer ships its own click
from typer.core import TyperGroup

# name -> (module that defines a function of that name, typed for typer; one line of help)
BENCHMARKS: dict[str, tuple[str, str]] = {
    "decode": ("agentkv_serve.bench.decode", "Decode speed at a KV budget against everything kept, in one server."),
    "serve": ("agentkv_serve.bench.serve.cli", "Agents' load on stock SGLang and on ours at budgets."),
    "sessions": ("agentkv_serve.bench.sessions", "How many sessions one KV pool holds at once."),
    "overhead": ("agentkv_serve.bench.overhead", "What compactions, and capture below the budget, cost."),
    "policies": ("agentkv_serve.bench.policies", "Scoring time of each policy."),
    "kernels": ("agentkv_serve.bench.kernels", "Every kernel on the shapes of real models."),
    "label": ("agentkv_serve.bench.label", "Rendering and labelling of prompts."),
    "gateway": ("agentkv_serve.bench.gateway", "What the gateway adds to a request."),
}


class Benchmarks(TyperGroup):
    """The benchmarks whose modules this installation has."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _) in BENCHMARKS.items() if importlib.util.find_spec(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name)(getattr(importlib.import_module(BENCHMARKS[cmd_name][0]), cmd_name))
        return typer.main.get_command(single)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, BENCHMARKS[name][1]) for name in self.list_commands(ctx)])


app = typer.Typer(cls=Benchmarks, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Benchmarks; each prints its full configuration and the machine."""
