"""`agentkv top`: the fleet, or one session, in a terminal, refreshed live."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

KEY_VARIABLE = "AGENTKV_ADMIN_KEY"
PHASES = {"think": "magenta", "act": "blue", "tool": "yellow", "others": "white"}
MARKS = {"think": "▓", "act": "█", "tool": "▒", "others": "░"}
"""A mark for each phase, so that the bars can be read without colour."""
BAR = 24


class Unreachable(Exception):
    """The gateway cannot be read; the message says what to do."""


class Reader:
    """Reads a gateway's admin API."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=url.rstrip("/"), headers={"authorization": f"Bearer {key}"}, timeout=10, trust_env=False
        )

    def read(self, path: str) -> dict[str, Any]:
        """One object of the API.

        Raises:
            Unreachable: there is no such gateway, or it refuses.
        """
        try:
            reply = self._http.get(path)
        except httpx.TransportError as error:
            raise Unreachable(f"{self._http.base_url} does not answer: {error}") from error
        if reply.status_code != 200:
            try:
                said = str(reply.json()["error"]["message"])
            except (ValueError, KeyError, TypeError):
                said = reply.text[:200]
            hint = f" Give the key by --key or {KEY_VARIABLE}." if reply.status_code == 401 else ""
            raise Unreachable(f"{reply.status_code}: {said}{hint}")
        return dict(reply.json())

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def health(worker: dict[str, Any]) -> Text:
    """A worker's state in a word."""
    if not worker["healthy"]:
        return Text("down", "bold red")
    if worker["draining"]:
        return Text("draining", "yellow")
    breaker = worker["breaker"]
    return Text("up", "green") if breaker == "closed" else Text(f"breaker {breaker}", "yellow")


def ago(seconds: float, now: float) -> str:
    """How long ago a time was."""
    past = max(0, int(now - seconds))
    return f"{past} s" if past < 60 else f"{past // 60} min" if past < 3600 else f"{past // 3600} h"


def table(title: str, *columns: str) -> Table:
    """An empty table; a column whose name begins with `>` is right-aligned."""
    made = Table(title=title, title_justify="left", expand=True, pad_edge=False, box=None, header_style="bold")
    for column in columns:
        made.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return made


def fleet_frame(fleet: dict[str, Any], now: float, rows: int = 40) -> RenderableType:
    """Workers, and the sessions used last (at most `rows`)."""
    workers = table("Workers", "worker", "state", ">running", ">sessions", ">KV tokens", "models")
    for w in fleet["workers"]:
        models = ", ".join(w["models"]) or "-"
        workers.add_row(w["id"], health(w), str(w["inflight"]), str(w["sessions"]), f"{w['kv_tokens']:,}", models)
    sessions = table("Sessions", "session", "state", ">turns", ">KV tokens", ">budget", "worker", "tenant", ">used")
    for s in fleet["sessions"][:rows]:
        state = Text("running", "green") if s["running"] else Text("idle")
        sessions.add_row(
            s["key"],
            state,
            str(s["turns"]),
            f"{s['kv_tokens']:,}",
            s["budget"] or "default",
            s["worker"],
            s["tenant"],
            ago(s["used"], now),
        )
    shown = min(rows, len(fleet["sessions"]))
    note = f"{shown} of {fleet['total']:,} sessions, store {fleet['store']}"
    return Group(workers, "", sessions, "", Text(note, "dim"))


def session_frame(view: dict[str, Any], rows: int = 24) -> RenderableType:
    """A session's turns (the last `rows`), each with what it left behind."""
    engine = view["engine"]
    head = f"session {view['key']} on {view['worker']}: {view['tokens']:,} tokens"
    if "error" in engine:
        return Group(Text(head, "bold"), Text(engine["error"], "red"))
    head += f", {engine['held']:,} held, {engine['evicted']:,} evicted, {engine['state']}"
    turns = table(
        "Turns", ">turn", "state", ">tokens", ">held", ">evicted", ">prefilled", ">budget", ">cuts", "held by phase"
    )
    for t in engine["turns"][-rows:]:
        state = f"{t['state']}: {t['reason']}" if t["reason"] else t["state"]
        numbers = [f"{t[name]:,}" for name in ("logical", "held", "evicted", "prefill")]
        budget = f"{t['budget']:,}" if t["budget"] else "full"
        turns.add_row(str(t["epoch"] + 1), state, *numbers, budget, str(t["compactions"]), bar(t["phases"], t["held"]))
    legend = Text.assemble(*(part for p, c in PHASES.items() for part in ((MARKS[p], c), (f" {p}  ", "dim"))))
    return Group(Text(head, "bold"), "", turns, "", legend)


def bar(phases: dict[str, float], held: int) -> Text:
    """A bar of `BAR` characters, divided as the held tokens are; the largest phases are rounded in its favour."""
    made = Text()
    total = max(1, held)
    edge = filled = 0.0
    for phase, colour in PHASES.items():
        edge += BAR * phases.get(phase, 0.0) / total
        width = round(edge) - round(filled)
        made.append(MARKS[phase] * width, colour)
        filled = edge
    return made


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def top(
    url: Annotated[str, typer.Option(help="The gateway's address.")] = "http://127.0.0.1:8000",
    key: Annotated[str, typer.Option(help=f"The admin key. [default: {KEY_VARIABLE}]")] = "",
    session: Annotated[str, typer.Option(help="Show one session (its 16 digits) instead of the fleet.")] = "",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and stop.")] = False,
) -> None:
    """Watch workers and sessions of a gateway; Ctrl-C stops."""
    console = Console()
    reader = Reader(url, key or os.environ.get(KEY_VARIABLE, ""))

    def frame() -> RenderableType:
        if session:
            return session_frame(reader.read(f"/admin/sessions/{session}"), max(5, console.height - 8))
        return fleet_frame(reader.read("/admin/fleet"), time.time(), max(5, console.height - 14))

    try:
        if once or not console.is_terminal:
            console.print(frame())
            return
        with Live(frame(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                try:
                    live.update(frame(), refresh=True)
                except Unreachable as error:  # it may come back: a watch does not end with a restart
                    live.update(Text(str(error), "red"), refresh=True)
    except KeyboardInterrupt:
        pass
    except Unreachable as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        reader.close()
