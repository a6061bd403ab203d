"""One connection to Redis or Valkey, shared by all calls of this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

_TICKS = 5  # looks at the oldest call within the timeout

Command = Sequence[bytes | str | int | float]


class Link:
    """Commands go out as they come, without waiting for replies; replies come back in the same order.

    The client library connects (TLS, login, sentinels) and reads replies. Its pool of connections, one for each call
    under way, would cost several times as much as the command itself. A reply that does not come within `timeout`
    seconds ends the connection, and with it all calls that wait.
    """

    def __init__(self, pool: ConnectionPool[Any], timeout: float) -> None:
        self._pool = pool
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
            await self._wire.close()
        await self._pool.aclose()
        if isinstance(self._pool, SentinelConnectionPool):
            for sentinel in self._pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    async def _open(self) -> _Wire:
        if self._wire is not None and not self._wire.broken:
            return self._wire
        if self._opening is None:
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(self._opened)
        # One caller that leaves does not end the attempt for the others.
        return await asyncio.shield(self._opening)

    async def _connect(self) -> _Wire:
        connection = self._pool.make_connection()
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        # From here on the link itself bounds all waits.
        connection.socket_timeout = None
        self._wire = _Wire(connection, self._timeout)
        return self._wire

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


class _Wire:
    """An open connection and the calls that wait on it."""

    def __init__(self, connection: AbstractConnection, timeout: float) -> None:
        self.broken = False
        self._connection = connection
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._reader = asyncio.create_task(self._read())

    async def calls(self, commands: Sequence[Command]) -> list[Any]:
        waiting = _Waiting(len(commands), self._loop.create_future(), self._ticks)
        packed = b"".join(hiredis.pack_command(tuple(command)) for command in commands)
        self._waiting.append(waiting)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout / _TICKS, self._tick)
        # Written before anything else can run, so that replies and calls stay in one order.
        await self._connection.send_packed_command(packed, check_health=False)
        replies = await waiting.done
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return replies

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                try:
                    reply = await self._connection.read_response(disconnect_on_error=False)
                except ResponseError as refusal:
                    reply = refusal
                waiting = self._waiting[0]
                waiting.replies.append(reply)
                if len(waiting.replies) == waiting.count:
                    self._waiting.popleft()
                    if not waiting.done.done():
                        waiting.done.set_result(waiting.replies)
        except (RedisError, OSError) as error:
            self._fail(ConnectionError(str(error)))
        finally:
            self._fail(ConnectionError("the connection to the session store was closed"))
            await self._connection.disconnect(nowait=True)

    def _tick(self) -> None:
        # Ticks, not times: a process that stood still itself has not waited for the server.
        self._ticks += 1
        self._timer = None
        if not self._waiting:
            return
        if self._ticks - self._waiting[0].sent > _TICKS:
            self._fail(TimeoutError(f"no reply within {self._timeout} s"))
            self._reader.cancel()
            return
        self._timer = self._loop.call_later(self._timeout / _TICKS, self._tick)

    def _fail(self, error: RedisError) -> None:
        self.broken = True
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done.done():
                waiting.done.set_exception(error)
                waiting.done.exception()  # the caller may have left
