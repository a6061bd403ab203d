"""Agent conversations in token ids, made from words or at random: what the tests send, turn by turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentkv_serve.phase_tagger import Label

Piece = tuple[Label, list[int]]


@dataclass(frozen=True)
class Step:
    """One turn: what is appended, in which state the model begins to speak, how much it may say."""

    pieces: list[Piece]
    initial: str
    max_tokens: int

    @property
    def ids(self) -> list[int]:
        return [number for _, ids in self.pieces for number in ids]


def random_steps(
    sizes: Sequence[int], max_tokens: Sequence[int], *, seed: int = 0, vocabulary: int = 256
) -> list[Step]:
    """Turns of random tokens; each turn's text runs through the labels that an agent's turn has, in blocks.

    Tokens stay below `vocabulary`, the control tokens are left out.
    """
    generator = random.Random(seed)
    cycle = [Label.INPUT, Label.THINK, Label.ACT, Label.TOOL, Label.SAY]
    steps = []
    for number, (size, room) in enumerate(zip(sizes, max_tokens, strict=True)):
        edges = sorted(generator.sample(range(1, size), min(4, size - 1)))
        pieces = [
            (cycle[(number + place) % len(cycle)], [generator.randrange(vocabulary) for _ in range(end - begin)])
            for place, (begin, end) in enumerate(zip([0, *edges], [*edges, size], strict=True))
        ]
        steps.append(Step(pieces, ("start", "think", "act", "say")[number % 4], room))
    return steps


NAMES = ("Ada", "Bela", "Chidi", "Dana", "Emre", "Farid", "Gita", "Hugo", "Ines", "Jonas", "Keiko", "Luis", "Mina")
CITIES = ("Lagos", "Oslo", "Lima", "Quito", "Delhi", "Turin", "Perth", "Kyoto", "Cairo", "Riga", "Leeds", "Porto")


def _records(generator: random.Random, count: int) -> str:
    return "\n".join(
        f"{generator.choice(NAMES)} booked flight {generator.randrange(100, 999)} from {generator.choice(CITIES)} "
        f"to {generator.choice(CITIES)} for {generator.randrange(40, 900)} dollars, day {generator.randrange(1, 365)}."
        for _ in range(count)
    )


def agent_steps(tokenizer: Any, *, rows: Sequence[int] = (20, 12, 8), room: int = 24, seed: int = 0) -> list[Step]:
    """A ChatML agent: system and user, then tool results and a last question, one turn each.

    `rows`: records in the prompt of each turn (about 23 tokens a record).
    """
    generator = random.Random(seed)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    steps = []
    for number, count in enumerate(rows):
        pieces: list[Piece] = []
        if number == 0:
            head = "<|im_start|>system\nYou are the desk clerk of an airline. Answer from the records.<|im_end|>\n"
            pieces += [
                (Label.INPUT, ids(head)),
                (Label.THINK, ids("The user will ask about bookings. First I read the records, then I answer.\n")),
                (Label.ACT, ids('{"name": "read_records", "arguments": {"from": 1, "to": 365}}\n')),
            ]
        else:
            pieces.append((Label.GLUE, ids("\n")))
        pieces += [
            (Label.GLUE, ids("<|im_start|>user\n")),
            (Label.TOOL, ids(_records(generator, count))),
            (
                Label.INPUT,
                ids(f"\nWho flew to {generator.choice(CITIES)}, and what did it cost? Tell the whole story."),
            ),
            (Label.GLUE, ids("<|im_end|>\n<|im_start|>assistant\n")),
        ]
        steps.append(Step(pieces, ("act", "think", "say")[number % 3], room))
    return steps
