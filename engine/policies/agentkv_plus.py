"""AgentKV+: AgentKV with what was measured to help. Every term is a setting that can be switched off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from agentkv_serve.engine.policies.base import LEAST_RECENT, Policy, Sampler, Scores, Window
from agentkv_serve.engine.policies.transitions import expected_shares
from agentkv_serve.kernels import redundancy, score
from agentkv_serve.phase_tagger import Label, Phase

_SAY = len(Phase)  # ring of visible text


@dataclass(frozen=True, kw_only=True)
class AgentKVPlus(Policy):
    """score_i = (pool of sum_u w_u softmax_i(max over the group of q_u·k/√d) + memory_i) x |v_i|^value_power.

    Terms, each off at the value in brackets:

    - Queries: a ring of its own for visible text [say_ring = False]; per ring the `newest` queries and `strided` more,
      every `stride`-th token further back [strided = 0]; at most `score_queries` of them are scored with, shared evenly
      among the rings that hold any [0 = all].
    - recent_share [0]: this share of the budget goes to the newest tokens, where it is more than `recent`.
    - heads_per_query [0 = all]: so many heads of a group score by each query and take turns: for the same work as many
      more queries count as the group has heads.
    - value_power [0]: norm of the value, as ever larger values weigh more in the output. With `value_share` < 1 that
      part of the free budget only, the rest by plain score first (CriticalKV's two stages).
    - transition_mix [0]: the share of the query weight that goes by what the next tokens are expected to be (Markov
      chain of the session's labels) instead of evenly over queries.
    - action_memory [0]: weight of a noted attention of action tokens, decayed by 2^-`action_decay` per round (ActKV's
      memory, on this policy's own mass).
    - boundary_share [0]: this share of the budget protects each end of the session's opening.
    - span_floor [0]: so many entries of every span are kept, its best ones (fair eviction).
    - think_redundancy [0]: lambda of R-KV's redundancy, inside think only.
    - fresh_tool_share [0]: while fewer than `fresh_tool_tokens` tokens were sampled after a tool result, its best
      entries are kept, up to this share of the budget: the queries that read it are not there yet (delayed scoring).
    """

    name: ClassVar[str] = "agentkv_plus"

    newest: int = 8
    strided: int = 8
    stride: int = 8
    say_ring: bool = True
    score_queries: int = 40
    heads_per_query: int = 0
    recent_share: float = 0.25
    pool: int = 7
    value_power: float = 1.5
    value_share: float = 1.0
    transition_mix: float = 0.0
    action_memory: float = 0.0
    action_decay: float = 0.5
    boundary_share: float = 0.05
    span_floor: int = 0
    think_redundancy: float = 0.0
    fresh_tool_share: float = 0.0
    fresh_tool_tokens: int = 32

    @property
    def carries(self) -> bool:
        return self.action_memory > 0

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return (Sampler(self.newest, self.strided, self.stride),) * (len(Phase) + self.say_ring)

    def ring_table(self, say_phase: str = "others") -> tuple[int, ...]:
        table = list(super().ring_table(say_phase))
        if self.say_ring:
            table[Label.SAY] = _SAY
        return tuple(table)

    def score(self, window: Window) -> Scores:
        carry: Tensor | None
        entries, weights, rings = self._queries(window)
        acts = rings == Phase.ACT
        if self.action_memory:
            act = self._mass(window, entries[acts], weights[acts])
            carry = self._remember(window, act / max(float(weights[acts].sum()), 1e-9), entries[acts])
            mass = self._mass(window, entries[~acts], weights[~acts]) + act + self.action_memory * carry
        else:
            carry = None
            mass = self._mass(window, entries, weights)
        pooled = max_pool1d(mass, self.pool, stride=1, padding=self.pool // 2) if self.pool > 1 else mass
        if self.think_redundancy:
            pooled = self._less_redundant(window, pooled)
        return Scores(self._favour(window, self._by_value(window, pooled)), carry)

    def protection(self, window: Window) -> Tensor:
        share = min(int(window.keep * self.recent_share), window.keep - self.sinks)
        recent = max(self.recent, LEAST_RECENT, share)
        edges = self._edges(window, self.sinks, recent)
        room = window.keep - self.sinks - recent
        ends = min(int(window.keep * self.boundary_share), room // 4)
        if ends <= 0:
            return edges
        opening = window.prompt()
        positions = window.positions
        head, tail = positions < ends, (positions >= opening - ends) & (positions < opening)
        return head | tail | edges

    def _queries(self, window: Window) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ring entries to score with [U], newest first in each ring, their weights (sum 1), and their rings."""
        assert window.query_positions is not None
        where = window.query_positions.cpu().numpy()
        of_entry = np.repeat(np.arange(len(self.samplers)), [sampler.capacity for sampler in self.samplers])
        held = [np.flatnonzero((of_entry == ring) & (where >= 0)) for ring in range(len(self.samplers))]
        counts = _share_out(np.array([len(part) for part in held]), self.score_queries or len(where))
        chosen = [_spread(part[np.argsort(-where[part])], count) for part, count in zip(held, counts, strict=True)]
        entries = np.concatenate(chosen)
        if not len(entries):
            return entries, np.empty(0, np.float32), entries
        rings = of_entry[entries]
        weights = np.full(len(entries), 1 / len(entries))
        if self.transition_mix and window.labels is not None:
            shares = expected_shares(window.labels.cpu().numpy(), self.ring_table(), len(self.samplers)) * (counts > 0)
            expected = (shares / max(shares.sum(), 1e-9) / np.maximum(counts, 1))[rings]
            weights = (1 - self.transition_mix) * weights + self.transition_mix * expected
        return entries, weights.astype(np.float32), rings

    def _mass(self, window: Window, entries: np.ndarray, weights: np.ndarray) -> Tensor:
        """[L, Hkv, N] fp32 weighted attention mass under some ring entries, not pooled."""
        device = window.device
        if not len(entries):
            return torch.zeros(window.positions.shape, device=device)
        queries = window.queries.index_select(1, torch.from_numpy(entries).to(device, non_blocking=True))
        if self.heads_per_query:
            queries = _taking_turns(queries, window.positions.shape[1], self.heads_per_query)
        return score.attention_mass_layers(
            queries,
            torch.ones(len(entries), dtype=torch.bool, device=device),
            window.k_buffers,
            window.slots,
            scale=window.scale,
            pool=0,
            weights=torch.from_numpy(weights).to(device, non_blocking=True),
            backend=window.backend,
        )

    def _remember(self, window: Window, act: Tensor, entries: np.ndarray) -> Tensor:
        """The note of every entry: a decayed sum over rounds of the action queries' attention."""
        assert window.query_positions is not None
        noted = torch.zeros_like(act) if window.carry is None else window.carry
        new_round = bool((window.query_positions.cpu().numpy()[entries] >= window.since).any())
        return 2.0**-self.action_decay * noted + act if new_round else torch.maximum(noted, act)

    def _by_value(self, window: Window, mass: Tensor) -> Tensor:
        if not self.value_power:
            return mass
        norms = torch.stack([_norms(buffer, window.slots) for buffer in window.v_buffers])
        weighed = mass * norms**self.value_power
        first = int((1 - self.value_share) * (window.keep - self.sinks - self.recent))
        return _boost(weighed, _ranks(mass) < first) if first > 0 else weighed

    def _less_redundant(self, window: Window, mass: Tensor) -> Tensor:
        repeats = redundancy.redundancy(window.k_buffers, window.slots, backend=window.backend)
        think = window.entry_labels() == Label.THINK
        mixed = (1 - self.think_redundancy) * mass - self.think_redundancy * repeats
        return torch.where(think, mixed, mass)

    def _favour(self, window: Window, scores: Tensor) -> Tensor:
        """Lifts the floor of every span, and what is best in a tool result that was not read yet, over the rest."""
        if not (self.span_floor or self.fresh_tool_share):
            return scores
        assert window.labels is not None
        labels = window.labels.cpu().numpy()
        lifted = torch.zeros_like(scores, dtype=torch.bool)
        if self.span_floor:
            spans = np.cumsum(np.concatenate(([0], labels[1:] != labels[:-1])))
            of_entry = torch.from_numpy(spans).to(window.device)[window.positions.to(torch.int64)]
            lifted |= _ranks_within(scores, of_entry) < self.span_floor
        if self.fresh_tool_share:
            first, last = _fresh_tool(labels, self.fresh_tool_tokens)
            inside = (window.positions >= first) & (window.positions < last)
            best = _ranks(torch.where(inside, scores, -torch.inf)) < int(self.fresh_tool_share * window.keep)
            lifted |= inside & best
        return _boost(scores, lifted)


def _taking_turns(queries: Tensor, kv_heads: int, heads: int) -> Tensor:
    """`heads` of each group's heads per query [L, U, Hkv * heads, D]: the next ones for every further query."""
    layers, count, total, dim = queries.shape
    group = total // kv_heads
    if heads >= group:
        return queries
    first = heads * torch.arange(count, device=queries.device)[:, None]
    chosen = (first + torch.arange(heads, device=queries.device)) % group  # [U, heads]
    index = chosen[None, :, None, :, None].expand(layers, -1, kv_heads, -1, dim)
    return queries.view(layers, count, kv_heads, group, dim).gather(3, index).flatten(2, 3)


def _share_out(held: np.ndarray, total: int) -> np.ndarray:
    """[rings] how many queries of each ring are scored with: as even as what is held allows, at most `total`."""
    counts = np.zeros_like(held)
    while counts.sum() < min(total, held.sum()):
        open_rings = np.flatnonzero(counts < held)
        for ring in open_rings[np.argsort(counts[open_rings], kind="stable")]:
            if counts.sum() < total:
                counts[ring] += 1
    return counts


def _spread(newest_first: np.ndarray, count: int) -> np.ndarray:
    """`count` of a ring's entries: half the newest, half evenly over the older ones."""
    if count >= len(newest_first):
        return newest_first
    near = count - count // 2
    older = newest_first[near:]
    places = np.linspace(0, len(older) - 1, count - near).round().astype(int)
    return np.concatenate([newest_first[:near], older[places]])


def _norms(buffer: Tensor, slots: Tensor) -> Tensor:
    """[Hkv, N] fp32 norm of each value."""
    norms: Tensor = torch.linalg.vector_norm(buffer.index_select(0, slots).float(), dim=-1)
    return norms.t()


def _ranks(scores: Tensor) -> Tensor:
    """[..., N] int64 rank of each entry, 0 = the highest score; among equals the first one."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, places)


def _ranks_within(scores: Tensor, groups: Tensor) -> Tensor:
    """[..., N] int64 rank of each entry among those of its group. groups: [..., N] int64."""
    by_score = scores.argsort(dim=-1, descending=True, stable=True)
    by_group = groups.gather(-1, by_score).argsort(dim=-1, stable=True)
    order = by_score.gather(-1, by_group)  # grouped, best first
    sorted_groups = groups.gather(-1, order)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    begins = torch.ones_like(sorted_groups, dtype=torch.bool)
    begins[..., 1:] = sorted_groups[..., 1:] != sorted_groups[..., :-1]
    first = torch.where(begins, places, 0).cummax(-1).values
    return torch.empty_like(order).scatter(-1, order, places - first)


def _boost(scores: Tensor, chosen: Tensor) -> Tensor:
    """The chosen entries above all others, the order on either side as it was."""
    low, high = scores.aminmax(dim=-1, keepdim=True)
    return torch.where(chosen, scores + (high - low) + 1, scores)


def _fresh_tool(labels: np.ndarray, tokens: int) -> tuple[int, int]:
    """[first, last) of the newest tool result, if fewer than `tokens` tokens were sampled after it; else (0, 0)."""
    tool = np.flatnonzero(labels == Label.TOOL)
    if not len(tool):
        return 0, 0
    last = int(tool[-1]) + 1
    if np.isin(labels[last:], (Label.THINK, Label.ACT, Label.SAY)).sum() >= tokens:
        return 0, 0
    before = np.flatnonzero(labels[:last] != Label.TOOL)
    return (int(before[-1]) + 1 if len(before) else 0), last
