"""Child processes: their end is noticed, nothing of them is left behind, and they never outlive us."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentkv_serve.children import Child, ChildDied, free_port, port_is_free

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(helper.pid, flush=True)
time.sleep(600)
"""


def python(program: str, log: Path) -> Child:
    return Child("child", [sys.executable, "-c", program], log, os.environ)


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """A zombie counts as gone: its reaper may be a process that we do not control."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_dead_child_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    child = python("print('loading'); raise SystemExit('out of memory')", tmp_path / "log")
    wait_for(child.ended)
    with pytest.raises(ChildDied, match=r"(?s)exit 1.*loading"):
        child.check()
    assert "out of memory" in child.tail() and child.stop() == 1


def test_stop_asks_first(tmp_path: Path) -> None:
    program = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint('up', flush=True)"
    child = python(program + "\ntime.sleep(600)", tmp_path / "log")
    wait_for(lambda: "up" in child.text())
    assert child.stop() == 7


def test_stop_kills_the_whole_group(tmp_path: Path) -> None:
    child = python(STUBBORN, tmp_path / "log")
    wait_for(lambda: bool(child.text().strip()))
    helper = int(child.text())
    assert alive(helper)
    assert child.stop(grace=0.2) == -signal.SIGKILL
    wait_for(lambda: not alive(helper))


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = f"""
import os, pathlib, sys, time
from agentkv_serve.children import Child
child = Child("c", [sys.executable, "-c", "import time; time.sleep(600)"], pathlib.Path({str(log)!r}), os.environ)
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        wait_for(lambda: not alive(child))


def test_ctrl_c_of_the_terminal_does_not_reach_children(tmp_path: Path) -> None:
    child = python("import time; time.sleep(600)", tmp_path / "log")
    assert os.getpgid(child.pid) != os.getpgid(0) and os.getsid(child.pid) == child.pid
    child.stop()


def test_free_port_prefers_the_given_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(port)
        assert free_port(port) not in (0, port)
    assert free_port(port) == port


def test_a_chosen_port_stays_free_until_it_is_bound() -> None:
    """Outgoing connections get ports of the system's own range: one of them could take it in the meantime."""
    first_of_the_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) > 1 and max(ports) < first_of_the_system
