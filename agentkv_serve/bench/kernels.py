"""`agentkv bench kernels`: every kernel on the shapes of real models: time, bytes, share of the device's copy
bandwidth.

The floor of a kernel is the bytes that it must move over the bandwidth; beside it stands the time that its
multiplications take at the device's matrix rate, since `score` comes close to it where many heads share a KV head.
Without a GPU there is nothing to time: the kernels are checked against their references in Triton's interpreter, and
the floors are printed for a few GPUs by data sheet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from agentkv_serve.kernels.backend import Backend

CONTEXTS = (4_096, 32_768, 131_072)
BUDGETS = (1_024, 4_096, 8_192)
QUERIES = 32
ROWS = 64  # requests in a decode step


@dataclass(frozen=True)
class Rates:
    """What a device can do: bytes per second, and dense bfloat16 operations per second."""

    bandwidth: float
    matrix: float


# From the makers' data sheets.
DATA_SHEET = {
    "H200": Rates(4.8e12, 989e12),
    "H100 SXM": Rates(3.35e12, 989e12),
    "A100 80GB": Rates(2.04e12, 312e12),
    "RTX A6000": Rates(0.768e12, 155e12),
}


@dataclass(frozen=True)
class Model:
    """What one rank holds of a model."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    dim: int = 128
    size: int = 2  # bytes per element

    @property
    def row(self) -> int:
        """Bytes of one token's keys in one layer and KV head."""
        return self.dim * self.size


MODELS = (
    Model("Qwen3-8B", 36, 32, 8),
    Model("Qwen3-32B", 64, 64, 8),
    Model("Llama-70B TP4", 80, 16, 2),
    Model("Llama-70B TP8", 80, 8, 1),
)


@dataclass
class Line:
    """One kernel on one shape. Times in milliseconds, None where nothing was timed."""

    kernel: str
    model: str
    context: int
    budget: int | None
    bytes: int
    operations: int
    floor_ms: dict[str, float]
    matrix_ms: dict[str, float]
    time_ms: float | None = None
    gb_per_s: float | None = None
    share: float | None = None
    torch_ms: float | None = None


def kernels(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: Annotated[str, typer.Option(help="Only the model of this name.")] = "",
    context: Annotated[int, typer.Option(help="Only this context, in tokens.")] = 0,
    reference: Annotated[bool, typer.Option(help="Time the torch references too (GPU only).")] = True,
) -> None:
    """The kernels against bandwidth (GPU), or against their references (CPU)."""
    models = [m for m in MODELS if model in ("", m.name)]
    if not models:
        raise typer.BadParameter(f"unknown model {model!r}: one of {', '.join(m.name for m in MODELS)}")
    contexts = (context,) if context else CONTEXTS
    from agentkv_serve.check.gpu import NO_GPU, prepare

    device = prepare()
    from agentkv_serve.bench.report import machine

    on_gpu = device.type == "cuda"
    result: dict[str, Any] = {"machine": machine(), "mode": "measured on the GPU" if on_gpu else NO_GPU}
    devices = DATA_SHEET
    if on_gpu:
        rates = Rates(copy_bandwidth(device), matrix_rate(device))
        devices = {"this GPU": rates}
        result["copy_bandwidth_gb_per_s"] = round(rates.bandwidth / 1e9, 1)
        result["matrix_tflops"] = round(rates.matrix / 1e12, 1)
    result["correctness"] = correctness(device)
    lines = [line for m in models for n in contexts for line in expected_lines(m, n, devices)]
    if on_gpu:
        for m in models:
            for n in contexts:
                measure([line for line in lines if (line.model, line.context) == (m.name, n)], m, n, device, reference)
    result["kernels"] = [asdict(line) for line in lines]
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result, lines)
    if not all(check["ok"] for check in result["correctness"]):
        raise typer.Exit(1)


