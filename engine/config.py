"""Settings of the plug-in in one worker process."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import orjson

ENVIRONMENT = "AGENTKV_ENGINE_CONFIG"
"""The launcher hands the settings to SGLang's child processes in this variable: server flags cannot be extended."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the AgentKV cache of one worker works. Token counts are per layer and KV head."""

    compress_every: int = 128
    """Decode tokens over the budget that trigger a compression (the paper's Delta)."""
    max_sessions: int = 0
    """Compressed sessions that may be live at once; 0 = as many as fit in `ring_share`."""
    ring_share: float = 0.02
    """Share of the KV pool's bytes that the sessions' query rings may take."""
    idle_seconds: float = 3600.0
    """An idle session's state is released after this time."""
    tombstone_seconds: float = 3600.0
    """How long epochs of closed and lost sessions are remembered."""
    policy: str = "agentkv"
    """Policy of turns that name none."""
    policies: tuple[str, ...] = ()
    """Policies that are served beside it: the query rings are as large as the largest of them asks for. Empty = all
    that ask for no more rings than `policy` does, and for no statistics."""
    statistics: str = ""
    """File of the model's query statistics (`agentkv calibrate`), for policies that need it."""
    say_phase: str = "others"
    """Phase that the assistant's visible text counts as: others, act or think."""
    kernels: str = "auto"
    """torch, triton, or auto (by device)."""
    auto_price: float = 0.0024
    """Budget auto: share of sharp misses that 1,000 further entries have to save."""
    auto_epsilon: float | None = None
    """Budget auto: largest predicted share of sharp misses, in place of a price."""
    auto_floor: int = 512
    """Budget auto: the smallest budget that is chosen."""
    allow_forced: bool = False
    """Evaluation: turns may say which tokens they yield."""
    dump_dir: str = ""
    """Tests: write kept positions and queries of every compression there."""

    @classmethod
    def load(cls) -> EngineConfig:
        """The settings of this process; defaults where the launcher set none.

        Raises:
            ValueError: an unknown field, by name.
        """
        raw = os.environ.get(ENVIRONMENT, "")
        values = orjson.loads(raw) if raw else {}
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"{ENVIRONMENT}: unknown settings {', '.join(unknown)}")
        return cls(**values)

    def dump(self) -> str:
        """The value of the environment variable that carries these settings."""
        return orjson.dumps(dataclasses.asdict(self)).decode()
