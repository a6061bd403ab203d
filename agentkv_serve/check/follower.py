"""Lays an engine's session beside the independent run, turn by turn."""

from __future__ import annotations

from typing import Any

import torch

from agentkv_serve.check.independent import Session
from agentkv_serve.check.talk import Reply, Talk


class Follower:
    """Goes through a session with the independent run and notes where the two differ."""

    def __init__(self, model: Any, talk: Talk) -> None:
        self._model, self._talk = model, talk
        self._session = Session(model)
        self._device = next(model.parameters()).device
        self._equal = self._entries = self.tokens = self.compactions = 0
        self.gap = self.error = 0.0

    @property
    def share(self) -> float:
        """Kept (layer, KV head, token) entries that both keep."""
        return self._equal / max(1, self._entries)

    def follow(self, reply: Reply) -> None:
        """One turn that was just played. Where the engine began afresh, so does the independent run."""
        if reply.facts["state"] != "resumed":
            self._session = Session(self._model)
        session, ids = self._session, self._talk.ids
        for dump in reply.dumps:
            self._feed(dump.length, len(ids) - len(reply.output_ids))
            self._compare_queries(dump.queries.to(self._device), dump.valid.to(self._device))
            theirs, mine = dump.kept.to(self._device), session.chosen(dump.kept.shape[-1])
            both = torch.cat([theirs, mine], dim=-1).sort(dim=-1).values
            self._equal += int((both[..., 1:] == both[..., :-1]).sum())
            self._entries += theirs.numel()
            self.compactions += 1
            session.keep(theirs)
        self._feed(len(ids) - 1, len(ids) - len(reply.output_ids))

    def _feed(self, end: int, sampled: int) -> None:
        """Computes up to `end`; the tokens from position `sampled` on are the engine's own."""
        session, ids = self._session, self._talk.ids
        begin = session.length
        logits = session.feed(ids[begin:end], self._talk.phases()[begin:end])
        first = max(begin, sampled - 1)
        if first < end:
            mine = logits[first - begin :]
            theirs = mine.gather(1, torch.tensor(ids[first + 1 : end + 1], device=mine.device)[:, None])[:, 0]
            self.gap = max(self.gap, float((mine.amax(-1) - theirs).max()))
            self.tokens += end - first

    def _compare_queries(self, theirs: torch.Tensor, valid: torch.Tensor) -> None:
        """A ring may be stored from any of its places: each query is laid beside the nearest of the other side."""
        for order, layer in enumerate(sorted(self._session.queries)):
            for phase, ring in enumerate(self._session.queries[layer]):
                held = theirs[order, phase][valid[phase]].flatten(1)
                if len(held) != len(ring):
                    self.error = float("inf")
                elif ring:
                    mine = torch.stack(ring).flatten(1)
                    distance, place = torch.cdist(held, mine).min(1)
                    once = len(set(place.tolist())) == len(ring)
                    worst = float((distance / mine[place].norm(dim=1)).max()) if once else float("inf")
                    self.error = max(self.error, worst)
