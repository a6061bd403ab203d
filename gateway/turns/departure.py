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
    """Watches a connection once its request body was read. Use as an async context manager."""

    def __init__(self, receive: Callable[[], Awaitable[Message]]) -> None:
        self._receive = receive
        self._action: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._gone = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Departure:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    @property
    def gone(self) -> bool:
        """True once the client has left."""
        return self._gone.is_set()

    def then(self, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """What to do when the client leaves from now on."""
        self._action = action

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client leaves first: raises ClientGone then."""
        task, gone = asyncio.create_task(work), asyncio.create_task(self._gone.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGone
        finally:
            for unfinished in (task, gone):
                unfinished.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        if self._action:
            await self._action()
