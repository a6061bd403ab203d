"""A gateway on a real port whose model is a function: it shows what the benchmarks' own clients send."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""From the request's body to the assistant's message; {} = an error of the server's."""


@dataclass
class Seen:
    """What came in: (headers in lower case, body) of every call, and the sessions that were released."""

    calls: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def sessions(self) -> set[str]:
        return {headers["x-agentkv-session"] for headers, _ in self.calls}


@contextlib.contextmanager
def gateway(answer: Answer) -> Iterator[tuple[str, Seen]]:
    """Its base URL, and what it has seen."""
    seen = Seen()
    turns: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.path.endswith("/release"):
                seen.released.append(self.path.split("/")[-2])
                self._reply(204, None)
                return
            call = json.loads(body)
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen.calls.append((headers, call))
            message = answer(call)
            if not message:
                self._reply(500, {"error": {"message": "the model fell over", "type": "server_error"}})
                return
            session = headers["x-agentkv-session"]
            turns[session] = turns.get(session, 0) + 1
            facts = {"state": "resumed" if turns[session] > 1 else "new", "logical_tokens": 10, "kv_tokens": 10}
            usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10, "agentkv": facts}
            finish = "tool_calls" if message.get("tool_calls") else "stop"
            choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
            reply = {"id": "x", "object": "chat.completion", "created": int(time.time()), "model": "tiny"}
            self._reply(200, {**reply, "choices": [choice], "usage": usage})

        def _reply(self, status: int, body: Any) -> None:
            data = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # a client that ran out of time has left
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def calls(*functions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """An assistant message that calls these functions."""
    made = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for place, (name, arguments) in enumerate(functions)
    ]
    return {"content": None, "tool_calls": made}


def text(words: str) -> dict[str, Any]:
    """An assistant message of text."""
    return {"content": words}
