"""Checks a session whose compactions are known from a record: did each sampled token follow from what was held?

Where many sessions share a server, the points of compaction depend on the others. The record says where they were and
what was kept; this replay holds exactly that and asks the Hugging Face model for every sampled token, in as few
forwards as there are compactions.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Event:
    """One recorded compaction. `old_start` 0 where nothing had been dropped before."""

    length: int
    old_start: int
    kept: torch.Tensor  # [layers, Hkv, K] positions


@dataclass
class Held:
    """Keys and values of one session, all heads the same number."""

    model: Any
    length: int = 0
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    positions: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        heads, new, _ = key.shape
        where = torch.arange(self.length, self.length + new).repeat(heads, 1)
        if layer in self.keys:
            key = torch.cat([self.keys[layer], key], dim=1)
            value = torch.cat([self.values[layer], value], dim=1)
            where = torch.cat([self.positions[layer], where], dim=1)
        self.keys[layer], self.values[layer], self.positions[layer] = key, value, where
        hidden = torch.ones(new, key.shape[1], dtype=torch.bool).triu(key.shape[1] - new + 1)
        group = query.shape[0] // heads
        logits = query @ key.repeat_interleave(group, 0).transpose(1, 2) * scale
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ value.repeat_interleave(group, 0)).transpose(0, 1)

    def feed(self, ids: Sequence[int]) -> list[int]:
        """Computes `ids` at the next positions -> the greedy token after each of them."""
        if not ids:
            return []
        positions = torch.arange(self.length, self.length + len(ids))[None]
        with torch.no_grad():
            output = self.model(
                input_ids=torch.tensor([list(ids)]), position_ids=positions, use_cache=False, memory=self
            )
        self.length += len(ids)
        return output.logits[0].argmax(-1).tolist()

    def _places(self, layer: int, kept: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(self.positions[layer], kept.contiguous()).clamp(
            max=self.positions[layer].shape[1] - 1
        )

    def holds(self, kept: torch.Tensor) -> bool:
        """Whether all of `kept` [layers, Hkv, K] is held."""
        return all(
            torch.equal(self.positions[layer].gather(1, self._places(layer, rows)), rows)
            for layer, rows in zip(sorted(self.keys), kept, strict=True)
        )

    def keep(self, kept: torch.Tensor) -> None:
        """Drops everything but `kept`, which must all be held."""
        for layer, rows in zip(sorted(self.keys), kept, strict=True):
            index = self._places(layer, rows)
            self.positions[layer] = rows
            for cache in (self.keys, self.values):
                picked = index[:, :, None].expand(-1, -1, cache[layer].shape[-1])
                cache[layer] = cache[layer].gather(1, picked)


def check_turn(held: Held, ids: Sequence[int], sampled: int, events: Sequence[Event]) -> Held:
    """Checks one turn and returns the session's state after it.

    ids: all tokens of the session at the turn's end, the last `sampled` of them sampled in this turn. `held`: the state
    before the turn (an empty one where the turn began afresh).
    """
    hits, after = _run(held, ids, sampled, events)
    if not all(hits):
        token = len(ids) - sampled + hits.index(False)
        raise AssertionError(f"token {token} of {len(ids)} does not follow from what was held")
    return after


def check_restarted(held: Held, ids: Sequence[int], sampled: int, events: Sequence[Event], kv_tokens: int) -> Held:
    """Checks a turn that began from nothing, perhaps in its middle and more than once, and returns the state after it.

    The record does not say when a retraction was. So each token must follow from one of the states that the session
    can have had, in their order: the one before the turn, then an empty one, compacted as recorded from some whole one
    on, and last an empty one that was never compacted.

    held: the state before the turn (an empty one where the turn began afresh). `kv_tokens`: entries held at the end.
    """
    restarts = [place for place, event in enumerate(events) if event.old_start == 0]
    paths = [_run(held, ids, sampled, events, strict=False)]
    for place in (*restarts, len(events)):
        paths.append(_run(Held(held.model), ids, sampled, events[place:], strict=False))
    misses = [0] * len(paths)  # the fewest of the tokens so far, if the last of them followed from this path or before
    for token in range(sampled):
        for number, (hits, _) in enumerate(paths):
            earlier = misses[number - 1] if number else len(ids)
            misses[number] = min(earlier, misses[number] + (not hits[token]))
    ends = [
        after for (_, after), missed in zip(paths, misses, strict=True) if not missed and _entries(after) == kv_tokens
    ]
    if not ends:
        raise AssertionError(f"tokens of {len(ids)} follow from none of {len(paths)} states: {misses} misses")
    return ends[0]


def _run(
    held: Held, ids: Sequence[int], sampled: int, events: Sequence[Event], *, strict: bool = True
) -> tuple[list[bool], Held]:
    """For each sampled token: was it the model's choice, if the session went on from `held` with these compactions?

    A compaction that cannot follow from what is held is an error; if not `strict`, it and those after it belong to
    another state, and the run goes on without them.
    """
    held = dataclasses.replace(held, keys={**held.keys}, values={**held.values}, positions={**held.positions})
    first, end = len(ids) - sampled, len(ids) - 1  # the last sampled token is not computed
    said: dict[int, int] = {}

    def feed(stop: int) -> None:
        begin = held.length
        for place, token in enumerate(held.feed(ids[begin:stop]), begin + 1):
            said[place] = token

    for event in events:
        if event.length >= held.length:
            feed(event.length)
        if event.length != held.length or not held.holds(event.kept):
            if strict:
                raise AssertionError(f"length {held.length}: a compaction at {event.length} kept what was not held")
            break
        held.keep(event.kept)
    feed(end)
    return [said.get(place) == ids[place] for place in range(first, len(ids))], held


def _entries(held: Held) -> int:
    return next(iter(held.positions.values())).shape[1]
