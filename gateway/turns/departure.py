"""Notices that the client has gone, in every stage of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from starlette.types import Message

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


class Departure:
    """Watches a connection once its request body was read. Use as an async context manager. `gone`: the client left."""

    def __init__(self, receive: Callable[[], Awaitable[Message]]) -> None:
        self.gone = False
        self._receive = receive
        self._action: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._cancels: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Departure:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher:
            self._watcher.cancel()
            if self.gone:
                await asyncio.gather(self._watcher, return_exceptions=True)

    def then(self, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """What to do when the client leaves from now on."""
        self._action = action

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when the client leaves first: raises ClientGone then."""
        self._cancels = asyncio.current_task()
        try:
            return await work
        except asyncio.CancelledError:
            if self._cancels is None or not self.gone or self._cancels.cancelling() > 1:
                raise
            self._cancels.uncancel()
            raise ClientGone from None
        finally:
            self._cancels = None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._cancels:
            self._cancels.cancel()
        elif self._action:
            await self._action()
