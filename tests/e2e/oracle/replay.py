"""Replays the turns of one session exactly as the server must serve them (definition: the package's docstring)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .model import forward
from .policy import PHASES, Rings, agentkv_scores, keep_set, tie_gap


@dataclass(frozen=True)
class Settings:
    budget: int = 0  # entries per layer and KV head; 0 keeps everything
    page: int = 1
    chunk: int | None = None  # prefill chunk; None prefills in one piece
    interval: int = 128
    ring: int = 8
    sinks: int = 32
    recent: int = 32
    pool: int = 7


@dataclass(frozen=True)
class Compaction:
    """One compaction. Layers are counted over the layers with attention."""

    length: int
    start: int
    kept: torch.Tensor  # [layers, Hkv, K] positions
    candidates: torch.Tensor  # [layers, Hkv, n] positions
    scores: torch.Tensor  # [layers, Hkv, n]
    queries: torch.Tensor  # [layers, U, Hq, D]
    query_positions: list[list[int]]  # per phase, oldest first
    ties: int = 0  # entries taken from the other side because the scores do not tell them apart


@dataclass(frozen=True)
class Turn:
    output_ids: list[int]
    held: int
    margin: float  # the narrowest lead of a sampled token's logit over the runner-up
    logits: torch.Tensor  # [tokens, V]
    phases: dict[str, float]  # held entries of each phase, a mean over layers and KV heads
    compactions: list[Compaction]


def prefill_chunks(first: int, end: int, chunk: int | None, page: int) -> Iterator[tuple[int, int]]:
    """The [from, to) pieces in which SGLang prefills positions `first .. end-1` of a lone request."""
    if chunk is not None and -(-(end - first) // page) * page > chunk:
        cut = (first + chunk // page * page) // page * page
        yield first, cut
        first = cut
        while end - first > chunk:
            yield first, first + chunk
            first += chunk
    yield first, end


@dataclass
class Replay:
    """One session. Mutated by `turn`."""

    model: torch.nn.Module
    settings: Settings
    length: int = 0
    start: int = 0
    tokens: list[int] = field(default_factory=list)
    rings: Rings = field(default_factory=Rings)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [Hkv, n, D]
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    positions: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [Hkv, n]
    scales: dict[int, float] = field(default_factory=dict)
    phase_of: list[int] = field(default_factory=list)  # of every token with keys and values
    _captured: list[int] | None = None  # phases of the tokens now being computed; None: not captured

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """The model's attention step: appends to the cache, fills the rings, answers [T, Hq, D]."""
        heads, new, _ = key.shape
        where = torch.arange(self.length, self.length + new).repeat(heads, 1)
        self.scales[layer] = scale
        if layer in self.keys:
            key = torch.cat([self.keys[layer], key], dim=1)
            value = torch.cat([self.values[layer], value], dim=1)
            where = torch.cat([self.positions[layer], where], dim=1)
        self.keys[layer], self.values[layer], self.positions[layer] = key, value, where
        if self._captured is not None:
            for token, phase in enumerate(self._captured):
                self.rings.add(layer, self.ring_of(phase), self.length + token, query[:, token].clone())
        count = key.shape[1]
        hidden = torch.ones(new, count, dtype=torch.bool).triu(count - new + 1)
        group = query.shape[0] // heads
        logits = torch.einsum("htd,hnd->htn", query, key.repeat_interleave(group, dim=0)) * scale
        weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("htn,hnd->thd", weights, value.repeat_interleave(group, dim=0))

    def ring_of(self, phase: int) -> int:
        """Ring of a token's query."""
        return phase

    def scores(self, layer: int) -> torch.Tensor:
        """[Hkv, n] of the held entries of one layer."""
        return agentkv_scores(self.rings.queries(layer), self.keys[layer], self.scales[layer], self.settings.pool)

    def recent(self, keep: int) -> int:
        """Last entries that stay whatever their score."""
        return self.settings.recent

    def moved(self, layer: int, chosen: torch.Tensor) -> None:
        """The held entries of a layer are now those at `chosen` [Hkv, keep]."""

    def _feed(self, ids: list[int], phases: list[int], *, captured: bool = True) -> torch.Tensor:
        self.phase_of += phases
        self._captured = phases if captured else None
        logits = forward(self.model, ids, self.length, self)
        self.length += len(ids)
        return logits

    @property
    def held(self) -> int:
        return self.length - self.start

    def turn(
        self,
        input_ids: list[int],
        phases: list[int],
        phase_of_output: Callable[[list[int]], int],
        max_new_tokens: int,
        *,
        stop: frozenset[int] = frozenset(),
        cached: int = 0,
        follow: Iterable[torch.Tensor] | None = None,
        given: Sequence[int] = (),
    ) -> Turn:
        """One turn, greedily; the first tokens are `given` where there are some.

        `input_ids`: the whole conversation, of which this session has computed a prefix. `phases`: one per input
        token. `phase_of_output(output so far)`: phase of the newest output token. `cached`: tokens of a first prompt
        that came from the shared prefix tree. `follow`: the server's kept positions [layers, Hkv, K], compaction by
        compaction; where they differ from ours by a tie only, they are adopted so that the replay stays comparable.
        """
        if self.tokens[: self.length] != input_ids[: self.length]:
            raise ValueError("the turn does not continue this session")
        theirs = iter(follow) if follow is not None else None
        done: list[Compaction] = []
        if cached:
            self._feed(input_ids[:cached], phases[:cached], captured=False)
        logits = torch.empty(0)
        for first, end in prefill_chunks(self.length, len(input_ids), self.settings.chunk, self.settings.page):
            logits = self._feed(input_ids[first:end], phases[first:end])
            self._compact(0, done, theirs)
        output: list[int] = []
        seen: list[torch.Tensor] = []
        while True:
            seen.append(logits)
            output.append(given[len(output)] if len(output) < len(given) else int(logits.argmax()))
            if output[-1] in stop or len(output) == max_new_tokens:
                break
            logits = self._feed(output[-1:], [phase_of_output(output)])
            self._compact(self.settings.interval, done, theirs)
        self._compact(0, done, theirs)
        self.tokens = input_ids + output
        leads = [torch.topk(row, 2).values for row in seen]
        margin = min(float(a - b) for a, b in leads)
        return Turn(output, self.held, margin, torch.stack(seen), self._phase_counts(), done)

    def _phase_counts(self) -> dict[str, float]:
        of = torch.tensor(self.phase_of)
        counts = sum(torch.bincount(of[where.flatten()], minlength=len(PHASES)) for where in self.positions.values())
        heads = sum(where.shape[0] for where in self.positions.values())
        return {name: float(count) / heads for name, count in zip(PHASES, counts, strict=True)}

    def _compact(self, slack: int, done: list[Compaction], theirs: Iterator[torch.Tensor] | None) -> None:
        s = self.settings
        if not s.budget or self.held <= s.budget or self.held < s.budget + slack:
            return
        start = (self.length - s.budget) // s.page * s.page
        if start <= self.start:
            return
        keep = self.length - start
        adopted = next(theirs, None) if theirs is not None else None
        kept, candidates, all_scores, ties = [], [], [], 0
        for order, layer in enumerate(sorted(self.keys)):
            scores = self.scores(layer)
            chosen = keep_set(scores, self.positions[layer], keep, s.sinks, self.recent(keep))
            if adopted is not None:
                chosen, taken = self._adopt(layer, scores, chosen, adopted[order])
                ties += taken
            candidates.append(self.positions[layer])
            all_scores.append(scores)
            for cache in (self.keys, self.values):
                rows = chosen[:, :, None].expand(-1, -1, cache[layer].shape[-1])
                cache[layer] = cache[layer].gather(1, rows)
            self.positions[layer] = self.positions[layer].gather(1, chosen)
            self.moved(layer, chosen)
            kept.append(self.positions[layer])
        layers = sorted(self.keys)
        done.append(
            Compaction(
                self.length,
                start,
                torch.stack(kept),
                torch.stack(candidates),
                torch.stack(all_scores),
                torch.stack([self.rings.queries(layer) for layer in layers]),
                self.rings.positions(layers[0]) if layers[0] in self.rings.entries else [],
                ties,
            )
        )
        self.start = start

    def _adopt(
        self, layer: int, scores: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Where the other side kept other entries of the same score, keep those: (indices [Hkv, K], how many)."""
        chosen, ties = [], 0
        for head in range(mine.shape[0]):
            index = torch.searchsorted(self.positions[layer][head], theirs[head].long())
            held = self.positions[layer][head][index.clamp(max=self.positions[layer].shape[1] - 1)]
            distinct = bool((index.diff() > 0).all())
            if theirs.shape[1] != mine.shape[1] or not distinct or not torch.equal(held, theirs[head].long()):
                raise AssertionError(
                    f"layer {layer}, KV head {head}, length {self.length}: kept entries that were not held"
                )
            count, gap = tie_gap(scores[head], mine[head], index)
            if gap >= 1e-5:
                raise AssertionError(
                    f"layer {layer}, KV head {head}, length {self.length}: {count} entries differ, "
                    f"their scores {gap:.2e} apart"
                )
            ties += count
            chosen.append(index)
        return torch.stack(chosen), ties
