"""`agentkv check gpu --standalone`: the kernels and a decode loop on this machine, against references.

Needs only torch and triton. Without a GPU the correctness part runs in Triton's interpreter on reduced
shapes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from agentkv_serve.check.report import Report, Row

GOAL_COMPRESSION_MS = 10.0
NO_GPU = "no GPU: correctness only, in Triton's interpreter, on reduced shapes; no time was measured"


def prepare() -> torch.device:
    """The device to check. Without a GPU, switches this process to Triton's interpreter; call it before
    triton is imported."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton decorates a kernel
    return torch.device("cpu")


def run() -> Report:
    """Run all checks and return the report; see `prepare` for what it does to the process."""
    device = prepare()
    on_gpu = device.type == "cuda"
    import triton

    from agentkv_serve.check import kernels
    from agentkv_serve.check.report import Report

    report = Report(
        device=torch.cuda.get_device_name() if on_gpu else "CPU",
        mode="measured on the GPU" if on_gpu else NO_GPU,
        versions={"torch": torch.__version__, "triton": triton.__version__},
    )
    began = time.perf_counter()
    report.rows += kernels.check_decode_ops(device, large=on_gpu)
    report.rows += kernels.check_pools(kernels.LARGE if on_gpu else kernels.SMALL, device)
    report.rows.append(check_loop(device))
    if on_gpu:
        for context in (16_384, 32_768):
            measure_decode(report, context)
    report.figures["seconds"] = round(time.perf_counter() - began, 1)
    return report


def check_loop(device: torch.device) -> Row:
    """The loop with kernels (on a GPU: as a CUDA graph) against the loop on torch references, token by
    token."""
    from agentkv_serve.check.loop import TINY, DecodeLoop
    from agentkv_serve.check.report import Row

    on_gpu = device.type == "cuda"
    context, budget, interval, steps = (1_000, 256, 32, 300) if on_gpu else (150, 96, 8, 18)
    chosen = []
    for backend in ("triton", "torch"):
        loop = DecodeLoop(
            TINY, batch=3, context=context, steps=steps, budget=budget, interval=interval,
            dtype=torch.float32, device=device, backend=backend,
        )  # fmt: skip
        loop.compress()
        graph = loop.record() if on_gpu and backend == "triton" else None
        chosen.append(loop.run(steps, graph))
    same = int((chosen[0] == chosen[1]).all(1).sum())
    name = "decode loop, CUDA graph" if on_gpu else "decode loop, no graph"
    shape = f"{context} keys to {budget} every {interval} steps, float32"
    distinct = len(set(chosen[0].flatten().tolist()))
    return Row(name, shape, f"{same} of {steps} steps alike", f"all {steps}", same == steps and distinct > 3)


def measure_decode(report: Report, context: int, budget: int = 4096, interval: int = 128) -> None:
    """Qwen3-8B's shapes: the full cache and ours in the same loop, and one whole compression."""
    from agentkv_serve.check.loop import QWEN3_8B, DecodeLoop
    from agentkv_serve.check.report import Row

    device, dtype, steps = torch.device("cuda"), torch.bfloat16, 3 * interval
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] - (6 << 30)  # weights, one layer of activations, the graph
    batch = min(8, int(0.8 * free) // (QWEN3_8B.kv_bytes(dtype) * (context + steps)))
    shape = f"Qwen3-8B, {context} tokens, batch {batch}"
    if batch < 1:
        report.rows.append(Row("decode", shape, "skipped: not enough free GPU memory"))
        return

    def loop_of(size: int, kept: int | None) -> DecodeLoop:
        return DecodeLoop(
            QWEN3_8B, batch=size, context=context, steps=steps, budget=kept, interval=interval,
            dtype=dtype, device=device, backend="triton",
        )  # fmt: skip

    alone = loop_of(1, budget)
    turns = []
    for _ in range(5):
        alone.start_host = 0  # its row still names the whole context's slots
        turns.append(_milliseconds(alone.compress))
    compression = sorted(turns)[2]
    del alone

    loop = loop_of(batch, None)
    graph = loop.record()
    full = _milliseconds(lambda: loop.run(interval, graph), interval)
    del graph
    loop.budget, loop.splits = budget, max(1, budget // 512)
    loop.compress()
    graph = loop.record()
    loop.run(interval, graph)
    # The second interval begins with a compaction, so that its mean holds that of one.
    ours = _milliseconds(lambda: loop.run(interval, graph), interval)
    key = f"{context // 1024}k"
    report.figures |= {
        f"decode_full_ms_{key}": full,
        f"decode_agentkv_ms_{key}": ours,
        f"compression_ms_{key}": compression,
        f"first_compression_ms_{key}": turns[0],
    }
    report.rows += [
        Row("decode, full cache", shape, f"{full:.2f} ms per step, {1e3 * batch / full:.0f} tokens/s"),
        Row(
            f"decode, budget {budget}",
            shape,
            f"{ours:.2f} ms per step with compaction, {1e3 * batch / ours:.0f} tokens/s, {full / ours:.2f} x",
            "> 1 x",
            ours < full,
        ),
        Row(
            "one compression",
            f"Qwen3-8B, {context} to {budget}",
            f"{compression:.2f} ms",
            f"goal <= {GOAL_COMPRESSION_MS:.0f} ms on an H200",
            compression <= GOAL_COMPRESSION_MS if "H200" in report.device else None,
        ),
    ]


def _milliseconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Device time of one call, divided by `repeats`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats
