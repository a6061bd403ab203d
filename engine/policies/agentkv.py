"""AgentKV (arXiv 2609.14872): score against the union of the newest queries of every phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentkv_serve.engine.policies.base import KEEP_LAST, LEAST_RECENT, Policy, Sampler, Scores, Window
from agentkv_serve.kernels import score
from agentkv_serve.kernels.value_norm import value_norms
from agentkv_serve.phase_tagger import Label, Phase


@dataclass(frozen=True, kw_only=True)
class AgentKV(Policy):
    """Mean over the union of phase queries of softmax(q·k/√d), one pool of candidates, no per-phase quota.

    8 newest queries per phase (section 4 of the paper: q = 32 in total), maximum over the GQA group before the
    softmax and max-pool of 7 (the setting that the paper shares with its R-KV baseline), 32 sinks. Ours: the last 32
    tokens are kept too, and compression also runs at prefill-chunk ends and at turn end.
    """

    name: ClassVar[str] = "agentkv"

    queries_per_phase: int = 8
    pool: int = 7
    value_power: float = 0.0
    """Exponent of the value norm that the score is multiplied by; 0 = none, as in the paper."""

    def __post_init__(self) -> None:
        if self.value_power < 0:
            raise ValueError(f"value_power must not be negative, got {self.value_power}")

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return (Sampler(self.queries_per_phase),) * len(Phase)

    def score(self, window: Window) -> Scores:
        mass = score.attention_mass_layers(
            window.queries,
            window.valid,
            window.k_buffers,
            window.slots,
            scale=window.scale,
            pool=self.pool,
            backend=window.backend,
        )
        if self.value_power:
            mass *= value_norms(window.v_buffers, window.slots, backend=window.backend).pow_(self.value_power)
        return Scores(mass)


@dataclass(frozen=True, kw_only=True)
class AgentKVPaper(AgentKV):
    """AgentKV with what the paper literally lists.

    Compression only every 128 decode tokens (a worker also compresses a prompt that would take more than half of its
    pool), and sticky phases: the listing of the paper's parser has no end markers,
    so visible text after `</think>` stays think, and text after a call stays act. No recent window is named; the last
    4 tokens still stay in place here, since SGLang may trim a row's tail by that much.
    """

    name: ClassVar[str] = "agentkv_paper"

    recent: int = LEAST_RECENT
    compress_prefill: bool = False

    def ring_table(self, say_phase: str = "others") -> tuple[int, ...]:
        sticky = {Label.SAY, Label.GLUE}
        table = super().ring_table(say_phase)
        return tuple(KEEP_LAST if label in sticky else table[label] for label in Label)


@dataclass(frozen=True, kw_only=True)
class Recent(AgentKV):
    """The paper's matched recency baseline: as `agentkv` in all but the queries, which are the 32 newest of any phase.

    The paper's ablation of the idea itself; the number of queries is the same.
    """

    name: ClassVar[str] = "recent"

    queries_per_phase: int = 32

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return (Sampler(self.queries_per_phase),)
