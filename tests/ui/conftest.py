"""A gateway with an admin key in front of engine doubles that answer `/agentkv/kv_map`."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.gateway.conftest import Stack, Start, model_folder, start
from tests.gateway.engine import FakeEngine

__all__ = ["model_folder", "start"]

KEY = "operator-key"
OPERATOR = {"authorization": f"Bearer {KEY}"}
LAYERS, HEADS = 3, 2


def add_kv_map(engine: FakeEngine) -> list[dict[str, str]]:
    """Gives an engine double the map route: every token but the first half's is held everywhere. Returns the
    queries that it was asked, as they come."""
    asked: list[dict[str, str]] = []

    async def kv_map(request: Request) -> JSONResponse:
        query = dict(request.query_params)
        asked.append(query)
        record = engine.sessions.get(query["session"])
        if record is None:
            return JSONResponse({"error": "this worker knows no such session"}, 404)
        length = len(record.ids) - 1
        layer = int(query["layer"]) if "layer" in query else None
        levels = HEADS * (LAYERS if layer is None else 1)
        kept = [0] * (length // 2) + [levels] * (length - length // 2)
        return JSONResponse(
            {
                "v": 1,
                "session": query["session"],
                "state": "idle",
                "length": length,
                "held": length - length // 2,
                "evicted": length // 2,
                "layers": LAYERS,
                "kv_heads": HEADS,
                "layer": layer,
                "levels": levels,
                "kept": base64.b64encode(struct.pack(f"<{length}H", *kept)).decode(),
                "turns": [],
                "compactions": [],
            }
        )

    engine.app.router.routes.append(Route("/agentkv/kv_map", kv_map))
    return asked


@pytest.fixture
def watched(start: Start) -> Callable[..., Stack]:
    """Starts stacks with an admin key and maps."""

    def run(**settings: Any) -> Stack:
        stack = start(**{"admin_key": KEY, **settings})
        for engine in stack.engines:
            add_kv_map(engine)
        return stack

    return run
