"""A worker that costs next to nothing: SGLang's endpoints with replies made in advance.

Run as `python -m agentkv_serve.bench.gateway_upstream PORT FRAMES PAUSE_MS`: streams have FRAMES content frames, as
fast as the connection takes them, or PAUSE_MS apart when the request's seed is PACED.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

PACED = 7777
OUTPUT_IDS = [65, 66, 67]
CONTENT = "ABC"
REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
FACTS = {"v": 1, "state": "resumed", "reason": None, "logical": 9, "held": 9, "evicted": 0, "prefill": 3, "phases": {}}


def reply(model: str) -> bytes:
    """The reply that is not streamed."""
    details = {"device": 0, "host": 0, "storage": 0, "storage_backend": "agentkv:" + json.dumps(FACTS)}
    choice = {"index": 0, "message": {"role": "assistant", "content": CONTENT}, "finish_reason": "stop"}
    body = {
        "id": "0" * 32,
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
        "sglext": {"output_ids": [OUTPUT_IDS], "cached_tokens_details": details},
    }
    return answer(json.dumps(body, separators=(",", ":")).encode())


def frames(model: str, count: int) -> tuple[list[bytes], bytes]:
    """Content frames as chunks of a reply, and all that comes after them."""
    base = {"id": "0" * 32, "object": "chat.completion.chunk", "created": 1, "model": model}
    details = {"device": 0, "host": 0, "storage": 0, "storage_backend": "agentkv:" + json.dumps(FACTS)}

    def chunk(value: object, event: str = "") -> bytes:
        head = f"event: {event}\n" if event else ""
        data = f"{head}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
        return b"%x\r\n%s\r\n" % (len(data), data)

    def content(text: str, finish: str | None = None) -> bytes:
        delta = {"reasoning_content": None, "content": text}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}
        return chunk({**base, "choices": [choice]})

    sent = [content(CONTENT if i == 0 else "") for i in range(count)]
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    last = content("", "stop")
    last += chunk({**base, "choices": [], "sglext": {"cached_tokens_details": details}})
    last += chunk({**base, "choices": [], "sglext": {"output_ids": [OUTPUT_IDS]}}, "sglext_ids")
    last += chunk({**base, "choices": [], "usage": usage})
    done = b"data: [DONE]\n\n"
    return sent, last + b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done)


def answer(body: bytes) -> bytes:
    """A JSON reply with its head."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def body_length(request: bytes) -> int:
    """Bytes of the body behind a request's head. Raises ValueError: it is not told in advance, or not a number."""
    head = request.lower()
    if b"transfer-encoding:" in head:
        raise ValueError("a body in chunks")
    at = head.find(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


class Upstream(asyncio.Protocol):
    """One connection."""

    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    def __init__(self, model: str, count: int, pause: float) -> None:
        self._reply = reply(model)
        self._frames, self._last = frames(model, count)
        card = {"id": model, "object": "model", "max_model_len": 1 << 20}
        models = {"object": "list", "data": [card]}
        info = {"startup_time": 1.0, "model_path": model, "served_model_name": model, "tp_size": 1, "dp_size": 1}
        self._small = {
            b"/v1/models": models,
            b"/server_info": info,
            b"/get_server_info": info,
            b"/get_model_info": info,
        }
        self._pause = pause
        self._buffer = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            request = self._buffer[:end]
            try:
                path, length = request.split(b" ", 2)[1], body_length(request)
            except (IndexError, ValueError):
                # Where the next request begins cannot be known.
                self._transport.write(REFUSED)  # type: ignore[attr-defined]
                self._transport.close()
                self._buffer = b""
                return
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._serve(path, body)

    def _serve(self, path: bytes, body: bytes) -> None:
        write = self._transport.write  # type: ignore[attr-defined]
        if path == b"/v1/chat/completions":
            if b'"stream":true' in body or b'"stream": true' in body:
                paced = b'"seed":%d' % PACED in body.replace(b'"seed": ', b'"seed":')
                task = asyncio.ensure_future(self._stream(self._pause if paced else 0.0))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                write(self._reply)
        else:
            write(answer(json.dumps(self._small.get(path, {})).encode()))

    async def _stream(self, pause: float) -> None:
        write = self._transport.write  # type: ignore[attr-defined]
        write(self.head)
        for frame in self._frames:
            write(frame)
            await asyncio.sleep(pause)
        write(self._last)


async def main(port: int, count: int, pause_ms: float) -> None:
    """Serve for ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream("bench", count, pause_ms / 1000), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
