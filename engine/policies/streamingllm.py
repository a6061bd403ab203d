"""StreamingLLM (arXiv 2309.17453): attention sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentkv_serve.engine.policies.base import LEAST_RECENT, Policy, Sampler, Scores, Window


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """4 sinks; the rest of the budget goes to the newest tokens. Keys keep their true positions."""

    name: ClassVar[str] = "streamingllm"

    sinks: int = 4
    recent: int = LEAST_RECENT

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return ()

    def score(self, window: Window) -> Scores:
        return Scores(window.positions.float())
