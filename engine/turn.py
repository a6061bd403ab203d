"""One running turn of a session, as the scheduler's hooks see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from agentkv_serve.engine.automata import AutomatonBank
from agentkv_serve.engine.policies import Policy
from agentkv_serve.engine.sessions import SessionRecord
from agentkv_serve.engine.state import Rings
from agentkv_serve.engine.wire import Facts, State, TurnSpec

ATTRIBUTE = "agentkv_turn"
"""Name under which a turn hangs on SGLang's `Req`."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A session as it was when its turn began. Valid until the turn's first compaction."""

    committed: int  # tokens with keys and values
    rings: Rings | None  # None: the session holds no query rings


@dataclass(frozen=True, slots=True)
class Forced:
    """Rows of a running batch whose next token is given."""

    rows: Tensor  # [F] int64
    ids: Tensor  # [F] int64


@dataclass(slots=True)
class Turn:
    """A request that belongs to one of our sessions."""

    spec: TurnSpec
    policy: Policy
    prompt: Any  # array("q") of the whole prompt's token ids
    initial: int  # automaton state before the first sampled token
    state: State = "new"
    reason: str | None = None
    prefill: int | None = None  # prompt tokens computed, known at the first extend
    checkpoint: Checkpoint | None = None  # where an abort rolls a resumed session back to
    launched: int = 0  # tokens whose forward was launched; under overlap ahead of the results that are known
    compactions: int = 0
    facts: Facts | None = None
    sampled: npt.NDArray[np.int8] = field(default_factory=lambda: np.empty(0, dtype=np.int8))
    automaton: int = 0  # state after the tokens in `sampled`

    def __post_init__(self) -> None:
        self.automaton = self.initial

    @property
    def compresses(self) -> bool:
        """Whether this turn's session may be compressed."""
        return self.policy.compresses and self.spec.budget > 0

    def budget(self, record: SessionRecord, floor: int) -> int:
        """The budget in force: the turn's own, or the one that budget auto chose last; before its first choice the
        smallest one, so that the choice is made once the session outgrows that."""
        if not self.spec.auto:
            return self.spec.budget
        chosen = record.kv.budget if record.kv is not None else 0
        return min(self.spec.budget, chosen or max(floor, self.policy.least_budget))

    def labels(self, output_ids: Any, automata: AutomatonBank) -> npt.NDArray[np.int8]:
        """[prompt + sampled] labels of all tokens so far; each sampled token is labelled once."""
        if len(self.sampled) > len(output_ids):  # the engine trimmed a finished turn's overshoot
            self.sampled, self.automaton = self.sampled[:0], self.initial
        fresh = list(output_ids[len(self.sampled) :])
        if fresh:
            labels, self.automaton = automata.run(self.spec.family, self.automaton, fresh)
            self.sampled = np.concatenate([self.sampled, labels])
        return np.concatenate([self.spec.labels, self.sampled])


def turn_of(req: Any) -> Turn | None:
    """The turn of a request, or None if it belongs to no session of ours."""
    return getattr(req, ATTRIBUTE, None)
