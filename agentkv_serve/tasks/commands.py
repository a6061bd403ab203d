"""Adds the task benchmarks to a command group."""

from __future__ import annotations

import typer

from agentkv_serve.tasks.bfcl import bfcl
from agentkv_serve.tasks.tau2 import tau2


def register(app: typer.Typer) -> None:
    """Adds `bfcl` and `tau2` to the group."""
    app.command("bfcl")(bfcl)
    app.command("tau2")(tau2)
