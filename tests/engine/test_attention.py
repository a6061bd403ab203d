"""The attention backends read each row's window and nothing else (the cases are in attention_cases.py).

SGLang is imported in a process of its own: it warns on import, and its Triton kernels have to be imported with the
interpreter on where there is no GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.parametrize(
    ("cases_of", "least"),
    [("decode and not graph", 4), pytest.param("test", 30, marks=pytest.mark.long)],
    ids=["decode", "all"],
)
def test_windows_of_every_backend(cases_of: str, least: int) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    cases = Path(__file__).with_name("attention_cases.py")
    run = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "-k",
            cases_of,
            str(cases),
        ],
        capture_output=True,
        text=True,
        env=env,
        cwd=cases.parents[2],
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None and int(passed.group(1)) >= least
