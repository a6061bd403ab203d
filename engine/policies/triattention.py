"""TriAttention (arXiv 2604.04921): what a key will get from the calibrated average query at many future distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from agentkv_serve.engine.policies.base import Policy, Sampler, Scores, Window
from agentkv_serve.engine.policies.statistics import Statistics
from agentkv_serve.kernels import trigonometric


@dataclass(frozen=True, kw_only=True)
class TriAttention(Policy):
    """Trigonometric score averaged over the offsets 1, 2, 4, ..., 65536, z-normalised per query head, group maximum.

    Defaults of the published runtime: window 128 (`recent` here), prompt not protected, scores normalised,
    `pruning_mode` per_head: a KV head keeps the same tokens in all layers, by the mean of its layers' scores.
    `per_layer_head`: every layer its own.
    """

    name: ClassVar[str] = "triattention"
    needs_rope: ClassVar[bool] = True
    needs_statistics: ClassVar[bool] = True

    statistics: Statistics | None = None
    sinks: int = 0
    recent: int = 128
    pruning_mode: Literal["per_head", "per_layer_head"] = "per_head"
    offset_max: int = 65536
    normalize: bool = True
    maximum: bool = False
    """The best offset instead of the mean over the offsets."""

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return ()

    def score(self, window: Window) -> Scores:
        if self.statistics is None:
            raise ValueError(
                "triattention scores with statistics of the model's queries: make them with `agentkv calibrate` and "
                "start with --agentkv-statistics FILE"
            )
        rope = window.rope
        if rope is None or rope.interleaved:
            raise ValueError("triattention needs a model whose rotary pairs are (f, f + F)")
        rows = trigonometric.trigonometric(
            self.statistics.mean,
            self.statistics.magnitude,
            window.k_buffers,
            window.slots,
            rope.frequencies,
            window.length,
            offsets=[1 << power for power in range(self.offset_max.bit_length())],
            maximum=self.maximum,
            backend=window.backend,
        )
        if self.normalize:
            rows = (rows - rows.mean(-1, keepdim=True)) / (rows.std(-1, keepdim=True) + 1e-6)
        layers, kv_heads, count = window.positions.shape
        scores = rows.view(layers, kv_heads, -1, count).amax(2)
        if self.pruning_mode == "per_head":
            # Only while the layers hold the same tokens; a session that another policy has compressed does not.
            aligned = (window.positions == window.positions[:1]).all()
            scores = torch.where(aligned, scores.mean(0, keepdim=True), scores)
        return Scores(scores)
