"""`agentkv gateway`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from pydantic import ValidationError

from agentkv_serve.gateway.app import create_app
from agentkv_serve.gateway.settings import Settings, load_settings

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def gateway(
    worker: Annotated[list[str] | None, typer.Option(help="URL of an engine worker; repeat for several.")] = None,
    model_path: Annotated[Path | None, typer.Option(help="Model folder with tokenizer and template.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind (default 8000).")] = None,
    worker_key: Annotated[str | None, typer.Option(help="Key of the workers' API.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must send.")] = None,
    budget: Annotated[str | None, typer.Option(help="Default KV budget: full, auto or tokens.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting as dotted.name=value; repeat for several.")
    ] = None,
    check_config: Annotated[bool, typer.Option("--check-config", help="Check the settings and stop.")] = False,
    log_level: Annotated[str, typer.Option(help="Log level.")] = "info",
) -> None:
    """Start the session gateway. Settings: flags over AGENTKV_GATEWAY_* variables over --config."""
    flags: dict[str, Any] = {
        "model_path": model_path,
        "host": host,
        "port": port,
        "worker_key": worker_key,
        "api_key": api_key,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if worker:
        given["workers"] = [{"url": url} for url in worker]
    if budget is not None:
        given["budget"] = {"default": budget}
    for item in set_ or ():
        _assign(given, item)
    try:
        settings = load_settings(config, given)
    except (ValidationError, ValueError, FileNotFoundError) as error:
        typer.echo(f"agentkv gateway: {_explain(error)}", err=True)
        raise typer.Exit(2) from None
    if check_config:
        typer.echo(settings.model_dump_json(indent=2))
        return
    serve(settings, log_level)


def serve(settings: Settings, log_level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT; running streams are finished within `shutdown_grace`."""
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level=log_level,
        access_log=False,
        loop="uvloop",
        http="httptools",
        ws="none",
        timeout_graceful_shutdown=int(settings.shutdown_grace),
        server_header=False,
        date_header=False,
    )


def _assign(target: dict[str, Any], item: str) -> None:
    path, equals, value = item.partition("=")
    if not equals:
        raise typer.BadParameter(f"--set needs dotted.name=value, got {item!r}")
    *parents, last = path.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    target[last] = value


def _explain(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    lines = []
    for fault in error.errors(include_url=False, include_input=False):
        place = ".".join(str(part) for part in fault["loc"]) or "settings"
        lines.append(f"{place}: {fault['msg']}")
    return "\n  ".join(["wrong settings:", *lines])
