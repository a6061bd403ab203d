"""Compile every kernel for a GPU that need not be there; run by test_compile.py in a process of its own.

Usage: compile_kernels.py <compute capability, e.g. 90> <how many kinds of pools>. The launches are made with
real arguments and the real configurations, but stop at the compiler, which includes the assembler. Prints one
JSON object per kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from agentkv_serve.check.attention import decode_attention
from agentkv_serve.kernels import (
    capture,
    compact,
    expected,
    phase_step,
    redundancy,
    score,
    select,
    trigonometric,
    value_norm,
    window_indices,
)


class NoDevice:
    """Stands where Triton asks for the machine's GPU."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(dtype: torch.dtype, hkv: int, group: int, dim: int) -> None:
    """One call of everything that reads a pool of this kind."""
    pool = [torch.zeros(300, hkv, dim, dtype=dtype) for _ in range(2)]
    slots, hq = torch.arange(256), hkv * group
    queries, valid = torch.zeros(2, 32, hq, dim, dtype=dtype), torch.ones(32, dtype=torch.bool)
    for group_max in (True, False):
        score.attention_mass_layers(queries, valid, pool, slots, scale=0.1, group_max=group_max, backend="triton")
    value_norm.value_norms(pool, slots, backend="triton")
    for shifted in (True, False):
        kept = torch.arange(64).expand(2, hkv, 64)
        compact.gather_write(pool, pool, slots, kept, slots[-64:], shifted=shifted, backend="triton")
    token = torch.ones(4, dtype=torch.int64)
    capture.write(
        torch.zeros(3, 2, 4, 8, hq, dim, dtype=dtype), 1, queries[0, :4], token, token, token, backend="triton"
    )
    redundancy.redundancy(pool, slots, backend="triton")
    mean = torch.zeros(2, hq, dim // 2, dtype=torch.complex64)
    trigonometric.trigonometric(mean, mean.abs(), pool, slots, torch.ones(dim // 2), 300, backend="triton")
    expected.expected_attention(
        torch.zeros(2, hq, dim), torch.zeros(2, hq, dim, dim), pool, slots, backend="triton"
    )  # fmt: skip


POOLS = (
    (torch.bfloat16, 8, 4, 128),
    (torch.bfloat16, 1, 8, 128),
    (torch.float16, 2, 7, 80),
    (torch.bfloat16, 3, 3, 64),
    (torch.bfloat16, 2, 1, 256),
)


def attention() -> None:
    """The decode attention of the stand-alone check."""
    for hq, hkv, dim in ((32, 8, 128), (4, 2, 32), (4, 4, 256)):
        queries, pool = torch.zeros(2, hq, dim).bfloat16(), torch.zeros(300, hkv, dim).bfloat16()
        indptr, indices = torch.tensor([0, 100, 256]), torch.arange(256, dtype=torch.int32)
        decode_attention(queries, pool, pool, indptr, indices, splits=4, backend="triton")


def main(capability: int, kinds: int) -> None:
    driver.set_active(NoDevice(capability))
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        ptx = compiled.asm["ptx"]
        wide = any(load in ptx for load in ("ld.global.v4.b32", "ld.global.v2.b64", "cp.async.cg.shared.global"))
        print(json.dumps({"kernel": self.__name__, "shared": compiled.metadata.shared, "wide": wide}))
        return compiled

    JITFunction.run = compile_only
    for dtype, hkv, group, dim in POOLS[:kinds]:
        launches(dtype, hkv, group, dim)
    attention()
    select.top_keep(torch.zeros(2, 3, 4096), 512, torch.zeros(4096, dtype=torch.bool), backend="triton")
    rows = torch.zeros(4, dtype=torch.int64)
    table = torch.zeros(9, 64, dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        out = torch.zeros(99, dtype=dtype)
        window_indices.window_indices(table, rows, torch.zeros(9, dtype=torch.int64), rows, out=out, backend="triton")
    phase_step.step(torch.zeros(9, 99).short(), torch.zeros(9, 99).to(torch.int8), rows, rows, backend="triton")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
