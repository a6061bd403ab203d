"""Options that every task benchmark has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Policies = Annotated[list[str] | None, typer.Option(help="Policies; default: agentkv.")]
Budgets = Annotated[list[int] | None, typer.Option(help="KV tokens per layer and KV head; default: 512, 1024.")]
Model = Annotated[Path | None, typer.Option(help="A Hugging Face folder; default: SmolLM2-135M.")]
BaseUrl = Annotated[str | None, typer.Option(help="A running gateway, in place of one of our own.")]
Key = Annotated[str, typer.Option(envvar="AGENTKV_API_KEY", help="Its API key.")]
MaxTokens = Annotated[int | None, typer.Option(help="Cap of one reply; default: 64 for the default model.")]
TaskSeconds = Annotated[float, typer.Option(help="A task that takes longer counts as failed.")]
Out = Annotated[Path, typer.Option(help="Folder of the results; a run that is there already goes on.")]
Venv = Annotated[Path, typer.Option(help="The benchmark's own environment; made where missing.")]
EngineFlags = Annotated[list[str] | None, typer.Option(help="A flag for our engine, as --flag=value.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
