"""A circuit breaker that filters the choice of a worker and counts how turns ended, streams included."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from agentkv_serve.gateway.settings import RoutingSettings


class Breaker:
    """Opens after `failures` failed turns within `window` seconds. After `rest` seconds it lets one turn through:
    its success closes the breaker, its failure opens it again."""

    def __init__(self, settings: RoutingSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._failed: deque[float] = deque()
        self._opened: float | None = None
        self._trying = False

    @property
    def state(self) -> str:
        """closed, open or half-open."""
        if self._opened is None:
            return "closed"
        rested = self._clock() - self._opened >= self._settings.breaker_rest
        return "half-open" if rested else "open"

    def allows(self) -> bool:
        """Whether the worker may be chosen now."""
        state = self.state
        return state == "closed" or (state == "half-open" and not self._trying)

    def chosen(self) -> None:
        """A turn goes to the worker."""
        self._trying = self._opened is not None

    def let_go(self) -> None:
        """A turn ended in a way that says nothing about the worker, such as a client that left."""
        self._trying = False

    def succeeded(self) -> None:
        """A turn ended well."""
        self._trying = False
        self._opened = None
        self._failed.clear()

    def failed(self) -> None:
        """A turn failed by the worker's fault."""
        now = self._clock()
        self._trying = False
        self._failed.append(now)
        while self._failed and self._failed[0] < now - self._settings.breaker_window:
            self._failed.popleft()
        if self._opened is not None or len(self._failed) >= self._settings.breaker_failures:
            self._opened = now
