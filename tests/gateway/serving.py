"""Runs ASGI apps on real ports inside the test process."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import TracebackType
from typing import Any

import uvicorn


class QuickServer(uvicorn.Server):
    """Looks for the end more often than uvicorn, and does not wait for idle connections."""

    async def main_loop(self) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.005)
        self.force_exit = True


class Serving:
    """An app on a free loopback port, in a thread with a loop of its own. Use as a context manager."""

    def __init__(self, app: Any, *, port: int = 0) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=2, ws="none")
        self._server = QuickServer(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: BaseException | None = None

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as error:  # shown by the test that waits for the server
            self.failure = error

    def __enter__(self) -> Serving:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start") from self.failure
            self._thread.join(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop serving and wait for the thread."""
        self._server.should_exit = True
        self._thread.join(15)
        self._socket.close()
