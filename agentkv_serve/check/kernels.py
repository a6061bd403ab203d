"""Every kernel against its torch reference on this machine's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from agentkv_serve.check import attention
from agentkv_serve.check.report import Row
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
from agentkv_serve.kernels.backend import Backend


@dataclass(frozen=True)
class Pool:
    """A kind of paged pool and the window to run over."""

    name: str
    layers: int
    kv_heads: int
    group: int
    dim: int
    count: int
    page: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        heads = f"{self.layers}x{self.kv_heads}x{self.dim}, G{self.group}"
        return f"{self.name}: {heads}, {self.count} keys, p{self.page}, {kind}"


SMALL = (
    Pool("odd head", 1, 2, 3, 80, 65, 1, torch.float16),
    Pool("SmolLM2", 2, 3, 3, 64, 130, 16, torch.bfloat16),
    Pool("float32", 1, 1, 8, 128, 63, 64, torch.float32),
)
LARGE = (
    *SMALL,
    Pool("Qwen3-8B", 4, 8, 4, 128, 32_768, 16, torch.bfloat16),
    Pool("Llama-70B TP8", 4, 1, 8, 128, 32_768, 64, torch.bfloat16),
    Pool("Qwen3-32B TP4", 2, 2, 8, 128, 4_097, 1, torch.float16),
    Pool("head 256", 1, 4, 1, 256, 500, 1, torch.bfloat16),
)
# Relative root-mean-square error; all sums are float32, and products of 16-bit numbers are exact in float32.
LIMIT = 2e-5


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root-mean-square error relative to the wanted values; infinite if there is a NaN."""
    error = (got.double() - wanted.double()).pow(2).mean().sqrt() / wanted.double().pow(2).mean().sqrt().clamp(
        min=1e-12
    )
    return float(error) if bool(torch.isfinite(got).all()) else float("inf")


