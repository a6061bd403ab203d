"""Drains the engine of this container: takes leave of the gateways, then waits until no turn runs any more.

For a pod's preStop hook, or by hand before an engine is stopped. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

BUSY = re.compile(r"sglang[:_]num_(?:running|queue)_reqs\b")


def busy(url: str) -> float:
    """Turns that run or wait, by the engine's own metrics. Raises OSError when it does not answer."""
    with urllib.request.urlopen(url, timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if BUSY.match(line))


def main() -> int:
    """0 once the engine is idle, 1 when it is still busy at the end of the wait."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--metrics", default="http://127.0.0.1:30000/metrics")
    # A bare name is in the temporary folder, as for the announcer that writes the file.
    file = Path(tempfile.gettempdir()) / os.environ.get("AGENTKV_ANNOUNCER", "agentkv.pid")
    parser.add_argument("--pid-file", type=Path, default=file)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds")
    given = parser.parse_args()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
        os.kill(int(given.pid_file.read_text()), signal.SIGTERM)  # it takes leave of the gateways and ends
    end = time.monotonic() + given.limit
    idle = 0
    while time.monotonic() < end:
        try:
            # Twice in a row: a turn that a gateway had just sent may not have been counted the first time.
            idle = idle + 1 if busy(given.metrics) == 0 else 0
        except OSError:
            return 0
        if idle == 2:
            return 0
        time.sleep(1)
    print(f"turns still run after {given.limit:.0f} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
