"""Labels of sampled tokens: a dense automaton over ids, exact for markers of one id and of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .families import get_family
from .families.family import Family
from .labels import Label
from .machine import LABEL_OF, SPACE, Machine, Mode, State, reachable
from .vocabulary import Vocabulary

INITIALS = ("start", "think", "say", "act")


@dataclass(frozen=True)
class Automaton:
    """Tables that label sampled tokens; a pure function of the initial state and the ids.

    next: int16 `[S, V]`, the state after token v was read in state s.
    label: int8 `[S, V]`, the fine label (`Label`) of that token.
    initial: state before the first sampled token, by name: "start", "think", "say", "act".
    modes: the mode name of every state, for display.
    """

    family: str
    next: npt.NDArray[np.int16]
    label: npt.NDArray[np.int8]
    initial: dict[str, int]
    modes: tuple[str, ...]

    @property
    def states(self) -> int:
        return int(self.next.shape[0])

    @property
    def vocabulary(self) -> int:
        return int(self.next.shape[1])

    def run(self, state: int, ids: Sequence[int]) -> tuple[list[Label], int]:
        """Labels of `ids` read from `state`, and the state after them.

        Ids beyond the table act as plain text.
        """
        labels: list[Label] = []
        last = self.vocabulary - 1
        for number in ids:
            column = min(int(number), last)
            labels.append(Label(int(self.label[state, column])))
            state = int(self.next[state, column])
        return labels, state

    def is_open(self, state: int) -> Label | None:
        """THINK or ACT when the turn stopped inside such a block, else None."""
        mode = Mode(self.modes[state])
        label = LABEL_OF[mode]
        return label if mode in (Mode.THINK, Mode.ACT) else None


def build_automaton(family: Family | str, tokenizer: object) -> Automaton:
    """Compile the family's machine against a vocabulary.

    `tokenizer`: a `Vocabulary` or anything that `Vocabulary` takes. The tables have one column per id and a
    last one that stands for plain text, so that larger embeddings can clamp to it.
    """
    family = get_family(family) if isinstance(family, str) else family
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
    machine = Machine(family, lambda marker: vocabulary.id_of(marker) is not None)
    markers = sorted({rule.marker for rule in machine.columns})
    starts = [machine.initial(name) for name in INITIALS]
    bytes_ = _byte_tables(machine, starts, markers)
    next_state, label = _compose(bytes_, vocabulary.token_bytes())
    for number in vocabulary.special:
        next_state[:, number], label[:, number] = bytes_.column_next[:, -1], bytes_.column_label[:, -1]
    for place, marker in enumerate(markers):
        column = vocabulary.id_of(marker)
        known = bytes_.column_label[:, place] >= 0
        next_state[known, column] = bytes_.column_next[known, place]
        label[known, column] = bytes_.column_label[known, place]
    initial = {name: bytes_.row[start] for name, start in zip(INITIALS, starts, strict=True)}
    return Automaton(family.name, next_state, label, initial, bytes_.modes)


@dataclass(frozen=True)
class _ByteTables:
    """The machine as tables over bytes `[S, 256]` and over columns `[S, markers + 1]`.

    The last column stands for the other control ids.

    `column_label` is -1 where the marker means nothing in that state.
    """

    next: npt.NDArray[np.int16]
    label: npt.NDArray[np.int8]
    owned: npt.NDArray[np.int16]
    column_next: npt.NDArray[np.int16]
    column_label: npt.NDArray[np.int8]
    modes: tuple[str, ...]
    row: dict[State, int]


def _byte_tables(machine: Machine, starts: list[State], markers: list[str]) -> _ByteTables:
    states = reachable(machine, starts, markers)
    index = {state: number for number, state in enumerate(states)}
    alphabet = sorted(set(machine.alphabet.values()))
    place = [alphabet.index(machine.alphabet[byte]) for byte in range(256)]
    steps = [[machine.byte(state, byte) for byte in alphabet] for state in states]
    nexts = np.array([[index[step.state] for step in row] for row in steps], np.int16)[:, place]
    label = np.array([[step.label for step in row] for row in steps], np.int8)[:, place]
    owned = np.array([[step.owned for step in row] for row in steps], np.int16)[:, place]
    skips = [machine.skip(state) for state in states]
    columns = [
        [machine.column(state, marker) or (state, -1) for marker in markers] + [skip]
        for state, skip in zip(states, skips, strict=True)
    ]
    column_next = np.array([[index[state] for state, _ in row] for row in columns], np.int16)
    column_label = np.array([[number for _, number in row] for row in columns], np.int8)

    # States that no input can tell apart are one state (Moore's partition refinement).
    kinds = np.array([list(Mode).index(state.mode) for state in states])
    fixed = np.concatenate([kinds[:, None], label, owned, column_label], axis=1)
    group = np.unique(fixed, axis=0, return_inverse=True)[1].reshape(-1)
    while True:
        seen = np.concatenate([group[:, None], group[nexts], group[column_next]], axis=1)
        finer = np.unique(seen, axis=0, return_inverse=True)[1].reshape(-1)
        if finer.max() == group.max():
            break
        group = finer
    first = np.unique(group, return_index=True)[1]
    return _ByteTables(
        next=group[nexts[first]].astype(np.int16),
        label=label[first],
        owned=owned[first],
        column_next=group[column_next[first]].astype(np.int16),
        column_label=column_label[first],
        modes=tuple(states[number].mode.value for number in first),
        row={state: int(group[number]) for state, number in index.items()},
    )


def _compose(tables: _ByteTables, tokens: list[bytes]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int8]]:
    """Run every token's bytes from every state, all states and tokens of a length at once.

    A token takes the label of its first byte that is not whitespace; a marker that the token completes labels
    the token when it covers that byte.
    """
    count = len(tables.modes)
    step_next, step_label, step_owned = (table.ravel() for table in (tables.next, tables.label, tables.owned))
    tokens = [*tokens, b"a"]  # the last column: plain text
    next_state = np.empty((count, len(tokens)), np.int16)
    label = np.empty((count, len(tokens)), np.int8)
    still = np.array([LABEL_OF[Mode(mode)] for mode in tables.modes], np.int8)
    by_length: dict[int, list[int]] = {}
    for number, token in enumerate(tokens):
        by_length.setdefault(len(token), []).append(number)
    for length, numbers in by_length.items():
        for chunk in np.array_split(np.array(numbers), 1 + len(numbers) // 8192):
            if length == 0:
                next_state[:, chunk] = np.arange(count, dtype=np.int16)[:, None]
                label[:, chunk] = still[:, None]
                continue
            read = np.frombuffer(b"".join(tokens[number] for number in chunk), np.uint8).reshape(-1, length)
            space = np.isin(read, list(SPACE))
            first = np.where(space.all(axis=1), 0, space.argmin(axis=1))  # byte that decides, `[tokens]`
            state = np.repeat(np.arange(count, dtype=np.int16)[:, None], len(chunk), axis=1)
            chosen = np.zeros((count, len(chunk)), np.int8)
            for position in range(length):
                step = state.astype(np.int32) * 256 + read[:, position]
                deciding = np.flatnonzero(first == position)
                chosen[:, deciding] = step_label[step[:, deciding]]
                owned = step_owned[step]
                rows, columns = np.nonzero(owned)  # few: where a marker is complete
                covers = (position > first[columns]) & (position - owned[rows, columns] < first[columns])
                rows, columns = rows[covers], columns[covers]
                chosen[rows, columns] = step_label[step[rows, columns]]
                state = step_next[step]
            next_state[:, chunk], label[:, chunk] = state, chosen
    return next_state, label