def correctness(device: torch.device) -> list[dict[str, Any]]:
    """Every kernel against its reference, on shapes that suit the device."""
    from agentkv_serve.check import kernels as checks

    on_gpu = device.type == "cuda"
    rows = [
        *checks.check_decode_ops(device, large=on_gpu),
        *checks.check_pools(checks.LARGE if on_gpu else checks.SMALL, device),
    ]
    return [asdict(row) for row in rows]


def expected_lines(model: Model, context: int, devices: dict[str, Rates]) -> Iterator[Line]:
    """One line per kernel, with the bytes that it must move, its multiplications and its floors."""
    heads = model.layers * model.kv_heads
    # Two passes of one multiplication and one addition per query head, key and dimension.
    products = 2 * 2 * model.layers * model.q_heads * QUERIES * context * model.dim

    def line(kernel: str, moved: int, budget: int | None = None) -> Line:
        operations = products if kernel in ("score", "compression") else 0
        floors = {name: moved / rates.bandwidth * 1e3 for name, rates in devices.items()}
        matrix = {name: operations / rates.matrix * 1e3 for name, rates in devices.items()}
        return Line(kernel, model.name, context, budget, moved, operations, floors, matrix)

    # Keys twice (two passes), the mass written, read and written again by the max-pool.
    score = heads * context * (2 * model.row + 3 * 4)
    yield line("score", score)
    for budget in BUDGETS:
        if budget < context:
            select = heads * (context * 4 + budget * 8)
            compact = heads * budget * (2 * 2 * model.row + 8)
            yield line("select", select, budget)
            yield line("compact", compact, budget)
            yield line("compression", score + select + compact, budget)
    yield line("capture", ROWS * model.q_heads * model.row * 2)
    yield line("phase_step", ROWS * (8 + 8 + 2 + 1 + 8 + 1))
    yield line("window_indices", ROWS * min(context, 4_096) * (4 + 4))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large device-to-device copy."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (_time(lambda: target.copy_(source), device) / 1e3)


def matrix_rate(device: torch.device) -> float:
    """Bfloat16 operations per second of a large matrix product."""
    import torch

    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / (_time(lambda: a @ b, device) / 1e3)


def measure(lines: list[Line], model: Model, context: int, device: torch.device, reference: bool) -> None:
    """Fill in the times of one model and context; leaves them None where the pool does not fit the memory."""
    import torch

    needed = 2 * model.layers * model.kv_heads * context * model.row
    torch.cuda.empty_cache()
    if needed * 1.2 + (4 << 30) > torch.cuda.mem_get_info()[0]:
        return
    work = Work(model, context, device)
    for line in lines:
        run = partial(work.run, line.kernel, line.budget)
        line.time_ms = round(_time(partial(run, "triton"), device), 4)
        line.gb_per_s = round(line.bytes / line.time_ms / 1e6, 1)
        line.share = round(line.floor_ms["this GPU"] / line.time_ms, 3)
        if reference:
            line.torch_ms = round(_time(partial(run, "torch"), device, repeats=3), 4)


