"""Which tokens of a ring keep their query: a pure function of how many tokens the ring has seen.

Place and content of every entry follow from counts alone, so the engine finds them on the device (no word from the
host during decode), the evaluation harness on the host, and both hold the same queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentkv_serve.phase_tagger import Label

KEEP_LAST = -1
"""In a ring table: a token of this label counts as what the token before it counted as."""
NO_RING = -2
"""In a ring table: queries of this label are not kept."""

_NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class Sampler:
    """Keeps the newest queries of a ring and, beside them, every `stride`-th one further back.

    Token number n (from 0) is a strided one if (n + 1) % stride == 0. The newest `strided` of those and the newest
    `newest` of the others are held, so no token is held twice. strided = 0 is a plain FIFO.
    """

    newest: int
    strided: int = 0
    stride: int = 8

    @property
    def capacity(self) -> int:
        """Entries of the ring."""
        return self.newest + self.strided

    @property
    def layout(self) -> tuple[int, int, int]:
        """(newest, strided, stride) as arithmetic on tensors wants them: no stride is a stride that never comes."""
        return (self.newest, self.strided, self.stride) if self.strided else (self.newest, 1, _NEVER)

    @property
    def reach(self) -> int:
        """How many of a ring's last tokens may be held."""
        newest, _, stride = self.layout
        return max(newest + newest // (stride - 1) + 1, self.strided * stride)

    def held(self, count: int) -> npt.NDArray[np.int64]:
        """[capacity] number of the token at each place after `count` tokens, -1 where the place is empty."""
        numbers = np.arange(max(0, count - self.reach), count)
        held = np.full(self.capacity, -1, dtype=np.int64)
        newest, strided, stride = self.layout
        on = (numbers + 1) % stride == 0
        places = np.where(on, newest + (numbers // stride) % strided, (numbers - (numbers + 1) // stride) % newest)
        held[places] = numbers  # ascending: the newest of those that share a place stays
        return held


def rings_of(labels: npt.NDArray[np.int8], table: tuple[int, ...], last: int = 0) -> npt.NDArray[np.int64]:
    """[n] ring of each token; labels that keep the last ring take the one of the token before (at first, `last`)."""
    rings = np.asarray(table, dtype=np.int64)[labels]
    known = rings != KEEP_LAST
    if known.all():
        return rings
    source = np.maximum.accumulate(np.where(known, np.arange(len(rings)), -1))
    return np.where(source >= 0, rings[source], last)


def entry_positions(
    labels: npt.NDArray[np.int8], samplers: tuple[Sampler, ...], table: tuple[int, ...], first: int = 0
) -> npt.NDArray[np.int64]:
    """[R] position of the token whose query stands at each ring entry after the tokens `labels`, -1 = empty.

    Tokens count from position `first` on; the queries of those before it were never seen. Entries of ring 0 come first,
    then those of ring 1, and so on. An entry that is not overwritten keeps its place: after a chunk of tokens, exactly
    the entries with a position inside it changed.
    """
    rings = rings_of(labels, table)[first:]
    parts = []
    for ring, sampler in enumerate(samplers):
        tokens = np.flatnonzero(rings == ring) + first
        held = sampler.held(len(tokens))
        parts.append(np.where(held >= 0, tokens[held] if len(tokens) else -1, -1))
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def entry_rings(samplers: tuple[Sampler, ...]) -> npt.NDArray[np.int64]:
    """[R] ring of each ring entry."""
    return np.repeat(np.arange(len(samplers)), [sampler.capacity for sampler in samplers])


def prompt_length(labels: npt.NDArray[np.int8]) -> int:
    """Tokens of the session's opening: system message, tool schemas and the first user message.

    From labels alone, so that a session that was rebuilt from its whole ledger has the same.
    """
    opening = (labels == Label.INPUT) | (labels == Label.GLUE)
    return int(len(labels) if opening.all() else opening.argmin())
