"""The store of sessions: what every back end must do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentkv_serve.gateway.sessions.session import Session

Mark = bytes  # a chained digest, or a tool-call id behind CALL_MARK
CALL_MARK = b"call:"


class SessionBusy(Exception):
    """Another turn holds the session's lease and did not end within the allowed wait."""


class LeaseLost(Exception):
    """The lease ended before its turn did: another turn has gone on with the session."""


class StoreDown(Exception):
    """The shared store does not answer."""


class TooManySessions(Exception):
    """The tenant has reached its number of sessions and none of them is idle."""


@dataclass(slots=True)
class Lease:
    """The right to run one turn. `session` is the caller's own copy; `epoch` numbers the turn in the engine; `local`
    leases were given by this process alone, while the shared store was down."""

    session: Session
    epoch: int
    token: str
    local: bool = False


class SessionStore(Protocol):
    """Sessions by key, at most one running turn each."""

    @property
    def degraded(self) -> bool:
        """True while sessions are not shared with other gateway processes although they should be."""

    async def open(self) -> None:
        """Begin what goes on beside requests. Needed before the first use."""

    async def close(self) -> None:
        """Let go of connections."""

    async def peek(self, key: str) -> tuple[Session | None, bool]:
        """The session (not to be changed) and whether a turn of it is running."""

    async def claim(self, fresh: Session, wait: float, limit: int) -> Lease:
        """Lease the session of `fresh.key`, created from `fresh` when it does not exist, and count one more
        dispatched turn. Waits up to `wait` seconds for a running turn. Raises SessionBusy, TooManySessions
        (`limit` sessions of one tenant)."""

    async def bump(self, lease: Lease) -> None:
        """Count one more dispatch within the lease (a turn sent again to another worker). Raises LeaseLost."""

    async def commit(self, lease: Lease) -> None:
        """Write `lease.session` and end the lease. Raises LeaseLost, writing nothing."""

    async def release(self, lease: Lease, *, dispatched: bool) -> None:
        """End the lease without a new turn; `dispatched` False takes the counted turn back."""

    async def delete(self, key: str) -> Session | None:
        """Forget the session, whatever runs; returns what it was."""

    async def find(self, scope: str, marks: Sequence[Mark]) -> tuple[Mark, list[str]] | None:
        """The first of `marks` that sessions of `scope` have, with the keys of those sessions."""

    async def sessions(self, tenant: str) -> list[Session]:
        """All sessions of a tenant; their ledgers may be left out."""

    async def on_worker(self, worker: str) -> list[Session]:
        """All sessions whose state a worker holds; their ledgers may be left out."""

    async def count(self) -> int:
        """How many sessions there are."""

    async def resident(self, workers: Sequence[str]) -> Mapping[str, int]:
        """KV tokens that sessions hold on each of `workers`; may be half a second old."""

    async def keep(self, key: str, value: bytes, ttl: float) -> None:
        """Keep a value for `ttl` seconds. Only the newest values are sure to be kept."""

    async def recall(self, key: str) -> bytes | None:
        """A kept value."""

    async def discard(self, key: str) -> None:
        """Forget a kept value."""

    async def workers(self) -> dict[str, bytes] | None:
        """Workers that admin APIs added, by id; None: the shared store cannot be asked now."""

    async def set_worker(self, worker: str, entry: bytes | None) -> None:
        """Write or remove (None) such a worker. Raises StoreDown."""

    async def sweep(self) -> list[Session]:
        """Forget sessions that were idle for too long; returns them so that workers can be told."""
