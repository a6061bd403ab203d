"""`agentkv bench policies`: what one compression's scoring costs, policy by policy, on the shapes of real models.

Every policy scores the same window of a session in steady state: the budget, and the 128 tokens since the last
compression. Keys, values and queries are random: the cost does not depend on them. Each policy gets the rings that it
asks for, full. On a CPU only `--layers` layers are scored, all alike, and the time stands for those.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

if TYPE_CHECKING:
    import torch

    from agentkv_serve.engine.policies import Policy, Window

SINCE = 128  # tokens between two compressions


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: Annotated[str, typer.Option(help="Shapes of this model (see `agentkv bench kernels`).")] = "Qwen3-8B",
    budget: Annotated[int, typer.Option(help="KV tokens per layer and KV head.")] = 4096,
    layers: Annotated[int, typer.Option(help="Layers to score; 0 = all on a GPU, 2 on a CPU.")] = 0,
    names: Annotated[str, typer.Option(help="Comma-separated policies; default: all.")] = "",
    repeats: Annotated[int, typer.Option(help="Timed compressions per policy.")] = 15,
) -> None:
    """Scoring time of each policy, and its share of memory."""
    import torch

    from agentkv_serve.bench.kernels import MODELS
    from agentkv_serve.bench.report import machine, publish, spread
    from agentkv_serve.engine.policies import get_policy, policy_names

    shape = next((m for m in MODELS if m.name == model), None)
    if shape is None:
        raise typer.BadParameter(f"unknown model {model!r}: one of {', '.join(m.name for m in MODELS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = layers or (shape.layers if device.type == "cuda" else 2)
    chosen = names.split(",") if names else [name for name in policy_names() if name != "full"]
    made = [get_policy(name) for name in chosen]
    made = [_with_statistics(policy, layers, shape.q_heads, shape.dim, device) for policy in made]
    windows = [_window(policy, layers, shape.q_heads, shape.kv_heads, shape.dim, budget, device) for policy in made]
    times: dict[str, list[float]] = {policy.name: [] for policy in made}
    for turn in range(repeats + 2):  # turn by turn, so that a slow moment of the machine hits all policies alike
        for policy, window in zip(made, windows, strict=True):
            elapsed = _timed(lambda policy=policy, window=window: policy.score(window), device)  # type: ignore[misc]
            if turn >= 2:
                times[policy.name].append(elapsed * 1e3)
    token_bytes = shape.kv_heads * 2 * shape.row
    peer = float(np.median(times["agentkv"])) if "agentkv" in times else None
    rows = {}
    for policy in made:
        ring = policy.ring_queries * shape.q_heads * shape.row
        notes = shape.kv_heads * (4 + policy.note_bytes)  # int32 positions and notes, per token held
        rows[policy.name] = {
            "score_ms": spread(times[policy.name]),
            "times_agentkv": round(float(np.median(times[policy.name])) / peer, 3) if peer else None,
            "ring_queries": policy.ring_queries,
            "auxiliary_percent_of_kv": round(100 * (ring / budget + notes) / token_bytes, 2),
        }
    result = {
        "machine": machine(),
        "model": model,
        "layers": layers,
        "query_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.dim,
        "budget": budget,
        "window": budget + SINCE,
        "dtype": str(windows[0].k_buffers[0].dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "policies": rows,
    }
    publish(result, "scoring of one compression", as_json)


def _with_statistics(policy: Policy, layers: int, heads: int, dim: int, device: torch.device) -> Policy:
    import torch

    from agentkv_serve.engine.policies.statistics import Statistics

    if not policy.needs_statistics:
        return policy
    mean = torch.randn(layers, heads, dim // 2, dtype=torch.complex64, device=device)
    return replace(policy, statistics=Statistics(mean, mean.abs() + 1))  # type: ignore[call-arg]


def _window(
    policy: Policy, layers: int, q_heads: int, kv_heads: int, dim: int, budget: int, device: torch.device
) -> Window:
    import torch

    from agentkv_serve.engine.policies import Rope, Window, entry_positions
    from agentkv_serve.phase_tagger import Label

    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count, length = budget + SINCE, 2 * budget + SINCE

    def buffers() -> list[torch.Tensor]:
        return [
            torch.randn(2 * count, kv_heads, dim, generator=generator, device=device).to(dtype) for _ in range(layers)
        ]

    spans = [(Label.INPUT, 800), *[(Label.THINK, 60), (Label.ACT, 40), (Label.TOOL, 150), (Label.SAY, 50)] * 99]
    labels = np.concatenate([np.full(n, label, np.int8) for label, n in spans])[-length:]
    where = entry_positions(labels, policy.samplers, policy.ring_table())
    old = torch.arange(0, 2 * budget, 2, dtype=torch.int32, device=device)
    new = torch.arange(2 * budget, length, dtype=torch.int32, device=device)
    positions = torch.cat([old, new]).expand(layers, kv_heads, count).contiguous()
    queries = torch.randn(layers, len(where), q_heads, dim, generator=generator, device=device).to(dtype)
    window = Window(
        k_buffers=buffers(),
        v_buffers=buffers(),
        slots=torch.randperm(2 * count, generator=generator, device=device)[:count],
        positions=positions,
        queries=queries,
        query_positions=torch.from_numpy(where),
        labels=torch.from_numpy(labels),
        length=length,
        since=length - SINCE,
        keep=budget,
        scale=dim**-0.5,
        rope=Rope(1e6 ** -(torch.arange(0, dim, 2, device=device) / dim)),
        backend="triton" if device.type == "cuda" else "torch",
    )
    notes = policy.score(window).carry  # as an earlier compression would have left them
    if notes is not None:
        notes[..., budget:] = 0
    return replace(window, carry=notes)


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
