"""What the agents do: sessions of turns with stated lengths, out of real transcripts, the same for every setting."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentkv_serve.demo.recording import RECORDING, Recording, load_recording
from agentkv_serve.phase_tagger import Label, Vocabulary

PIECE = 64  # tokens of transcript that stay together when they are shuffled


@dataclass(frozen=True)
class Turn:
    """The tokens that a turn adds to its session, their labels, the tokens sampled after them, the pause before it."""

    ids: tuple[int, ...]
    runs: tuple[tuple[int, Label], ...]  # (count, label) of the new tokens, in order
    output: int
    pause_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Agents' sessions.

    Either a closed loop (`concurrency` requests are always in flight; a session whose turn has ended goes to the back
    of the line, as its tool runs meanwhile), or sessions that arrive by a Poisson process of `rate` a minute. The
    lengths are tokens; with `trace` the turns' own lengths are those of a recorded run.
    """

    seed: int = 7
    sessions: int = 9
    turns: int = 5
    prompt: int = 3000
    tool: int = 400
    output: int = 48
    concurrency: int = 3
    rate: float | None = None
    pause_s: float = 0.0  # mean of an exponential distribution
    trace: Path | None = None

    def plan(self, vocabulary: Vocabulary) -> list[list[Turn]]:
        """Every session's turns; the same for the same seed. No two sessions share a prefix."""
        if self.trace is not None:
            recording = load_recording(self.trace)
            return [self._recorded(vocabulary, recording, number) for number in range(self.sessions)]
        text = _tokens(vocabulary, load_recording(RECORDING))
        return [self._synthetic(vocabulary, text, number) for number in range(self.sessions)]

    def _synthetic(self, vocabulary: Vocabulary, text: Sequence[int], number: int) -> list[Turn]:
        draw = random.Random(f"{self.seed}/{number}")
        head = _encode(vocabulary, f"Session {number} of run {self.seed}.\n")
        quarter = self.prompt // 4
        runs = ((quarter, Label.INPUT), (self.prompt - 2 * quarter, Label.TOOL), (quarter, Label.INPUT))
        turns = [Turn(tuple(_shuffled(text, self.prompt, draw, head)), runs, self.output)]
        for _ in range(self.turns - 1):
            ids = tuple(_shuffled(text, self.tool, draw))
            turns.append(Turn(ids, ((self.tool, Label.TOOL),), self.output, self._pause(draw)))
        return turns

    def _recorded(self, vocabulary: Vocabulary, recording: Recording, number: int) -> list[Turn]:
        draw = random.Random(f"{self.seed}/{number}")
        head = _encode(vocabulary, f"Session {number} of run {self.seed}.\n")
        ids = (*head, *_encode(vocabulary, f"{recording.system}\n{recording.opening}\n"))
        label = Label.INPUT
        turns: list[Turn] = []
        for step in recording.steps[: self.turns]:
            said = "".join(f"{call.name} {call.arguments}" for call in step.calls)
            output = min(self.output, len(_encode(vocabulary, said))) if said else self.output
            turns.append(Turn(ids, ((len(ids), label),), output, self._pause(draw) if turns else 0.0))
            answer = "\n".join(call.result for call in step.calls) if step.calls else step.user
            if not answer:
                break
            ids, label = _encode(vocabulary, answer + "\n"), Label.TOOL if step.calls else Label.INPUT
        return turns

    def _pause(self, draw: random.Random) -> float:
        return draw.expovariate(1 / self.pause_s) if self.pause_s else 0.0

    def arrivals(self) -> list[float]:
        """Seconds at which the sessions begin; all zero in a closed loop."""
        if self.rate is None:
            return [0.0] * self.sessions
        draw, now, times = random.Random(f"{self.seed}/arrivals"), 0.0, []
        for _ in range(self.sessions):
            now += draw.expovariate(self.rate / 60)
            times.append(now)
        return times


def full_length(turns: Sequence[Turn]) -> int:
    """Tokens of a finished session, all of its sampled ones included."""
    return sum(len(turn.ids) + turn.output for turn in turns)


def _encode(vocabulary: Vocabulary, text: str) -> tuple[int, ...]:
    return tuple(vocabulary.encode(text)[0].tolist())


def _tokens(vocabulary: Vocabulary, recording: Recording) -> list[int]:
    parts = (recording.system, *(call.result for call in recording.calls))
    return [token for part in parts for token in _encode(vocabulary, part + "\n")]


def _shuffled(text: Sequence[int], count: int, draw: random.Random, head: Sequence[int] = ()) -> list[int]:
    """`count` tokens: `head`, then pieces of the text in random order."""
    ids = list(head)
    while len(ids) < count:
        start = draw.randrange(max(1, len(text) - PIECE))
        ids += text[start : start + PIECE]
    return ids[:count]
