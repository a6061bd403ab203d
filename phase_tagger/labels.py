"""Labels of tokens: six fine labels, the four phases of the cache policy, and runs of equal labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType


class Label(IntEnum):
    """Fine label of one token: what it is in the structure of an agent's transcript."""

    INPUT = 0  # system, developer and user text, tool schemas
    THINK = 1  # reasoning, with its markers
    ACT = 2  # tool calls, with their markers
    TOOL = 3  # tool results, with their wrappers
    SAY = 4  # the assistant's visible text
    GLUE = 5  # role headers, turn ends, empty think blocks that the template put in


class Phase(IntEnum):
    """Phase of the agent loop, as the cache policy counts it."""

    OTHERS = 0
    THINK = 1
    ACT = 2
    TOOL = 3


DEFAULT_FOLD: Mapping[Label, Phase] = MappingProxyType(
    {
        Label.INPUT: Phase.OTHERS,
        Label.THINK: Phase.THINK,
        Label.ACT: Phase.ACT,
        Label.TOOL: Phase.TOOL,
        Label.SAY: Phase.OTHERS,
        Label.GLUE: Phase.OTHERS,
    }
)

Run = tuple[int, int, Label]
"""`(start, end, label)`: the tokens `[start, end)` in absolute positions all have this label."""


class RunsError(ValueError):
    """Runs that do not cover exactly `[0, n)`, are out of order, or carry an unknown label."""


def fold(label: Label | int, table: Mapping[Label, Phase] = DEFAULT_FOLD) -> Phase:
    """Phase of a fine label under a fold table (default: visible text, input and glue count as others)."""
    return table[Label(label)]


def fold_table(say: Phase | str = Phase.OTHERS) -> dict[Label, Phase]:
    """The default fold table with visible text counted as `say` (a phase or its name)."""
    phase = Phase[say.upper()] if isinstance(say, str) else say
    return {**DEFAULT_FOLD, Label.SAY: phase}


def runs_of(labels: Sequence[Label | int], start: int = 0) -> list[Run]:
    """Runs of a label sequence whose first token stands at position `start`."""
    runs: list[Run] = []
    begin = 0
    for index in range(1, len(labels) + 1):
        if index == len(labels) or labels[index] != labels[begin]:
            runs.append((start + begin, start + index, Label(labels[begin])))
            begin = index
    return runs


def labels_of(runs: Iterable[Run]) -> list[Label]:
    """The label of every token that the runs cover, in order."""
    return [label for start, end, label in runs for _ in range(end - start)]


def extend_runs(runs: list[Run], more: Iterable[Run]) -> list[Run]:
    """Append runs that continue where `runs` end, merging equal neighbours. Mutates and returns `runs`."""
    for start, end, label in more:
        if runs and runs[-1][1] != start:
            raise RunsError(f"run starts at token {start}, the runs before it end at {runs[-1][1]}")
        if start == end:
            continue
        if runs and runs[-1][2] == label:
            runs[-1] = (runs[-1][0], end, label)
        else:
            runs.append((start, end, Label(label)))
    return runs


def shift_runs(runs: Iterable[Run], offset: int) -> list[Run]:
    """The same runs, `offset` tokens further."""
    return [(start + offset, end + offset, label) for start, end, label in runs]


def cut_runs(runs: Iterable[Run], length: int) -> list[Run]:
    """The part of the runs that lies in `[0, length)`."""
    return [(start, min(end, length), label) for start, end, label in runs if start < length]


def flatten_runs(runs: Iterable[Run]) -> list[int]:
    """`[start, end, label, start, end, label, …]`, the form that travels to the engine."""
    return [number for run in runs for number in (run[0], run[1], int(run[2]))]


def read_runs(flat: Sequence[int], length: int) -> list[Run]:
    """Inverse of `flatten_runs`, checked: the runs must cover exactly `[0, length)` in order.

    Raises `RunsError` that names the first fault.
    """
    if len(flat) % 3:
        raise RunsError(f"runs must be triples of start, end, label; got {len(flat)} numbers")
    runs: list[Run] = []
    for index in range(0, len(flat), 3):
        start, end, number = flat[index : index + 3]
        if number not in Label._value2member_map_:
            raise RunsError(f"unknown label {number} at token {start}; labels are 0 to {len(Label) - 1}")
        if end <= start:
            raise RunsError(f"empty or reversed run [{start}, {end})")
        extend_runs(runs, [(start, end, Label(number))])
    check_runs(runs, length)
    return runs


def check_runs(runs: Sequence[Run], length: int) -> None:
    """Raise `RunsError` unless the runs cover exactly `[0, length)`, in order and without gaps."""
    position = 0
    for start, end, _ in runs:
        if start != position or end <= start:
            raise RunsError(f"run [{start}, {end}) follows token {position}")
        position = end
    if position != length:
        raise RunsError(f"runs cover [0, {position}), the prompt has {length} tokens")


def count_labels(runs: Iterable[Run]) -> dict[Label, int]:
    """Number of tokens per label; every label is present."""
    counts = dict.fromkeys(Label, 0)
    for start, end, label in runs:
        counts[label] += end - start
    return counts