class Work:
    """The tensors of one model and context, and one call of each kernel on them."""

    def __init__(self, model: Model, context: int, device: torch.device) -> None:
        import torch

        self.model, self.context, self.device = model, context, device
        shape = (context + 1, model.kv_heads, model.dim)
        self.k = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(model.layers)]
        self.v = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(model.layers)]
        self.slots = torch.randperm(context, device=device) + 1
        self.queries = torch.randn(model.layers, QUERIES, model.q_heads, model.dim, device=device, dtype=torch.bfloat16)
        self.valid = torch.ones(QUERIES, dtype=torch.bool, device=device)
        self.scores = torch.rand(model.layers, model.kv_heads, context, device=device)
        self.protected = torch.zeros(context, dtype=torch.bool, device=device)
        self.protected[:32] = self.protected[-32:] = True
        order = torch.rand(model.layers, model.kv_heads, context, device=device).argsort(-1)
        self.kept = {b: order[..., :b].sort(-1).values for b in BUDGETS if b < context}
        self.ring = torch.zeros(ROWS + 1, 1, 4, 8, model.q_heads, model.dim, device=device, dtype=torch.bfloat16)
        self.new = torch.randn(ROWS, model.q_heads, model.dim, device=device, dtype=torch.bfloat16)
        self.rows = torch.arange(1, ROWS + 1, device=device)
        self.zeros = torch.zeros(ROWS, dtype=torch.int64, device=device)
        self.table = torch.zeros(5, 151_936, dtype=torch.int16, device=device)
        self.label = torch.zeros(5, 151_936, dtype=torch.int8, device=device)
        length = min(context, 4_096)
        self.pages = torch.zeros(ROWS + 1, length, dtype=torch.int32, device=device)
        self.lens = torch.full((ROWS,), length, device=device)
        self.start = torch.zeros(ROWS + 1, dtype=torch.int64, device=device)
        self.indices = torch.zeros(ROWS * length, dtype=torch.int32, device=device)

    def run(self, kernel: str, budget: int | None, backend: Backend) -> None:
        """One call of the named kernel."""
        from agentkv_serve.kernels import capture, compact, phase_step, score, select, window_indices

        if kernel in ("score", "compression"):
            scale = self.model.dim**-0.5
            score.attention_mass_layers(self.queries, self.valid, self.k, self.slots, scale=scale, backend=backend)
        if kernel in ("select", "compression"):
            assert budget is not None
            select.top_keep(self.scores, budget, self.protected, validate=False, backend=backend)
        if kernel in ("compact", "compression"):
            assert budget is not None
            target = self.slots[-budget:]
            compact.gather_write(self.k, self.v, self.slots, self.kept[budget], target, shifted=True, backend=backend)
        if kernel == "capture":
            capture.write(self.ring, 0, self.new, self.rows, self.zeros, self.zeros, backend=backend)
        if kernel == "phase_step":
            phase_step.step(self.table, self.label, self.zeros, self.zeros, backend=backend)
        if kernel == "window_indices":
            window_indices.window_indices(
                self.pages, self.rows, self.start, self.lens, out=self.indices, backend=backend
            )


def _time(work: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median device time of one call in milliseconds, after two calls to warm up."""
    import torch

    times = []
    for turn in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
        if turn >= 2:
            times.append(float(begin.elapsed_time(end)))
    return sorted(times)[len(times) // 2]


def print_table(result: dict[str, Any], lines: list[Line]) -> None:
    """For people: the same content as plain text."""
    print(f"{result['machine']['gpu'] or result['machine']['cpu']}: {result['mode']}")
    failed = [check for check in result["correctness"] if not check["ok"]]
    print(f"{len(result['correctness'])} comparisons with the references, {len(failed)} failed")
    for check in failed:
        print(f"  FAILED {check['check']}, {check['shape']}: {check['result']} (limit {check['limit']})")
    names = list(lines[0].floor_ms)
    head = ["kernel", "model", "context", "budget", "MB", *(f"floor ms (matrix), {name}" for name in names)]
    if lines[0].time_ms is not None:
        print(
            f"measured: copy {result['copy_bandwidth_gb_per_s']} GB/s, matrix product {result['matrix_tflops']} TFLOP/s"
        )
        head += ["ms", "GB/s", "share", "torch ms"]
    cells = [head]
    for line in lines:
        cell = [line.kernel, line.model, str(line.context), str(line.budget or ""), f"{line.bytes / 1e6:.2f}"]
        cell += [_floor(line.floor_ms[name], line.matrix_ms[name]) for name in names]
        if len(head) > len(cell):
            measured = (line.time_ms, line.gb_per_s, line.share, line.torch_ms)
            cell += ["-" if value is None else f"{value:g}" for value in measured]
        cells.append(cell)
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _floor(memory: float, matrix: float) -> str:
    return f"{memory:.3g} ({matrix:.3g})" if matrix else f"{memory:.3g}"
