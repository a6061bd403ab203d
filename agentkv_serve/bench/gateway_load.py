"""Load on an OpenAI-compatible server, from one process: requests in parallel, their latencies and chunks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_END = b"0\r\n\r\n"


@dataclass
class Load:
    """What a run of requests took: `latencies` to the reply, or to a stream's first content frame. In seconds."""

    latencies: list[float] = field(default_factory=list)
    chunks: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class Connection:
    """A kept-alive HTTP/1.1 connection that only knows what the benchmark needs."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key
        self._reader: asyncio.StreamReader | None = None

    async def post(self, body: bytes, session: str) -> tuple[float, int]:
        """POST a chat completion; when its reply, or the first content frame of it, came, and the number of frames."""
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self._key}\r\nx-agentkv-session: {session}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        reply = await self._reader.readuntil(b"\r\n\r\n")
        if not reply.startswith(b"HTTP/1.1 200"):
            text = await self._reader.read(2000)
            self.close()
            raise OSError((reply + text).decode(errors="replace")[:500])
        lower = reply.lower()
        at = lower.find(b"content-length:")
        if at >= 0:
            size = int(lower[at + 15 :].split(b"\r\n", 1)[0])
            await self._reader.readexactly(size)
            return time.perf_counter(), 0
        frames, first, tail = 0, 0.0, b""
        while not tail.endswith(_END):
            piece = await self._reader.read(1 << 16)
            if not piece:
                raise OSError("the stream broke off")
            frames += piece.count(b"data: {")
            first = first or (time.perf_counter() if frames else 0.0)
            tail = (tail + piece)[-len(_END) :]
        return first, frames

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._reader is not None:
            self._writer.close()
            self._reader = None


def conversation(size: int, appended: int, stream: bool, number: int, seed: int | None = None) -> tuple[bytes, bytes]:
    """The bodies of a conversation's first turn and of its second, which has `size` bytes, `appended` of them in a new
    message. `seed` goes with the second."""
    words = "the quick brown fox jumps over the lazy dog and looks at tool results of the day "
    history = (f"conversation {number} " + words * (1 + size // len(words)))[: size - appended - 200]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a benchmark."},
        {"role": "user", "content": history},
    ]
    extra: dict[str, Any] = {"stream": True} if stream else {}
    first = json.dumps({"model": "bench", "messages": messages, **extra}).encode()
    messages += [{"role": "assistant", "content": "ABC"}, {"role": "user", "content": (words * 20)[:appended]}]
    extra |= {} if seed is None else {"seed": seed}
    return first, json.dumps({"model": "bench", "messages": messages, **extra}).encode()


async def run(port: int, key: str, bodies: Sequence[tuple[str, bytes]], parallel: int, spread: float = 0.0) -> Load:
    """Post all (session, body) pairs, `parallel` at a time. The first ones begin over `spread` seconds: agents do not
    speak in unison."""
    load = Load()
    waiting = iter(bodies)

    async def work(connection: Connection, place: int) -> None:
        await asyncio.sleep(spread * place / parallel)
        for session, body in waiting:
            started = time.perf_counter()
            try:
                came, chunks = await connection.post(body, session)
            except (OSError, asyncio.IncompleteReadError) as error:
                load.failures.append(str(error))
                connection.close()
                continue
            load.latencies.append(came - started)
            load.chunks += chunks
        connection.close()

    started = time.perf_counter()
    await asyncio.gather(*(work(Connection(port, key), place) for place in range(parallel)))
    load.seconds = time.perf_counter() - started
    return load
