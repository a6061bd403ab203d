"""How a worker tells gateways that it is there: a small signed message, sent again and again.

`agentkv engine --agentkv-register URL` starts this module beside the server. It needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import hmac
import http.client
import json
import os
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

PATH = "/internal/workers/register"
SIGNATURE = "x-agentkv-signature"
EVERY = 10.0
"""Seconds between two messages of a worker."""
FORGET_AFTER = 6 * EVERY
"""Seconds without a message after which a worker that is not healthy either is forgotten."""
CLOCK_SKEW = 60.0
"""Seconds by which the clocks of a worker and a gateway may differ."""
TOKEN_VARIABLE = "AGENTKV_JOIN_TOKEN"
PID_VARIABLE = "AGENTKV_ANNOUNCER"
"""Names the file with the announcing process's id, for who drains the worker; a bare name: in the temporary folder."""
_PR_SET_PDEATHSIG = 1


def sign(token: str, body: bytes) -> str:
    """The signature of a message: HMAC-SHA256 in hex."""
    return hmac.new(token.encode(), b"agentkv join\n" + body, hashlib.sha256).hexdigest()


def verify(token: str, body: bytes, signature: str) -> bool:
    """Whether the holder of `token` signed `body`."""
    return hmac.compare_digest(sign(token, body).encode(), signature.encode("utf-8", "replace"))


def message(url: str, *, leaving: bool = False) -> bytes:
    """A worker's message: where it is reached, and the time, so that an old message is worth nothing."""
    return json.dumps({"url": url, "time": time.time(), "leaving": leaving}).encode()


class Announcer:
    """Tells gateways of one worker for as long as its process lives and is healthy."""

    def __init__(self, gateways: Sequence[str], token: str, url: str, health: str) -> None:
        self._gateways = gateways
        self._token = token
        self._url = url
        self._health = health
        self._known: dict[str, str] = {}  # gateway -> what was said about it last
        self._stopping = False

    def stop(self, *_: object) -> None:
        """The worker ends: say so and return from `run`."""
        self._stopping = True

    def run(self) -> None:
        """Announce until `stop`; then take leave."""
        while not self._stopping:
            # A model takes minutes to load: until then nobody should hear of this worker.
            if self._healthy():
                self._tell(leaving=False)
                self._rest(EVERY)
            else:
                self._rest(1.0)
        if self._known:
            self._tell(leaving=True)

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < end:
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self._health, timeout=30) as reply:
                return bool(reply.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def _tell(self, *, leaving: bool) -> None:
        body = message(self._url, leaving=leaving)
        headers = {"content-type": "application/json", SIGNATURE: sign(self._token, body)}
        for gateway in self._gateways:
            request = urllib.request.Request(gateway.rstrip("/") + PATH, body, headers, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=10):
                    said = "left" if leaving else "registered"
            except urllib.error.HTTPError as error:
                said = f"refused ({error.code}): {error.read(500).decode(errors='replace')}"
            except (OSError, http.client.HTTPException) as error:  # the latter for what is no HTTP
                said = f"not reached: {error}"
            if self._known.get(gateway) != said:  # a line at each change, not at each message
                print(f"AgentKV: {self._url} at {gateway}: {said}", file=sys.stderr, flush=True)
            self._known[gateway] = said


def default_url(port: int) -> str:
    """Where other machines of the same private network reach a worker of this one."""
    return f"http://{socket.gethostname()}:{port}"


def read_token() -> str:
    """The join token: `AGENTKV_JOIN_TOKEN`, or the file that `AGENTKV_JOIN_TOKEN_FILE` names; "" without both."""
    file = os.environ.get(f"{TOKEN_VARIABLE}_FILE")
    return Path(file).read_text().strip() if file else os.environ.get(TOKEN_VARIABLE, "")


def main() -> None:
    """The process beside a worker. It ends when the worker, its parent, ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", action="append", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--health", required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    announcer = Announcer(given.gateway, read_token(), given.url, given.health)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, announcer.stop)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if file := os.environ.get(PID_VARIABLE):
        (Path(tempfile.gettempdir()) / file).write_text(str(os.getpid()))
    if os.getppid() == given.parent:
        announcer.run()


if __name__ == "__main__":
    main()
