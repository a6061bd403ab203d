"""AgentKV+: AgentKV with what was measured to help. Every term is a setting that can be switched off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentkv_serve.engine.policies.base import Policy, Sampler, Scores, Window
from agentkv_serve.engine.policies.noted_norms import decode, noted_norms
from agentkv_serve.kernels import score
from agentkv_serve.kernels.value_norm import value_norms
from agentkv_serve.phase_tagger import Label, Phase


@dataclass(frozen=True, kw_only=True)
class AgentKVPlus(Policy):
    """Keeps what the queries of all phases attend to, by this head and by all others, times the norm of its value.

    mass_hi = sum_u w_u softmax_i(q_u·k_hi/√d) |v_hi|^value_power, over the buffered queries u
    score_hi = mass_hi / mean_j mass_hj + consensus x mean over all layers and heads h' of the same for token i

    What it has over `agentkv`, each with the value that switches it off:

    - queries [(8, 8, 8, 8)]: of others, think, act, tool. Generated phases are who will ask, so theirs are more.
    - strided_share [0]: this share of them are every `stride`-th token of the phase, further back than the newest.
    - say_as_think [False]: visible text is counted as think. Few agents write both, so one ring serves either.
    - act_weight [1]: weight of a query of a call; calls copy what they need from afar.
    - head_share [1]: this share of a group's heads, at least one, scores by each query, and they take turns: more
      queries for the same work. The mean over them instead of the maximum before the softmax.
    - value_power [0]: larger values change the output more (CriticalKV, VaSE; ours: inside the consensus too).
    - note_norms [False]: values are read once and their norms noted, within 3%; else at every compression, exactly.
    - consensus [0]: a token that is wanted elsewhere in the model is likely wanted here next. Heads miss a token by
      chance of the few queries; what all of them say is steadier. A head that lacks the token counts as 0.
    - pool [7]: no max-pool. It spends six of seven tokens on neighbours.
    - sinks [32]: 4.
    - unread [0]: inside a prompt up to so many tokens over the budget are held: a tool result is compressed when the
      first token after it was sampled, since before that no query has read it.
    """

    name: ClassVar[str] = "agentkv_plus"

    sinks: int = 4
    queries: tuple[int, int, int, int] = (12, 26, 26, 16)
    strided_share: float = 0.5
    stride: int = 8
    say_as_think: bool = True
    act_weight: float = 3.0
    head_share: float = 0.5
    value_power: float = 1.0
    note_norms: bool = True
    consensus: float = 0.5
    pool: int = 1
    unread: int = 4096

    def __post_init__(self) -> None:
        if self.value_power < 0:
            raise ValueError(f"value_power must not be negative, got {self.value_power}")

    @property
    def prefill_slack(self) -> int:
        return self.unread

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        strided = [int(count * self.strided_share) for count in self.queries]
        return tuple(Sampler(n - far, far, self.stride) for n, far in zip(self.queries, strided, strict=True))

    @property
    def carry_dtype(self) -> torch.dtype | None:
        return torch.uint8 if self.value_power and self.note_norms else None

    def ring_table(self, say_phase: str = "others") -> tuple[int, ...]:
        table = list(super().ring_table(say_phase))
        if self.say_as_think:
            table[Label.SAY] = int(Phase.THINK)
        return tuple(table)

    def score(self, window: Window) -> Scores:
        kv_heads = window.positions.shape[1]
        queries = _taking_turns(window.queries, kv_heads, self.head_share) if self.head_share < 1 else window.queries
        mass = score.attention_mass_layers(
            queries,
            window.valid,
            window.k_buffers,
            window.slots,
            scale=window.scale,
            group_max=self.head_share >= 1,
            pool=self.pool,
            weights=self._weights(window) if self.act_weight != 1 else None,
            backend=window.backend,
        )
        notes = None
        if self.value_power:
            norms, notes = self._norms(window)
            mass *= norms.pow_(self.value_power)
        if self.consensus:
            mass = _with_consensus(mass, window.positions, window.length, self.consensus)
        return Scores(mass, notes)

    def _norms(self, window: Window) -> tuple[Tensor, Tensor | None]:
        """[L, Hkv, N] fp32 norms of the values, and what is noted of them."""
        if not self.note_norms:
            return value_norms(window.v_buffers, window.slots, backend=window.backend), None
        codes = noted_norms(window)
        return decode(codes), codes

    def _weights(self, window: Window) -> Tensor:
        """[R] fp32 weights of the ring entries; they sum to 1 over those that hold a query."""
        weights = torch.where(self.query_rings(window) == Phase.ACT, self.act_weight, 1.0) * window.valid
        return weights / weights.sum().clamp(min=1e-9)


def _taking_turns(queries: Tensor, kv_heads: int, share: float) -> Tensor:
    """A share of each group's heads per query [L, R, Hkv * heads, D]: the next ones for every further query."""
    layers, count, total, dim = queries.shape
    group = total // kv_heads
    heads = max(1, int(group * share))
    device = queries.device
    turn = heads * torch.arange(count, device=device)[:, None] + torch.arange(heads, device=device)  # [R, heads]
    member = group * torch.arange(kv_heads, device=device)[:, None] + turn[:, None] % group  # [R, Hkv, heads]
    rows = total * torch.arange(count, device=device)[:, None, None] + member
    return queries.flatten(1, 2).index_select(1, rows.flatten()).view(layers, count, -1, dim)


def _with_consensus(mass: Tensor, positions: Tensor, length: int, weight: float) -> Tensor:
    """[L, Hkv, N] each head's mass in units of its own mean, plus the mean over all heads for the same token."""
    own = mass / mass.mean(-1, keepdim=True).clamp(min=1e-12)
    tokens = positions.flatten()
    total = torch.zeros(length, device=mass.device).index_add_(0, tokens, own.flatten())
    return own.add_(total[tokens].view_as(own), alpha=weight / (mass.shape[0] * mass.shape[1]))
