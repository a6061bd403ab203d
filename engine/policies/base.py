"""The interface of a policy: it only scores and declares its needs. Selection, movement and freeing are shared.

The engine and the evaluation harness drive a policy the same way. On dense buffers, for a session of `length` tokens
with the entries `keys`, `values` [L, Hkv, N, D] of which `positions` [L, Hkv, N] says which token each one is:

    window = Window(
        k_buffers=[layer.transpose(0, 1) for layer in keys],  # [N, Hkv, D] views: a pool of which every slot is used
        v_buffers=[layer.transpose(0, 1) for layer in values],
        slots=torch.arange(N), positions=positions, keep=budget, length=length, since=length_at_last_compaction,
        queries=ring, query_positions=torch.from_numpy(places), labels=torch.from_numpy(labels[:length]),
        carry=carry, scale=scale, rope=rope, seed=seed,
    )
    choice = policy.choose(window)
    keys = keys.gather(2, choice.kept[..., None].expand(-1, -1, -1, D))  # values and positions alike
    carry = choice.carry

The rings between compactions: `places = entry_positions(labels[:length], policy.samplers, policy.ring_table())` after
every chunk [a, b) of tokens, and `new = places >= a; ring[:, new] = queries_of_chunk[:, places[new] - a]` with
queries [L, b - a, Hq, D] after RoPE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from agentkv_serve.engine.policies.rope import Rope
from agentkv_serve.engine.policies.sampler import KEEP_LAST, NO_RING, Sampler, entry_rings, prompt_length
from agentkv_serve.kernels import select
from agentkv_serve.kernels.backend import Backend
from agentkv_serve.phase_tagger import Label, Phase

__all__ = ["KEEP_LAST", "LEAST_RECENT", "NO_RING", "Choice", "Policy", "Sampler", "Scores", "Window"]

LEAST_RECENT = 4
"""The last tokens of a row that have to stay in place: the engine may trim a finished turn's tail by that much."""


@dataclass(frozen=True, slots=True)
class Window:
    """The candidate entries of a session at a compression point. Nothing here is mutated by a policy.

    L layers with attention, Hkv KV heads, N entries in order of position, R ring entries. Heads hold different tokens.
    """

    k_buffers: Sequence[Tensor]  # per layer [S, Hkv, D]: paged pool, keys rotated at their true positions
    v_buffers: Sequence[Tensor]  # per layer [S, Hkv, Dv]
    slots: Tensor  # [N] int64 pool slots of the candidates, in row order
    positions: Tensor  # [L, Hkv, N] int32 logical position of each candidate
    queries: Tensor  # [L, R, Hq, D] the session's query rings, post-RoPE
    length: int  # tokens of the session so far: the position of the next one
    scale: float  # softmax scale
    valid: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # [R] which entries hold a query
    backend: Backend = "torch"  # kernels to use
    keep: int = 0  # entries to keep per layer and KV head
    # Known on the host: policies look at them there, so CPU tensors spare a wait for the device.
    query_positions: Tensor | None = None  # [R] int64 position of the token of each ring entry, -1 = empty
    labels: Tensor | None = None  # [length] int8 fine label of every token of the session
    carry: Tensor | None = None  # [L, Hkv, N] what the policy noted of each entry, 0 for new ones
    since: int = 0  # the session's length at its last compaction: tokens from here on are new
    budget: int = 0  # what budget auto chose last, 0 = nothing yet
    rope: Rope | None = None
    seed: int = 0  # differs by session and compaction; for policies that draw

    def __post_init__(self) -> None:
        if not self.valid.numel() and self.query_positions is not None:
            # Without a wait for the device: a compression is planned while a forward runs.
            object.__setattr__(self, "valid", (self.query_positions >= 0).to(self.slots.device, non_blocking=True))

    @property
    def count(self) -> int:
        """N, candidates per layer and KV head."""
        return self.slots.numel()

    @property
    def device(self) -> torch.device:
        return self.slots.device

    def entry_labels(self) -> Tensor:
        """[L, Hkv, N] int8 fine label of each candidate."""
        assert self.labels is not None
        return self.labels.to(self.device)[self.positions.to(torch.int64)]

    def prompt(self) -> int:
        """Tokens of the session's opening (system message, tools, first user message)."""
        assert self.labels is not None
        return prompt_length(self.labels.cpu().numpy())


