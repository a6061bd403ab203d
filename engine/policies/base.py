"""The interface of a policy: it only scores and declares its needs. Selection, movement and freeing are shared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv_serve.kernels.backend import Backend
from agentkv_serve.phase_tagger import Label, Phase

KEEP_LAST = -1
"""In a ring table: a token of this label counts as what the token before it counted as."""


@dataclass(frozen=True, slots=True)
class Window:
    """The candidate tokens of a session at a compression point. Nothing here is mutated by a policy."""

    k_buffers: Sequence[Tensor]  # per layer [S, Hkv, D]: paged pool, keys rotated at their true positions
    v_buffers: Sequence[Tensor]  # per layer [S, Hkv, Dv]
    slots: Tensor  # [N] int64 pool slots of the candidates, in row order
    positions: Tensor  # [L, Hkv, N] int32 logical position of each candidate (heads hold different tokens)
    queries: Tensor  # [L, R, Hq, D] the session's query rings, post-RoPE
    valid: Tensor  # [R] bool: which ring entries hold a query
    length: int  # tokens of the session so far: the position of the next one
    scale: float  # softmax scale
    backend: Backend  # kernels to use


class Policy(ABC):
    """Scores the candidates of every layer and KV head; higher means keep.

    Class attributes are the declared needs, read by the carrier before a session starts.
    """

    name: str
    compresses = True
    rings = len(Phase)
    """Number of FIFO query rings per session."""
    ring_capacity = 8
    """Newest queries that each ring keeps (per layer and query head)."""
    sinks = 32
    """First tokens of the session that are always kept, inside the budget."""
    recent = 32
    """Last tokens that are always kept and stay in place, inside the budget."""
    compress_prefill = True
    """Compress at prefill-chunk ends and at turn end too, not only every `compress_every` decode tokens."""

    def ring_table(self, say_phase: str = "others") -> tuple[int, ...]:
        """Ring of each fine label (in the order of `Label`), or `KEEP_LAST`."""
        table = {
            Label.INPUT: Phase.OTHERS,
            Label.THINK: Phase.THINK,
            Label.ACT: Phase.ACT,
            Label.TOOL: Phase.TOOL,
            Label.SAY: Phase[say_phase.upper()],
            Label.GLUE: Phase.OTHERS,
        }
        return tuple(int(table[label]) for label in Label)

    @abstractmethod
    def scores(self, window: Window) -> Tensor:
        """[L, Hkv, N] fp32 scores of the window's candidates."""

    def protected(self, window_length: int, device: torch.device) -> Tensor:
        """[N] bool: candidates that are kept whatever their score. Sinks stay first in every head's window."""
        mask = torch.zeros(window_length, dtype=torch.bool, device=device)
        mask[: self.sinks] = True
        if self.recent:
            mask[-self.recent :] = True
        return mask
