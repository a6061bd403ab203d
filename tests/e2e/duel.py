"""The server and the independent replay play the same conversation; what each did is laid side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import PHASES, Replay, Turn
from server import Conversation, Reply
from transcripts import Step

from agentkv_serve.phase_tagger import Automaton, Label, build_automaton, fold


@dataclass(frozen=True)
class Dump:
    """What the engine wrote at a compaction, or at the end of a turn (then nothing is `kept`)."""

    length: int
    queries: torch.Tensor  # [layers, phases, q, Hq, D]
    valid: torch.Tensor  # [phases, q]
    old_start: int = -1
    start: int = -1
    kept: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [layers, Hkv, K] positions


def read_dumps(folder: Path, key: str, kind: str = "") -> list[Dump]:
    """The compactions of one session in order; with kind "ring-", what its rings held at the end of each turn."""
    found = []
    for path in sorted(folder.glob(f"{kind}[0-9]*-{key[:16]}.npz")):
        with np.load(path) as data:
            common = (int(data["length"]), torch.from_numpy(data["queries"]), torch.from_numpy(data["valid"]))
            if kind:
                found.append(Dump(*common))
                continue
            kept = torch.from_numpy(data["kept"]).long()
            found.append(Dump(*common, int(data["old_start"]), int(data["start"]), kept))
    return found


@dataclass(frozen=True)
class Round:
    """One turn on both sides."""

    reply: Reply
    turn: Turn
    dumps: list[Dump]


@dataclass
class Duel:
    """A session on the server and its replay."""

    conversation: Conversation
    replay: Replay
    automaton: Automaton
    stop: frozenset[int] = frozenset()
    rounds: list[Round] = field(default_factory=list)

    def play(self, step: Step, *, follow: bool = True, **more: Any) -> Round:
        """One turn on both sides. Where the server says that it began afresh, the replay does so too.

        `follow`: check each keep-set against the server's, and adopt its choice among equal scores.
        """
        for label, ids in step.pieces:
            self.conversation.extend(ids, label)
        prompt, labels = list(self.conversation.ids), list(self.conversation.labels)
        seen = len(self._dumps())
        initial = self.automaton.initial[step.initial]
        reply = self.conversation.send(
            step.max_tokens, step.initial, ignore_eos=not self.stop, logprobs=True, top_logprobs=2, **more
        )
        sampled, _ = self.automaton.run(initial, reply.output_ids)
        self.conversation.labels[len(labels) :] = sampled
        dumps = self._dumps()[seen:]
        fresh = reply.facts["state"] != "resumed"
        if fresh:
            self.replay = type(self.replay)(self.replay.model, self.replay.settings)
        turn = self.replay.turn(
            prompt,
            phases(labels),
            lambda output: phases(self.automaton.run(initial, output)[0])[-1],
            step.max_tokens,
            stop=self.stop,
            cached=reply.cached if fresh else 0,
            follow=[dump.kept for dump in dumps] if follow else None,
            given=more.get("agentkv", {}).get("force_ids", ()),
        )
        self.rounds.append(Round(reply, turn, dumps))
        return self.rounds[-1]

    def __enter__(self) -> Duel:
        return self

    def __exit__(self, *_: object) -> None:
        self.conversation.close()

    def set_budget(self, budget: int) -> None:
        """From the next turn on."""
        self.conversation.budget = budget
        self.replay.settings = replace(self.replay.settings, budget=budget)

    def branch(self, length: int) -> None:
        """Cuts the conversation after `length` tokens, as a client does that edits its history."""
        del self.conversation.ids[length:], self.conversation.labels[length:]

    def rings(self) -> Dump:
        """What the engine's rings held at the end of the last turn."""
        return read_dumps(self.conversation.server.dumps, self.conversation.key, "ring-")[-1]

    def expected_rings(self) -> list[torch.Tensor]:
        """Per phase [layers, U, Hq, D], from the replay."""
        rings = self.replay.rings
        sizes = [len(positions) for positions in rings.positions(min(rings.entries))]
        return list(torch.stack([rings.queries(layer) for layer in sorted(rings.entries)]).split(sizes, dim=1))

    def _dumps(self) -> list[Dump]:
        return read_dumps(self.conversation.server.dumps, self.conversation.key)


def phases(labels: Sequence[Label]) -> list[int]:
    return [int(fold(label)) for label in labels]


def automaton_for(family: str, tokenizer: Any) -> Automaton:
    return build_automaton(family, tokenizer)


def assert_same_turn(one: Round) -> None:
    """Same tokens, same log-probabilities, compactions at the same lengths."""
    assert one.reply.output_ids == one.turn.output_ids
    ours = torch.log_softmax(one.turn.logits, dim=-1)
    for row, token, theirs in zip(ours, one.turn.output_ids, one.reply.logprobs, strict=True):
        assert abs(float(row[token]) - theirs) < 1e-3
    facts = one.reply.facts
    assert facts["held"] == one.turn.held
    assert facts["evicted"] + facts["held"] == facts["logical"] - 1
    assert facts["phases"] == pytest.approx(one.turn.phases, abs=1e-3)
    assert [(dump.length, dump.start) for dump in one.dumps] == [
        (compaction.length, compaction.start) for compaction in one.turn.compactions
    ]


def assert_same_queries(one: Round, tolerance: float = 1e-4) -> dict[str, int]:
    """The engine's rings at each compaction hold exactly the model's own queries. -> how many, per phase."""
    count = dict.fromkeys(PHASES, 0)
    for dump, compaction in zip(one.dumps, one.turn.compactions, strict=True):
        sizes = [len(positions) for positions in compaction.query_positions]
        assert_same_rings(dump, compaction.queries.split(sizes, dim=1), tolerance)
        for phase, size in zip(PHASES, sizes, strict=True):
            count[phase] += size
    return count


def assert_same_rings(dump: Dump, expected: Sequence[torch.Tensor], tolerance: float = 1e-4) -> None:
    """expected: per phase [layers, U, Hq, D]. A ring may be stored from any of its places: the nearest are paired."""
    for number, (phase, mine) in enumerate(zip(PHASES, expected, strict=True)):
        theirs = dump.queries[:, number][:, dump.valid[number]]
        assert theirs.shape == mine.shape, f"{phase}: {theirs.shape[1]} queries held, {mine.shape[1]} expected"
        if not mine.shape[1]:
            continue
        assert (theirs.flatten(2).norm(dim=-1) > 0).all()
        apart = (theirs[:, :, None] - mine[:, None]).flatten(3).norm(dim=-1) / mine.flatten(2).norm(dim=-1)[:, None]
        pairing = apart[0].argmin(dim=1)
        assert sorted(pairing.tolist()) == list(range(mine.shape[1])), f"{phase}: not a one-to-one pairing"
        worst = apart[:, torch.arange(mine.shape[1]), pairing].max()
        assert worst < tolerance, f"{phase}: relative error {worst:.1e}"
