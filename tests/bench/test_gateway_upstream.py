"""The worker double of `agentkv bench gateway` outlives clients that are killed, and says no to what it cannot read."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentkv_serve.bench.gateway_upstream import PACED, REFUSED, Upstream

PLAIN = b'{"model":"bench","messages":[]}'


class Pipe:
    """What a protocol writes to."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True


def connect(pause: float = 0.0) -> tuple[Upstream, Pipe]:
    upstream, pipe = Upstream("bench", 4, pause), Pipe()
    upstream.connection_made(pipe)  # type: ignore[arg-type]
    return upstream, pipe


def request(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def test_requests_are_answered_however_they_are_cut() -> None:
    upstream, pipe = connect()
    for byte in request(PLAIN):
        assert not pipe.written
        upstream.data_received(bytes([byte]))
    head, body = pipe.written.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and json.loads(body)["choices"][0]["message"]["content"] == "ABC"
    upstream.data_received(request(PLAIN) + request(b"", "/v1/models"))
    assert pipe.written.count(b"HTTP/1.1 200") == 3 and not pipe.closed


@pytest.mark.parametrize(
    "junk",
    [
        b"\r\n\r\n",
        b"word\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\ncontent-length: many\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b'f\r\n{"model":"m"}\r\n0\r\n\r\n',
    ],
)
def test_what_is_no_request_is_refused(junk: bytes) -> None:
    upstream, pipe = connect()
    upstream.data_received(junk)
    assert pipe.written == REFUSED and pipe.closed


async def test_a_stream_ends_with_its_connection() -> None:
    upstream, pipe = connect(pause=0.01)
    upstream.data_received(request(b'{"stream":true,"seed":%d}' % PACED))
    await asyncio.sleep(0.005)
    upstream.connection_lost(ConnectionResetError("the client was killed"))
    sent = pipe.written
    await asyncio.sleep(0.1)
    assert sent.startswith(b"HTTP/1.1 200") and pipe.written == sent and b"[DONE]" not in sent
