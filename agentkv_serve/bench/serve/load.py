"""Drives a workload against one engine in one setting, and keeps what every turn took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from agentkv_serve.bench.serve.client import Reply, Session, Setting, connect
from agentkv_serve.bench.serve.engine import Engine, Pressure
from agentkv_serve.bench.serve.workload import Turn, Workload
from agentkv_serve.stack import StackError


@dataclass
class Run:
    """One setting's run over the whole workload. Times in seconds, of `time.perf_counter`."""

    setting: Setting
    replies: list[Reply] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)  # when each session finished its last turn
    pressure: Pressure | None = None

    @property
    def good(self) -> list[Reply]:
        """The turns that did not fail."""
        return [reply for reply in self.replies if not reply.error]

    @property
    def wall(self) -> float:
        """From the first request to the last one's end."""
        return max(reply.ended for reply in self.replies) - min(reply.sent for reply in self.replies)

    @property
    def output_tokens(self) -> int:
        """Sampled tokens of turns that did not fail."""
        return sum(len(reply.output) for reply in self.good)

    @property
    def tok_s(self) -> float:
        """Output tokens a second; those of failed turns count nothing."""
        return self.output_tokens / self.wall


async def drive(
    engine: Engine, setting: Setting, plan: Sequence[Sequence[Turn]], work: Workload, family: str, stall: float
) -> Run:
    """Runs all sessions of the plan, and leaves the server's cache empty.

    Args:
        stall: where no turn in flight has got a token for so many seconds, all of them are given up, and their
            sessions with them. It is the way out of a server that waits for memory that nobody will give back.

    Raises:
        StackError: the server's cache cannot be emptied afterwards.
    """
    run = Run(setting)
    log = engine.log_size()
    async with connect() as http, Watch(run.replies, stall) as watch:
        sessions = [Session(engine, http, setting, number, family) for number in range(len(plan))]
        await _Load(run, sessions, plan, work, watch).run()
        run.pressure = engine.pressure(log)
        await flush(engine, http)
    return run


async def flush(engine: Engine, http: aiohttp.ClientSession) -> None:
    """Empties the radix cache, so that a later run finds nothing of an earlier one. Sessions must be closed.

    Raises:
        StackError: the server still runs requests after 30 seconds.
    """
    for _ in range(60):
        async with http.post(f"{engine.url}/flush_cache", headers=engine.headers) as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.5)
    raise StackError(f"{engine.child.name} cannot empty its cache: requests are left running")


class Watch:
    """Runs turns, and gives up all that are in flight when none of them has got a token for `stall` seconds."""

    def __init__(self, replies: Sequence[Reply], stall: float) -> None:
        self._replies = replies
        self._stall = stall
        self._in_flight: set[asyncio.Task[Reply]] = set()

    async def __aenter__(self) -> Watch:
        self._watching = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()

    async def turn(self, turn: Coroutine[Any, Any, Reply]) -> bool:
        """Runs a turn; whether it ended well."""
        task = asyncio.create_task(turn)
        self._in_flight.add(task)
        await asyncio.wait([task])
        self._in_flight.discard(task)
        return not task.cancelled() and not task.result().error

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._stall / 4))
            moved = [moment for reply in self._replies for moment in (reply.sent, reply.ended, *reply.arrivals[-1:])]
            if self._in_flight and time.perf_counter() - max(moved, default=0.0) > self._stall:
                for task in self._in_flight:
                    task.cancel()


class _Load:
    def __init__(
        self, run: Run, sessions: Sequence[Session], plan: Sequence[Sequence[Turn]], work: Workload, watch: Watch
    ) -> None:
        self._run = run
        self._sessions = sessions
        self._plan = plan
        self._watch = watch
        self._arrivals = work.arrivals()
        everybody = len(plan)
        # Semaphores wake in the order of arrival: a session whose turn has ended goes to the back of the line.
        self._gate = asyncio.Semaphore(work.concurrency if work.rate is None else everybody)
        self._admission = asyncio.Semaphore(run.setting.admitted or everybody)

    async def run(self) -> None:
        await asyncio.gather(*(self._session(number) for number in range(len(self._plan))))

    async def _session(self, number: int) -> None:
        session = self._sessions[number]
        await asyncio.sleep(self._arrivals[number])
        async with self._admission:
            for turn in self._plan[number]:
                await asyncio.sleep(turn.pause_s)
                async with self._gate:
                    well = await self._watch.turn(session.run(turn, self._run.replies))
                if not well:
                    break
            else:
                self._run.ended[number] = time.perf_counter()
            await session.close()
