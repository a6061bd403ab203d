"""The decode automata of a worker as one device table, so that a step needs no word from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentkv_serve.phase_tagger import Automaton, build_automaton, get_family


class AutomatonBank:
    """Automata by family name; their states share one numbering, so that a batch may mix families."""

    def __init__(self, tokenizer: Any, device: torch.device) -> None:
        self._tokenizer = tokenizer
        self._device = device
        self._automata: dict[str, tuple[Automaton, int]] = {}
        self.next: Tensor = torch.zeros((1, 1), dtype=torch.int16, device=device)
        self.label: Tensor = torch.zeros((1, 1), dtype=torch.int8, device=device)

    def initial(self, family: str, state: str) -> int:
        """Number of a family's initial state; builds the family's tables on first use.

        Raises:
            KeyError: an unknown family or state; the message lists the known ones.
        """
        automaton, base = self._get(family)
        return base + automaton.initial[state]

    def run(self, family: str, state: int, ids: Sequence[int]) -> tuple[npt.NDArray[np.int8], int]:
        """Labels of sampled ids and the state after them, on the host (same tables as on the device)."""
        automaton, base = self._get(family)
        labels, after = automaton.run(state - base, ids)
        return np.asarray(labels, dtype=np.int8), base + after

    def _get(self, family: str) -> tuple[Automaton, int]:
        if family not in self._automata:
            automaton = build_automaton(get_family(family), self._tokenizer)
            base = sum(len(known.next) for known, _ in self._automata.values())
            self._automata[family] = (automaton, base)
            parts = self._automata.values()
            vocabulary = max(known.next.shape[1] for known, _ in parts)
            self.next = self._stack([known.next + start for known, start in parts], vocabulary)
            self.label = self._stack([known.label for known, _ in parts], vocabulary)
        return self._automata[family]

    def _stack(self, tables: list[npt.NDArray[Any]], vocabulary: int) -> Tensor:
        if any(table.shape[1] != vocabulary for table in tables):
            raise ValueError("automata of one model must share its vocabulary")
        return torch.from_numpy(np.concatenate(tables)).to(self._device)
