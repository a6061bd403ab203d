"""`agentkv top` against a real gateway."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from agentkv_serve.top import BAR, app, bar, session_frame
from tests.gateway.conftest import Stack, user
from tests.ui.conftest import KEY, OPERATOR, watched

__all__ = ["watched"]
TOP = [sys.executable, "-P", "-m", "agentkv_serve", "top"]
Watched = Callable[..., Stack]


def run(url: str, *words: str, key: str = KEY) -> Result:
    return CliRunner().invoke(app, ["--url", url, *words], env={"AGENTKV_ADMIN_KEY": key, "COLUMNS": "160"})


def test_one_frame_shows_workers_and_sessions(watched: Watched) -> None:
    stack = watched(engines=2)
    told = stack.say([user("Hello")], headers={"x-agentkv-budget": "512"})["agentkv"]
    done = run(stack.url, "--once")
    assert done.exit_code == 0, done.output
    row = next(line for line in done.stdout.splitlines() if " 512 " in line)
    assert "idle" in row and str(told["kv_tokens"]) in row
    assert len(re.findall(r"^w[01]\s+up\b", done.stdout, re.M)) == 2 and "1 of 1 sessions, store up" in done.stdout


def test_a_session_is_shown_by_its_key(watched: Watched) -> None:
    stack = watched()
    stack.say([user("Hello")])
    (session,) = stack.http.get("/admin/fleet", headers=OPERATOR).json()["sessions"]
    done = run(stack.url, "--session", session["key"])
    assert done.exit_code == 0 and f"session {session['key']} on w0" in done.stdout
    missing = run(stack.url, "--session", "0" * 16)
    assert missing.exit_code == 1 and "404" in missing.stderr


def test_a_wrong_key_and_a_missing_gateway_are_said(watched: Watched) -> None:
    stack = watched()
    wrong = run(stack.url, key="wrong")
    assert wrong.exit_code == 1 and "AGENTKV_ADMIN_KEY" in wrong.stderr and "401" in wrong.stderr
    done = run("http://127.0.0.1:9")
    assert done.exit_code == 1 and "does not answer" in done.stderr


@contextmanager
def terminal(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    master, slave = pty.openpty()
    environment = {**os.environ, "AGENTKV_ADMIN_KEY": KEY, "COLUMNS": "160", "LINES": "50", "TERM": "xterm"}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        process.terminate()
        process.wait(10)
        os.close(master)


def wait_for(master: int, word: str) -> None:
    seen, end = "", time.monotonic() + 30
    while word not in seen:
        assert time.monotonic() < end, seen[-2000:]
        if select.select([master], [], [], 0.2)[0]:
            seen += os.read(master, 65536).decode(errors="replace")


def exit_code(process: subprocess.Popen[bytes], master: int) -> int:
    """The code that a stopped process ends with. What it prints meanwhile is read: else it would wait for a reader."""
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            with suppress(OSError):  # the other end is closed
                os.read(master, 65536)
    return process.wait(1)


def test_a_terminal_is_refreshed_live(watched: Watched) -> None:
    stack = watched()
    with terminal([*TOP, "--url", stack.url, "--every", "0.1"]) as (process, master):
        wait_for(master, "0 of 0 sessions")
        stack.say([user("Hello")])
        wait_for(master, "1 of 1 sessions")
        os.kill(process.pid, 2)
        assert exit_code(process, master) == 0


@pytest.mark.parametrize(
    "phases", [{"think": 1.0, "act": 2.0, "tool": 3.0, "others": 4.0}, {"others": 10.0}, {"think": 9.99, "act": 0.01}]
)
def test_a_bar_is_as_long_as_its_parts(phases: dict[str, float]) -> None:
    assert len(bar(phases, round(sum(phases.values())))) == BAR


def test_a_sessions_turns_show_state_numbers_and_phases() -> None:
    turn = {"epoch": 4, "state": "rebuilt", "reason": "evicted", "logical": 5000, "held": 512, "evicted": 4488}
    turn |= {"prefill": 77, "budget": 0, "compactions": 3, "phases": {"tool": 512.0}}
    engine = {"held": 512, "evicted": 4488, "state": "idle", "turns": [turn]}
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(session_frame({"key": "k" * 16, "worker": "w", "tokens": 5000, "engine": engine}))
    shown = console.export_text()
    for word in ("5", "rebuilt: evicted", "5,000", "512", "4,488", "77", "full", "▒" * BAR):
        assert word in shown
