"""The hooks fit the pinned SGLang, and a missing or unwrapped one is found.

SGLang is imported in a process of its own: it warns on import, and hooks stay for a process's life.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from agentkv_serve.engine import SGLANG_VERSION, selfcheck
from agentkv_serve.engine.flags import REFUSALS

PROGRAM = """
import json, msgspec
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from agentkv_serve.engine import selfcheck
from agentkv_serve.engine.hooks import HOOKS
before = selfcheck.unwrapped_targets()
load_plugins()
print(json.dumps({
    "targets": [target for target, _, _ in HOOKS],
    "before": before,
    "missing": selfcheck.missing_targets(),
    "unwrapped": selfcheck.unwrapped_targets(),
    "arguments": [field.name for field in msgspec.structs.fields(ServerArgs)],
}), flush=True)
selfcheck.require_hooks()
import sglang.srt.mem_cache.memory_pool as pool
pool.ReqToTokenPool.free = pool.ReqToTokenPool.free.__wrapped__
selfcheck.require_hooks()
print("not reached")
"""


@pytest.fixture(scope="module")
def process() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True)


@pytest.fixture(scope="module")
def found(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, process.stderr[-2000:]
    report: dict[str, Any] = json.loads(lines[0])
    return report


def test_every_hook_is_in_place_after_loading_and_none_before(found: dict[str, Any]) -> None:
    assert found["before"] == found["targets"]
    assert found["missing"] == [] and found["unwrapped"] == []


def test_a_lost_hook_stops_the_process_with_its_name(process: subprocess.CompletedProcess[str]) -> None:
    assert process.returncode == 70
    assert "ReqToTokenPool.free" in process.stderr
    assert "not reached" not in process.stdout


def test_every_refused_flag_is_an_argument_of_the_pinned_sglang(found: dict[str, Any]) -> None:
    assert {refusal.name for refusal in REFUSALS} <= set(found["arguments"])


def test_another_version_of_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.99")
    with pytest.raises(RuntimeError, match=SGLANG_VERSION):
        selfcheck.require_version()
