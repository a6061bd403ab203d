"""`agentkv check`: is this machine fit for the product?"""

from __future__ import annotations

import json
from pathlib import Path
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
    server: Annotated[
        bool, typer.Option("--server", help="The engine on SGLang against SGLang alone and an independent run.")
    ] = False,
    model_path: Annotated[
        Path | None, typer.Option(help="With --server: Hugging Face folder; default is the default model.")
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="With --server: SGLang's attention backend instead of the usual one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check this machine, one table.

    --standalone: kernels, query rings, automaton, window indices and a decode loop against references, under 8 minutes.
    --server: identity with SGLang, keep-sets, captured queries, aborts and the like, under 10 minutes.
    """
    if standalone == server:
        raise typer.BadParameter("choose what to check: --standalone or --server")
    if standalone:
        from agentkv_serve.check.gpu import run

        report = run()
    else:
        from agentkv_serve.check import server as server_check
        from agentkv_serve.children import ChildDied
        from agentkv_serve.model import default_model

        try:
            report = server_check.run(model_path or default_model(), attention_backend)
        except (ChildDied, TimeoutError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
    print(json.dumps(report.as_dict(), indent=2) if as_json else report.as_table())
    if not report.ok:
        raise typer.Exit(1)
