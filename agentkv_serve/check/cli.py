"""`agentkv check`: is this machine fit for the product?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def check() -> None:
    """Checks that run on your own machine."""


@app.command()
def gpu(
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Kernels and a decode loop alone; needs only torch and triton.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Kernels, query rings, automaton, window indices and a decode loop against references (under 8
    minutes)."""
    if not standalone:
        raise typer.BadParameter("choose what to check: --standalone")
    from agentkv_serve.check.gpu import run

    report = run()
    print(json.dumps(report.as_dict(), indent=2) if as_json else report.as_table())
    if not report.ok:
        raise typer.Exit(1)
