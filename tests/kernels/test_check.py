"""The checks and the benchmark that a user runs: they pass on this machine, and notice a wrong kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from agentkv_serve.check.cli import app
from agentkv_serve.check.report import Report, Row

ROOT = Path(__file__).resolve().parents[2]
# Everything of ours and of our dependencies that a machine with only torch and triton lacks.
BARE = """
import runpy, sys
for name in ("typer", "rich", "pydantic", "transformers", "tokenizers", "sglang", "fastapi", "httpx"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


def test_standalone_needs_only_torch_and_triton():
    result = run(sys.executable, "-c", BARE, str(ROOT / "agentkv_serve/check/standalone.py"), "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["ok"]
    on_gpu = torch.cuda.is_available()
    assert report["mode"].startswith("measured" if on_gpu else "no GPU: correctness only")
    names = {row["check"] for row in report["rows"]}
    assert {"capture", "phase step", "window indices", "score", "select", "compact"} <= names
    assert any(name.startswith("decode loop") for name in names)
    assert report["figures"]["seconds"] < 480


def test_tree_is_small_enough_to_carry():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    assert sum(file.stat().st_size for file in files if file.exists()) < 64 << 20


def test_check_gpu_wants_to_know_what():
    result = CliRunner().invoke(app, ["gpu"])
    assert result.exit_code == 2
    assert "--standalone" in result.output


def test_a_wrong_kernel_fails_the_check(device, monkeypatch):
    from agentkv_serve.check import kernels as checks  # here, not above: it imports the kernels
    from agentkv_serve.kernels.capture import kernel

    assert all(row.ok for row in checks.check_decode_ops(device, large=False))
    monkeypatch.setattr(kernel, "write", lambda *arguments: None)
    rows = list(checks.check_decode_ops(device, large=False))
    assert [row.check for row in rows if not row.ok] == ["capture"]


def test_report_counts_failures():
    report = Report("GPU", "measured", {"torch": "2"}, [Row("a", "s", "1", "2", True), Row("b", "s", "3")])
    assert report.ok
    assert "all 2 checks passed" in report.as_table()
    report.rows.append(Row("c", "s", "4", "2", False))
    assert not report.ok
    assert "1 of 3 checks FAILED" in report.as_table()
    assert json.loads(json.dumps(report.as_dict()))["ok"] is False


# `agentkv check gpu` covers it there: the same kernels, against the same references.
@pytest.mark.skipif(torch.cuda.is_available(), reason="times the kernels for minutes where there is a GPU")
def test_bench_kernels_without_a_gpu_checks_and_predicts():
    call = "import typer; from agentkv_serve.bench.kernels import kernels; typer.run(kernels)"
    result = run(sys.executable, "-c", call, "--json", "--model", "Qwen3-8B")
    assert result.returncode == 0, result.stdout + result.stderr
    outcome = json.loads(result.stdout)
    assert outcome["mode"].startswith("no GPU: correctness only")
    assert all(check["ok"] for check in outcome["correctness"])
    lines = {(line["kernel"], line["context"], line["budget"]): line for line in outcome["kernels"]}
    compact = lines["compact", 32_768, 4_096]
    # 36 layers x 8 heads x 4096 rows of 256 bytes, K and V, read and written, and the list of the kept.
    assert compact["bytes"] == 36 * 8 * 4_096 * (256 * 2 * 2 + 8)
    assert compact["floor_ms"]["H200"] == pytest.approx(compact["bytes"] / 4.8e12 * 1e3, rel=1e-3)
    assert compact["time_ms"] is None
    whole = lines["compression", 32_768, 4_096]
    parts = [lines["score", 32_768, None], lines["select", 32_768, 4_096], compact]
    assert whole["bytes"] == sum(part["bytes"] for part in parts)
