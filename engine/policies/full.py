"""No compression: the session keeps everything, as stock SGLang would."""

from __future__ import annotations

from torch import Tensor

from agentkv_serve.engine.policies.base import Policy, Window


class Full(Policy):
    """Keeps every token; holds no query rings."""

    name = "full"
    compresses = False
    rings = 0
    ring_capacity = 0
    sinks = 0
    recent = 0

    def scores(self, window: Window) -> Tensor:
        raise TypeError("the full policy keeps every token and is never asked for scores")
