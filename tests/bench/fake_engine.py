"""An engine on a real port that samples at once: what the load generator sends to it can be looked at afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from agentkv_serve.bench.serve.engine import Engine, Kind
from agentkv_serve.children import Child

PAGE = "Decode batch, #running-req: 2, #token: 512, token usage: 0.50, #queue-req: 3, "


@dataclass
class Served:
    """What the engine was asked, in order, and how it behaves.

    `stuck` and `refused` hold the first token of a turn's new ids: such a turn never samples, or is refused.
    """

    bodies: list[dict[str, Any]] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    flushed: int = 0
    at_work: int = 0
    at_work_max: int = 0
    stuck: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    forgetful: set[int] = field(default_factory=set)  # sessions (thousands of their ids) whose state gets lost
    metrics: str = ""
    known: dict[str, list[int]] = field(default_factory=dict)  # session -> its tokens
    log: Path = Path()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.at_work += 1
        self.at_work_max = max(self.at_work_max, self.at_work)
        try:
            return await self._answer(request, body)
        finally:
            self.at_work -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        sampling, ids = body["sampling_params"], body["input_ids"]
        told = json.loads(sampling.get("custom_params", {}).get("agentkv", "null"))
        session = told["session"] if told else (body.get("session_params") or {}).get("id", "")
        before = self.known.get(session, [])
        whole = before + ids if "session_params" in body else ids
        new = whole[len(before) :]
        if new and new[0] in self.refused:
            return web.json_response({"error": {"message": "no"}}, status=400)
        if new and new[0] in self.stuck:
            await asyncio.sleep(60)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        output = list(range(1, sampling["max_new_tokens"] + 1))
        with self.log.open("a") as log:
            log.write(PAGE + "\n")
        for count in range(1, len(output) + 1):
            kept = bool(before) and new[0] // 1000 not in self.forgetful
            meta: dict[str, Any] = {"prompt_tokens": len(whole), "cached_tokens": len(before) - 1 if kept else 0}
            if told and count == len(output):
                state = "resumed" if kept else "rebuilt" if before else "new"
                facts = {"state": state, "prefill": len(new) + 1 if kept else len(whole)}
                facts |= {"logical": len(whole) + count, "held": 100, "evicted": len(whole) - 100}
                meta["cached_tokens_details"] = {"storage_backend": "agentkv:" + json.dumps(facts)}
            frame = {"output_ids": output[:count], "meta_info": meta}
            await response.write(f"data: {json.dumps(frame)}\n\n".encode())
            await asyncio.sleep(0.001)
        await response.write(b"data: [DONE]\n\n")
        self.known[session] = whole + output
        return response

    async def open(self, request: web.Request) -> web.Response:
        self.opened.append((await request.json())["session_id"])
        return web.json_response(self.opened[-1])

    async def close(self, request: web.Request) -> web.Response:
        self.closed.append((await request.json())["session_id"])
        return web.Response()

    async def show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def flush(self, request: web.Request) -> web.Response:
        self.flushed += 1
        return web.Response(status=400 if self.flushed == 1 else 200)  # at first it is not idle yet


@dataclass
class _Log:
    log: Path
    name: str = "engine"
    pid: int = 0


@asynccontextmanager
async def served(folder: Path, kind: Kind = "agentkv") -> AsyncIterator[tuple[Served, Engine]]:
    """The fake on a free port."""
    state = Served(log=folder / "engine.log")
    state.log.write_text("")
    app = web.Application()
    for path in ("generate", "open", "close", "flush"):
        route = {"generate": "generate", "open": "open_session", "close": "close_session", "flush": "flush_cache"}
        app.router.add_post(f"/{route[path]}", getattr(state, path))
    app.router.add_get("/metrics", state.show_metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield state, Engine(kind, f"http://127.0.0.1:{port}", "key", cast(Child, _Log(state.log)))
    finally:
        await runner.cleanup()
