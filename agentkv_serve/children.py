"""Child processes that never outlive us: own session, log file, parent-death signal, whole group stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHOSEN_PORTS = range(20_000, 30_000)
"""Below the ports that systems give to outgoing connections: an engine takes minutes to bind the port chosen for it."""
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ChildDied(Exception):
    """A child process ended by itself; the message holds its last lines."""


class Child:
    """One running child process.

    It leads a session of its own, so that Ctrl-C in the terminal reaches only us and we stop the children in
    order. The kernel sends it SIGTERM when we die in whatever way.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # the parent died before prctl
                os._exit(1)

        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.pid = self._process.pid

    def ended(self) -> bool:
        """Tells whether the process has exited; leaves it unreaped, so that its group id stays ours."""
        if self._process.returncode is not None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def check(self) -> None:
        """Raises:
        ChildDied: the process has exited.
        """
        if self.ended():
            code = self.stop()
            raise ChildDied(f"{self.name} stopped by itself (exit {code}). {self.log} ends:\n{self.tail()}")

    def stop(self, grace: float = 40.0) -> int:
        """Ends the process: SIGTERM, then after `grace` seconds SIGKILL for its whole group. Returns its code."""
        if self._process.returncode is not None:
            return self._process.returncode
        if not self.ended():
            os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while not self.ended() and time.monotonic() < deadline:
                time.sleep(0.05)
        os.killpg(self.pid, signal.SIGKILL)  # also whatever it left behind
        return self._process.wait()

    def text(self) -> str:
        """Returns what the process has written so far."""
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 25) -> str:
        """Returns the last lines that the process wrote."""
        return "\n".join(self.text().splitlines()[-lines:])


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds stop signals back until the block is done: a second Ctrl-C must not leave children behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def free_port(preferred: int = 0) -> int:
    """Returns `preferred` when it can be bound on loopback, else a free port of `CHOSEN_PORTS`."""
    drawn = random.SystemRandom().sample(CHOSEN_PORTS, 100)
    for port in (preferred, *drawn) if preferred else drawn:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port on loopback")


def port_is_free(port: int) -> bool:
    """Tells whether a given port can be bound on loopback."""
    return free_port(port) == port
