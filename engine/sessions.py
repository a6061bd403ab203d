"""What a worker knows of its sessions: fencing epochs, and the compressed state of those that are live."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from agentkv_serve.engine.wire import Facts, TurnSpec, WireError

HISTORY = 128
"""Finished turns, and compactions, that a session remembers."""


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """What a turn was and left behind. `epoch` numbers it; `budget` 0 keeps everything."""

    epoch: int
    budget: int
    policy: str
    compactions: int
    facts: Facts


@dataclass(frozen=True, slots=True)
class Compaction:
    """One compression: tokens of the session at that time, and tokens held per layer and KV head around it."""

    epoch: int
    length: int
    before: int
    after: int


@dataclass(slots=True)
class KvState:
    """The compressed KV of one session. It lives and dies with the session's req_to_token row."""

    row: int
    slot: int  # session slot of the rings
    policy: str
    uncaptured: int = 0  # leading tokens whose queries were not kept: they came from the tree, or before the policy
    budget: int = 0  # in force under budget auto; 0 = none was chosen yet
    since: int = 0  # the session's length at its last compaction
    carry: Tensor | None = None  # [L, Hkv, K] what the policy noted of the kept entries
    labels: npt.NDArray[np.int8] | None = None  # of the tokens of finished turns, as their queries were captured
    start: int = 0  # first valid position of the row: [start, L) is the window
    kept: Tensor | None = None  # [L, Hkv, K] int32 logical positions of the window's first K entries

    def captured_labels(self, labels: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
        """[n] labels of a turn's tokens, those of earlier turns as they were when their queries were captured.

        A request may label old tokens anew; what stands in the rings does not change by that.
        """
        return labels if self.labels is None else np.concatenate([self.labels, labels[len(self.labels) :]])


@dataclass(slots=True)
class SessionRecord:
    """A session that this worker has seen. Without `kv` it is a tombstone: it only fences epochs."""

    key: str
    epoch: int
    last_used: float
    kv: KvState | None = None
    lost: str | None = None  # why the state is gone, for the next turn's reason
    running: str | None = None  # request id of the turn that is queued or running
    labels: npt.NDArray[np.int8] | None = None  # of all tokens of the last finished turn
    turns: deque[FinishedTurn] = field(default_factory=lambda: deque(maxlen=HISTORY))
    compactions: deque[Compaction] = field(default_factory=lambda: deque(maxlen=HISTORY))


class SessionTable:
    """Records by session key and, while they hold KV, by req_to_token row.

    The clock is handed in, so that tests need not wait.
    """

    def __init__(self, tombstone_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tombstone_seconds = tombstone_seconds
        self._clock = clock
        self._records: dict[str, SessionRecord] = {}
        self._by_row: dict[int, SessionRecord] = {}

    def __iter__(self) -> Iterator[SessionRecord]:
        return iter(self._records.values())

    def get(self, key: str) -> SessionRecord | None:
        """The record of a session, live or tombstone."""
        return self._records.get(key)

    def by_row(self, row: int | None) -> SessionRecord | None:
        """The record whose KV lies in a row."""
        return None if row is None else self._by_row.get(row)

    def fence(self, spec: TurnSpec) -> SessionRecord | None:
        """The record of a turn's session, if the turn is not behind it.

        Raises:
            WireError: `stale_epoch` when a later turn of the session was already seen.
        """
        record = self._records.get(spec.session)
        if record is not None and spec.epoch < record.epoch:
            raise WireError(
                "stale_epoch",
                f"epoch {spec.epoch} is behind {record.epoch}: another gateway process drives this session now",
            )
        return record

    def admit(self, spec: TurnSpec) -> SessionRecord:
        """Notes a turn's use of its session. Creates the record of an unseen session."""
        record = self._records.get(spec.session)
        if record is None:
            record = SessionRecord(spec.session, spec.epoch, self._clock())
            record.lost = "restarted" if spec.epoch > 0 else None
            self._records[spec.session] = record
        record.epoch = spec.epoch
        record.last_used = self._clock()
        return record

    def bind(self, record: SessionRecord, kv: KvState) -> None:
        """Gives a session its KV state."""
        record.kv = kv
        self._by_row[kv.row] = record

    def drop_row(self, row: int) -> KvState | None:
        """Forgets the KV state in a row that is being freed; the record stays as a tombstone."""
        record = self._by_row.pop(row, None)
        if record is None:
            return None
        kv, record.kv = record.kv, None
        if record.lost is None:
            record.lost = "aborted" if record.running else "evicted"
        return kv

    def close(self, key: str, reason: str | None = None) -> None:
        """Notes that a session's state was released; its epoch still fences.

        Args:
            reason: why, for the next turn's reply. None = it was closed: the next turn of this id starts clean.
        """
        record = self._records.get(key)
        if record is not None:
            record.lost, record.labels = reason, None
            if reason is None:
                record.turns.clear()
                record.compactions.clear()

    def sweep(self) -> None:
        """Drops tombstones that have outlived their time."""
        limit = self._clock() - self._tombstone_seconds
        for key in [r.key for r in self if r.kv is None and r.running is None and r.last_used < limit]:
            del self._records[key]