class Inputs:
    """Random inputs for one pool, the same for both backends; rows outside of the window are NaN."""

    def __init__(self, pool: Pool, device: torch.device, seed: int = 0) -> None:
        self.random = torch.Generator(device=device).manual_seed(seed)
        self.device, self.pool = device, pool
        pages = torch.randperm(pool.count // pool.page + 2, generator=self.random, device=device) + 1
        inside = torch.arange(pool.page, device=device)
        self.slots = (pages[:, None] * pool.page + inside).flatten()[: pool.count]
        size = (pool.count // pool.page + 4) * pool.page
        self.k = [self.buffer(size) for _ in range(pool.layers)]
        self.v = [self.buffer(size) for _ in range(pool.layers)]
        self.queries = self.normal(pool.layers, 32, pool.kv_heads * pool.group, pool.dim).to(pool.dtype)
        self.valid = torch.rand(32, generator=self.random, device=device) < 0.8
        self.valid[0] = True
        self.protected = torch.zeros(pool.count, dtype=torch.bool, device=device)
        self.protected[: pool.count // 8] = self.protected[-(pool.count // 8) :] = True

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random, device=self.device)

    def buffer(self, size: int) -> torch.Tensor:
        pool = self.pool
        buffer = torch.full((size, pool.kv_heads, pool.dim), torch.nan, dtype=pool.dtype, device=self.device)
        buffer[self.slots] = self.normal(pool.count, pool.kv_heads, pool.dim).to(pool.dtype)
        return buffer


def check_pools(pools: tuple[Pool, ...], device: torch.device) -> Iterator[Row]:
    """One row per kernel and pool."""
    for pool in pools:
        inputs = Inputs(pool, device)
        for name, errors in (
            ("score", _score(inputs)),
            ("score, every head", _score(inputs, group_max=False)),
            ("value norm", _value_norm(inputs)),
            ("select", _select(inputs)),
            ("compact", _compact(inputs, shifted=True)),
            ("compact, any slots", _compact(inputs, shifted=False)),
            ("redundancy", _redundancy(inputs)),
            ("trigonometric", _trigonometric(inputs)),
            ("expected", _expected(inputs)),
            ("decode attention", _attention(inputs)),
        ):
            exact = name.startswith(("select", "compact"))
            limit = 0.0 if exact else LIMIT
            # The search for the last similar key is a threshold: two nearly equal sides of it may be told
            # apart differently.
            if name == "redundancy" and pool.count > 1000:
                limit = 1e-3
            if name == "decode attention" and pool.dtype != torch.float32:
                limit = 1e-2  # the output is rounded to 16 bits
            shown = ("identical" if exact else f"error {errors:.1e}") if errors <= limit else f"error {errors:.1e}"
            yield Row(name, str(pool), shown, "identical" if exact else f"{limit:.0e}", errors <= limit)


def _both(run: Callable[[Backend], torch.Tensor]) -> float:
    return relative(run("triton"), run("torch"))


def _score(inputs: Inputs, group_max: bool = True) -> float:
    return _both(
        lambda backend: score.attention_mass_layers(
            inputs.queries, inputs.valid, inputs.k, inputs.slots, scale=inputs.pool.dim**-0.5,
            group_max=group_max, backend=backend,
        )
    )  # fmt: skip


def _value_norm(inputs: Inputs) -> float:
    return _both(lambda backend: value_norm.value_norms(inputs.v, inputs.slots, backend=backend))


def _select(inputs: Inputs) -> float:
    pool = inputs.pool
    # Few distinct values, so that ties decide.
    scores = (inputs.normal(pool.layers, pool.kv_heads, pool.count) * 100).round()
    keep = max(1, pool.count // 2)
    run = {b: select.top_keep(scores, keep, inputs.protected, backend=b) for b in ("triton", "torch")}
    return float((run["triton"] != run["torch"]).sum())


def _compact(inputs: Inputs, shifted: bool) -> float:
    pool = inputs.pool
    keep = max(1, pool.count // 3)
    order = torch.rand(pool.layers, pool.kv_heads, pool.count, generator=inputs.random, device=inputs.device)
    kept = order.argsort(-1)[..., :keep].sort(-1).values
    target = inputs.slots[-keep:] if shifted else inputs.slots[:keep].flip(0)
    moved: dict[str, list[torch.Tensor]] = {}
    backend: Backend
    for backend in ("triton", "torch"):
        buffers = [buffer.clone() for buffer in (*inputs.k, *inputs.v)]
        k, v = buffers[: pool.layers], buffers[pool.layers :]
        compact.gather_write(k, v, inputs.slots, kept, target, shifted=shifted, backend=backend)
        moved[backend] = [buffer.view(torch.uint8) for buffer in buffers]
    return float(sum(int((a != b).sum()) for a, b in zip(moved["triton"], moved["torch"], strict=True)))


def _redundancy(inputs: Inputs) -> float:
    slots = inputs.slots[:8192]  # its reference looks at all pairs
    return _both(lambda backend: redundancy.redundancy(inputs.k, slots, backend=backend))


def _trigonometric(inputs: Inputs) -> float:
    pool = inputs.pool
    shape = (pool.layers, pool.kv_heads * pool.group, pool.dim // 2)
    mean = torch.complex(inputs.normal(*shape), inputs.normal(*shape))
    frequencies = 1e4 ** (-torch.arange(shape[2], device=inputs.device) / shape[2])
    return _both(
        lambda backend: trigonometric.trigonometric(
            mean, mean.abs() * 1.5, inputs.k, inputs.slots, frequencies, 70_000, maximum=True, backend=backend
        )
    )


def _expected(inputs: Inputs) -> float:
    pool = inputs.pool
    mean = inputs.normal(pool.layers, pool.kv_heads * pool.group, pool.dim)
    root = inputs.normal(*mean.shape, pool.dim) / pool.dim**0.5
    return _both(
        lambda backend: expected.expected_attention(
            mean, root @ root.mT, inputs.k, inputs.slots, v_buffers=inputs.v, backend=backend
        )
    )


def _attention(inputs: Inputs) -> float:
    indptr = torch.tensor([0, inputs.pool.count // 3, inputs.pool.count], device=inputs.device)
    return _both(
        lambda backend: attention.decode_attention(
            inputs.queries[0, :2], inputs.k[0], inputs.v[0], indptr, inputs.slots, splits=5, backend=backend
        )
    )


def check_decode_ops(device: torch.device, large: bool) -> Iterator[Row]:
    """Capture, automaton and window indices, with their exact results."""
    random = torch.Generator(device=device).manual_seed(1)

    def integers(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random, device=device)

    rows, heads, dim = (64, 32, 128) if large else (5, 3, 64)
    queries = torch.randn(rows, heads, dim, generator=random, device=device).to(torch.bfloat16)
    slot, phase, position = torch.randperm(rows, generator=random, device=device), integers(4, rows), integers(8, rows)
    rings = {}
    backend: Backend
    for backend in ("triton", "torch"):
        rings[backend] = torch.zeros(rows + 1, 2, 4, 8, heads, dim, dtype=torch.bfloat16, device=device)
        capture.write(rings[backend], 1, queries, slot, phase, position, backend=backend)
    same = torch.equal(rings["triton"][1:], rings["torch"][1:])
    yield Row("capture", f"{rows} rows, {heads}x{dim}", "identical" if same else "different", "identical", same)

    states, vocabulary = (300, 151_936) if large else (9, 1_000)
    table, label = integers(states, states, vocabulary).short(), integers(6, states, vocabulary).to(torch.int8)
    state, ids = integers(states, rows), integers(vocabulary + 5, rows)
    steps = [phase_step.step(table, label, state, ids, backend=b) for b in ("triton", "torch")]
    same = all(torch.equal(a, b) for a, b in zip(*steps, strict=True))
    shape = f"{states} states x {vocabulary} tokens, {rows} rows"
    yield Row("phase step", shape, "identical" if same else "different", "identical", same)

    width = 40_000 if large else 700
    pages = integers(1 << 30, rows + 1, width, low=1).int()
    start, which = integers(width // 2, rows + 1), torch.randperm(rows + 1, generator=random, device=device)[:rows]
    lens = integers(width, rows)
    streams = [window_indices.window_indices(pages, which, start, lens, backend=b) for b in ("triton", "torch")]
    same = all(torch.equal(a, b) for a, b in zip(*streams, strict=True))
    shape = f"{rows} rows of {width}, mixed starts"
    yield Row("window indices", shape, "identical" if same else "different", "identical", same)
