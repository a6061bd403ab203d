"""`agentkv check gpu --server` on this machine: the same list that a user runs on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_the_list_passes_and_says_where_it_ran(tiny: Callable[..., Path]) -> None:
    command = [sys.executable, "-P", "-m", "agentkv_serve", "check", "gpu", "--server", "--json"]
    run = subprocess.run([*command, "--model-path", str(tiny("llama-gqa"))], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    report = json.loads(run.stdout)
    assert ("UNVERIFIED" in report["mode"]) == torch.cuda.is_available()
    names = [row["check"] for row in report["rows"]]
    for name in ("identity", "keep-sets", "captured", "abort before", "abort after", "busy", "edited", "close", "pool"):
        assert any(name in found for found in names), names
    assert all(row["ok"] for row in report["rows"])
