"""The kernels compile for the GPUs they are written for, with no GPU at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Compute capability -> shared memory that one block may use, in bytes (CUDA programming guide, table of
# technical data).
SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}
SCRIPT = str(Path(__file__).with_name("compile_kernels.py"))
KERNELS = {
    "_lse_kernel", "_mass_kernel", "_pool_kernel", "_norm_kernel", "_select_kernel", "_shift_kernel",
    "_copy_kernel", "_write_kernel", "_step_kernel", "_fill_kernel", "_last_kernel", "_sum_kernel", "_mean_kernel",
    "_best_kernel", "_logits_kernel",
    "_attention_kernel",
}  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "kinds"),
    [(90, 1), *(pytest.param(capability, 5, marks=pytest.mark.long) for capability in SHARED)],
)
def test_kernels_compile(capability, kinds, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, SCRIPT, str(capability), str(kinds)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert {one["kernel"] for one in compiled} == KERNELS
    for one in compiled:
        assert one["shared"] <= SHARED[capability], one
    # Rows of the pools are read 16 bytes at a time, also through the table of the layers' addresses.
    wide = {one["kernel"] for one in compiled if one["wide"]}
    assert {"_lse_kernel", "_mass_kernel", "_shift_kernel", "_write_kernel"} <= wide
