"""No compression: the session keeps everything, as stock SGLang would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentkv_serve.engine.policies.base import Policy, Sampler, Scores, Window


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps every token; holds no query rings."""

    name: ClassVar[str] = "full"
    compresses: ClassVar[bool] = False

    sinks: int = 0
    recent: int = 0

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return ()

    def score(self, window: Window) -> Scores:
        raise TypeError("the full policy keeps every token and is never asked for scores")
