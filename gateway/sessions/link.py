"""One connection to Redis or Valkey, shared by all calls of this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import hiredis
from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError, TimeoutError

from agentkv_serve.gateway.sessions.connecting import Server

_TICKS = 5  # looks at the oldest call within the timeout
# What a server says that is not, or not any more, the one to talk to.
_ELSEWHERE = ("READONLY", "LOADING", "MASTERDOWN")

_MORE = object()  # a reply that has not come as a whole

Command = Sequence[bytes | str | int | float]


class Link:
    """Commands go out as they come, without waiting for replies; replies come back in the same order.

    A pool, with a connection for each call under way, costs several times as much as the command itself. A reply that
    does not come within `timeout` seconds ends the connection, and with it all calls that wait.
    """

    def __init__(self, server: Server, timeout: float) -> None:
        self._server = server
        self._timeout = timeout
        self._wire: _Wire | None = None
        self._opening: asyncio.Task[_Wire] | None = None

    async def call(self, *command: bytes | str | int | float) -> Any:
        """The reply to one command. Raises as `calls`."""
        return (await self.calls(command))[0]

    async def calls(self, *commands: Command) -> list[Any]:
        """The replies to commands that are sent together.

        Sent once more when an old connection turns out to be dead: all commands may be said twice. Raises RedisError:
        TimeoutError (nothing is sent again then), ConnectionError, or the first refusal among the replies.
        """
        wire = self._wire
        if wire is not None and not wire.broken:
            try:
                return await wire.calls(commands)
            except ConnectionError:
                pass
        return await (await self._open()).calls(commands)

    async def close(self) -> None:
        """Close the connection; calls that wait fail."""
        if self._opening:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._wire:
            self._wire.close()
        await self._server.close()

    async def _open(self) -> _Wire:
        if self._wire is not None and not self._wire.broken:
            return self._wire
        if self._opening is None:
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(self._opened)
        # One caller that leaves does not end the attempt for the others.
        return await asyncio.shield(self._opening)

    async def _connect(self) -> _Wire:
        try:
            async with asyncio.timeout(2 * self._timeout):
                wire = await self._server.connect(lambda: _Wire(self._timeout))
        except OSError as error:  # timeouts among them
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        try:
            await wire.calls(self._server.greeting)
        except BaseException:
            wire.close()
            raise
        self._wire = wire
        return wire

    def _opened(self, task: asyncio.Task[_Wire]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # callers hear of it; it must not count as unheard if all have left


@dataclass(slots=True)
class _Waiting:
    """Calls sent together: the replies that have come, and when they were sent, in ticks."""

    count: int
    done: asyncio.Future[list[Any]]
    sent: int
    replies: list[Any] = field(default_factory=list)


class _Wire(asyncio.Protocol):
    """An open connection and the calls that wait on it."""

    def __init__(self, timeout: float) -> None:
        self.broken = False
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(protocolError=ConnectionError, replyError=_refusal, notEnoughData=_MORE)
        self._waiting: deque[_Waiting] = deque()
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    async def calls(self, commands: Sequence[Command]) -> list[Any]:
        if self.broken or self._transport is None:
            raise ConnectionError("the connection to the session store was closed")
        waiting = _Waiting(len(commands), self._loop.create_future(), self._ticks)
        packed: list[bytes] = [hiredis.pack_command(tuple(command)) for command in commands]  # type: ignore[arg-type]
        self._waiting.append(waiting)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout / _TICKS, self._tick)
        self._transport.write(packed[0] if len(packed) == 1 else b"".join(packed))
        replies = await waiting.done
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return replies

    def close(self) -> None:
        self._fail(ConnectionError("the connection to the session store was closed"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _MORE:
                if isinstance(reply, ConnectionError):
                    raise reply
                if not waiting:
                    raise ConnectionError("the session store answered without being asked")
                first = waiting[0]
                first.replies.append(reply)
                if len(first.replies) == first.count:
                    waiting.popleft()
                    if not first.done.done():
                        first.done.set_result(first.replies)
        except ConnectionError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionError(str(error or "the session store closed the connection")))

    def _tick(self) -> None:
        # Ticks, not times: a process that stood still itself has not waited for the server.
        self._ticks += 1
        self._timer = None
        if not self._waiting:
            return
        if self._ticks - self._waiting[0].sent > _TICKS:
            self._fail(TimeoutError(f"no reply within {self._timeout} s"))
            return
        self._timer = self._loop.call_later(self._timeout / _TICKS, self._tick)

    def _fail(self, error: RedisError) -> None:
        self.broken = True
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._transport:
            self._transport.abort()
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done.done():
                waiting.done.set_exception(error)
                waiting.done.exception()  # the caller may have left


def _refusal(text: str) -> RedisError:
    """The exception for a server's error reply."""
    if text.startswith(_ELSEWHERE):
        return ConnectionError(text)
    return NoScriptError(text) if text.startswith("NOSCRIPT") else ResponseError(text)
