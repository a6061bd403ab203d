"""AgentKV (arXiv 2609.14872): score against the union of the newest queries of every phase."""

from __future__ import annotations

from torch import Tensor

from agentkv_serve.engine.policies.base import KEEP_LAST, Policy, Window
from agentkv_serve.kernels import score
from agentkv_serve.phase_tagger import Label


class AgentKV(Policy):
    """Mean over the union of phase queries of softmax(q·k/√d), one pool of candidates, no per-phase quota.

    8 newest queries per phase (section 4 of the paper: q = 32 in total), maximum over the GQA group before the
    softmax and max-pool of 7 (the setting that the paper shares with its R-KV baseline), 32 sinks. Ours: the last 32
    tokens are kept too, and compression also runs at prefill-chunk ends and at turn end.
    """

    name = "agentkv"
    pool = 7

    def scores(self, window: Window) -> Tensor:
        return score.attention_mass_layers(
            window.queries,
            window.valid,
            window.k_buffers,
            window.slots,
            scale=window.scale,
            pool=self.pool,
            backend=window.backend,
        )


class AgentKVPaper(AgentKV):
    """AgentKV with what the paper literally lists.

    Compression only every 128 decode tokens, and sticky phases: the listing of the paper's parser has no end markers,
    so visible text after `</think>` stays think, and text after a call stays act. No recent window is named; the last
    4 tokens still stay in place here, since SGLang may trim a row's tail by that much.
    """

    name = "agentkv_paper"
    recent = 4
    compress_prefill = False

    def ring_table(self, say_phase: str = "others") -> tuple[int, ...]:
        sticky = {Label.SAY, Label.GLUE}
        table = super().ring_table(say_phase)
        return tuple(KEEP_LAST if label in sticky else table[label] for label in Label)
