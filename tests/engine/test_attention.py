"""The attention backends read each row's window and nothing else (the cases are in the folder attention).

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
    cases = sorted(Path(__file__).with_name("attention").glob("*_cases.py"))
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
            *map(str, cases),
        ],
        capture_output=True,
        text=True,
        env=env,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None and int(passed.group(1)) >= least
