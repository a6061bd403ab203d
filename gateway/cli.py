"""`agentkv gateway`."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import uvicorn
from pydantic import ValidationError

from agentkv_serve.gateway.app import create_app
from agentkv_serve.gateway.logs import configure
from agentkv_serve.gateway.settings import Settings, load_settings

_COLLECT = (20_000, 20, 20)

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
    log_level: Annotated[str | None, typer.Option(help="Log level (default info).")] = None,
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
    if log_level is not None:
        given["log"] = {"level": log_level}
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
    serve(settings)


class Server(uvicorn.Server):
    """Says that it stops before it stops, so that load balancers look elsewhere in time."""

    def __init__(self, config: uvicorn.Config, delay: float, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._delay = delay
        self._stopping = stopping
        self._told = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. What was made until now lives as long as the process, and requests hold few cycles: the collector of
        cycles need not look at all of it again and again."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_COLLECT)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: not ready any more, and after the delay no new requests; second signal: at once."""
        if self._told or not self._delay:
            self._stopping()
            super().handle_exit(sig, frame)
            return
        self._told = True
        self._stopping()
        asyncio.get_running_loop().call_later(self._delay, super().handle_exit, sig, frame)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; running streams are finished within `shutdown_grace`."""
    configure(settings.log)
    # Prompts are tokenised one at a time: a pool of threads for each would only cost.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    application = create_app(settings)
    config = uvicorn.Config(
        application,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        loop="uvloop",
        http="httptools",
        ws="none",
        timeout_graceful_shutdown=int(settings.shutdown_grace),
        server_header=False,
        date_header=False,
    )

    def stopping() -> None:
        if hasattr(application.state, "runtime"):  # else the signal came before the start was done
            application.state.runtime.stopping = True

    Server(config, settings.shutdown_delay, stopping).run()


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