@dataclass(frozen=True, slots=True)
class Scores:
    """What a policy says of a window's entries."""

    keep: Tensor  # [L, Hkv, N] fp32, higher = keep
    carry: Tensor | None = None  # [L, Hkv, N] to be noted of each entry that stays


@dataclass(frozen=True, slots=True)
class Choice:
    """The entries of a window that stay."""

    kept: Tensor  # [L, Hkv, keep] int64 indices of entries, ascending
    carry: Tensor | None  # [L, Hkv, keep] their notes


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Scores the candidates of every layer and KV head. Fields are the method's settings, published defaults.

    Class variables are declared needs, read by the carrier before a session starts.
    """

    name: ClassVar[str]
    compresses: ClassVar[bool] = True
    needs_rope: ClassVar[bool] = False
    """Reads `Window.rope`."""
    needs_statistics: ClassVar[bool] = False
    """Cannot score without a calibration file."""

    sinks: int = 32
    """First tokens of the session that are always kept, inside the budget."""
    recent: int = 32
    """Last tokens that are always kept and stay in place, inside the budget."""
    compress_prefill: bool = True
    """Compress at prefill-chunk ends and at turn end too, not only every `compress_every` decode tokens; see also
    `prefill_slack`. Without it, a prompt is compressed only when it would take more than half of the worker's pool."""

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        """The query rings of a session: one sampler each. By default one ring of the 8 newest per phase."""
        return (Sampler(8),) * len(Phase)

    def ring_table(self, say_phase: str = "others") -> tuple[int, ...]:
        """Ring of each fine label (in the order of `Label`), or `KEEP_LAST`, or `NO_RING`.

        A ring that is alone takes the queries of all labels.
        """
        if len(self.samplers) == 1:
            return (0,) * len(Label)
        table = {
            Label.INPUT: Phase.OTHERS,
            Label.THINK: Phase.THINK,
            Label.ACT: Phase.ACT,
            Label.TOOL: Phase.TOOL,
            Label.SAY: Phase[say_phase.upper()],
            Label.GLUE: Phase.OTHERS,
        }
        return tuple(int(table[label]) for label in Label)

    @property
    def prefill_slack(self) -> int:
        """Tokens over the budget that are held inside a prompt, where `compress_prefill`.

        With any, a turn's end compresses only what a decode trigger would have: compress_every tokens over the budget.
        """
        return 0

    @property
    def carry_dtype(self) -> torch.dtype | None:
        """Type of the number that it notes of every entry from one compaction to the next; None: it notes none."""
        return None

    @property
    def note_bytes(self) -> int:
        """Bytes of an entry's note."""
        return 0 if self.carry_dtype is None else self.carry_dtype.itemsize

    @property
    def ring_queries(self) -> int:
        """R, queries kept per session, layer and query head."""
        return sum(sampler.capacity for sampler in self.samplers)

    def query_rings(self, window: Window) -> Tensor:
        """[R] int64 ring of each entry of `window.queries`."""
        return torch.from_numpy(entry_rings(self.samplers)).to(window.device)

    @property
    def least_budget(self) -> int:
        """The smallest budget that holds what is always kept and one more."""
        return self.sinks + max(self.recent, LEAST_RECENT) + 1

    @abstractmethod
    def score(self, window: Window) -> Scores:
        """Scores of the window's candidates; mutates nothing."""

    def protection(self, window: Window) -> Tensor:
        """[N] or [L, Hkv, N] bool: candidates that are kept whatever their score, at most `window.keep` per head.

        Sinks were kept by every compaction before, so they are the first entries of every head.
        """
        return self._edges(window, self.sinks, self.recent)

    def choose(self, window: Window) -> Choice:
        """The `window.keep` entries of each layer and KV head that stay."""
        scores = self.score(window)
        kept = select.top_keep(scores.keep, window.keep, self.protection(window), backend=window.backend)
        return Choice(kept, None if scores.carry is None else scores.carry.gather(-1, kept))

    @staticmethod
    def _edges(window: Window, first: int, last: int) -> Tensor:
        mask = torch.zeros(window.count, dtype=torch.bool, device=window.device)
        mask[:first] = True
        mask[max(0, window.count - max(last, LEAST_RECENT)) :] = True
        return mask

    def _opening(self, window: Window, share: float) -> Tensor:
        """[N] bool: the recent window, and the session's opening, but no more than `share` of the room beside it."""
        room = int(share * (window.keep - max(self.recent, LEAST_RECENT)))
        return self._edges(window, min(window.prompt(), room), self.recent)
