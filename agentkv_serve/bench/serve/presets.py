"""Workloads with a name, so that their figures can be compared from one machine to another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from agentkv_serve.bench.serve.client import Setting
from agentkv_serve.bench.serve.workload import Workload

Shape = Literal["given", "qwen3-8b", "qwen3-32b"]
TINY = 128
"""The budget of the third regime: what a budget costs that is far too small."""


@dataclass(frozen=True)
class Preset:
    """A workload, the pool it meets, and what is compared.

    `pool_share`: the KV pool as a share of all sessions' full lengths; None = SGLang plans it.
    `shape`: the model is the given one, or one with random weights of that shape.
    """

    name: str
    regime: str
    work: Workload
    pool_share: float | None
    budgets: tuple[int, ...]
    policies: tuple[str, ...] = ("agentkv",)
    chunk: int | None = None
    repeats: int = 3
    shape: Shape = "given"
    dtype: str = "auto"
    changed: dict[str, object] = field(default_factory=dict)

    def settings(self, fitting: int) -> list[Setting]:
        """The rows: stock SGLang in its settings, then every policy at every budget.

        Args:
            fitting: full sessions that the pool holds at once. A streaming session's KV of stock SGLang stays until
                the session is closed; so that setting is also run with no more sessions begun than fit.
        """
        rows = [Setting("stock, radix cache", "prefix"), Setting("stock, streaming sessions", "session")]
        if fitting < self.work.sessions:
            rows.append(Setting(f"stock, streaming sessions, {fitting} at a time", "session", admitted=fitting))
        for policy in self.policies:
            rows += [Setting(f"{policy} {budget}", "agentkv", policy, budget) for budget in self.budgets]
        return rows


def _gpu(name: str, prompt: int, shape: Shape) -> Preset:
    work = Workload(sessions=16, turns=1, prompt=prompt, tool=0, output=1024, concurrency=16)
    policies = ("agentkv", "rkv", "triattention")
    return Preset(name, "gpu", work, None, (2048, 4096), policies, shape=shape, dtype="bfloat16")


_CPU = Preset("cpu-pressured", "pressured", Workload(), 1 / 3, (512, TINY), chunk=512)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _CPU,
        replace(_CPU, name="cpu-unpressured", regime="unpressured", pool_share=1.0, budgets=(512,)),
        _gpu("gpu-8b-16k", 16_384, "qwen3-8b"),
        _gpu("gpu-8b-32k", 32_768, "qwen3-8b"),
        _gpu("gpu-32b-16k", 16_384, "qwen3-32b"),
        _gpu("gpu-32b-32k", 32_768, "qwen3-32b"),
    )
}
