"""Checks a session whose compactions are known from a record: did each sampled token follow from what was held?

Where many sessions share a server, the points of compaction depend on the others. The record says where they were and
what was kept; this replay holds exactly that and asks the Hugging Face model for every sampled token, in as few
forwards as there are compactions.
"""

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

    def keep(self, kept: torch.Tensor) -> None:
        """Drops everything but `kept`, which must all be held."""
        for order, layer in enumerate(sorted(self.keys)):
            index = torch.searchsorted(self.positions[layer], kept[order].contiguous())
            index = index.clamp(max=self.positions[layer].shape[1] - 1)
            if not torch.equal(self.positions[layer].gather(1, index), kept[order]):
                raise AssertionError(f"layer {layer}, length {self.length}: kept entries that were not held")
            self.positions[layer] = kept[order]
            for cache in (self.keys, self.values):
                rows = index[:, :, None].expand(-1, -1, cache[layer].shape[-1])
                cache[layer] = cache[layer].gather(1, rows)


def check_turn(held: Held, ids: Sequence[int], sampled: int, events: Sequence[Event]) -> Held:
    """Checks one turn and returns the session's state after it.

    ids: all tokens of the session at the turn's end, the last `sampled` of them sampled in this turn. `held`: the state
    before the turn (an empty one where the turn began afresh). A retraction in mid-turn shows as an event that starts
    from nothing; between the event before it and itself, tokens may follow from either state, first the old one, then
    the new one.
    """
    first = len(ids) - sampled  # position of the first sampled token
    end = len(ids) - 1  # the last sampled token is not computed
    for place, event in enumerate([*events, None]):
        if event is None:
            _expect(ids, first, held.length, held.feed(ids[held.length : end]))
            break
        restarted = event.old_start == 0 and any(where.shape[1] < held.length for where in held.positions.values())
        if not restarted:
            _expect(ids, first, held.length, held.feed(ids[held.length : event.length]))
        else:
            stop = event.length
            old = _hits(ids, first, held.length, held.feed(ids[held.length : stop]))
            begin = stop - len(old)
            held = Held(held.model)
            new = _hits(ids, first, 0, held.feed(ids[:stop]))[begin:]
            changes = [
                sum(not hit for hit in old[:cut]) + sum(not hit for hit in new[cut:]) for cut in range(len(old) + 1)
            ]
            if min(changes):
                raise AssertionError(f"event {place}: tokens before length {stop} follow from neither state")
        held.keep(event.kept)
    return held


def _hits(ids: Sequence[int], first: int, begin: int, greedy: Sequence[int]) -> list[bool]:
    """For each computed position: was the next token the model's choice? Prompt tokens need not be."""
    return [begin + place + 1 < first or ids[begin + place + 1] == token for place, token in enumerate(greedy)]


def _expect(ids: Sequence[int], first: int, begin: int, greedy: Sequence[int]) -> None:
    hits = _hits(ids, first, begin, greedy)
    if not all(hits):
        raise AssertionError(f"token {begin + hits.index(False) + 1} of {len(ids)} does not follow from what was held")
