"""Chat completions: the engine's own dialect. Content passes byte for byte."""

from __future__ import annotations

import time
from collections.abc import Mapping

from agentkv_serve.gateway.dialects.dialect import Json
from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.settings import StreamSettings
from agentkv_serve.gateway.turns.turn import Turn

DONE = b"data: [DONE]\n\n"


class ChatDialect:
    """See `Dialect`."""

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings

    def headers(self, turn: Turn) -> Mapping[str, str]:
        return {}

    async def whole(self, turn: Turn, reply: Json) -> Json:
        return reply

    def begin(self, turn: Turn) -> bytes:
        return b""

    def content(self, frames: list[bytes]) -> bytes:
        return b"".join(frames)

    async def end(self, turn: Turn) -> bytes:
        if turn.plan.request.include_usage and turn.usage:
            return b"data: " + dumps(turn.usage) + b"\n\n" + DONE
        return DONE

    def failure(self, error: ApiError) -> bytes:
        return error.frame()

    def keep_alive(self, turn: Turn) -> bytes:
        if self._settings.kind == "comment":
            return b": ping\n\n"
        chunk = {
            "id": "keep-alive",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": turn.plan.request.model,
            "choices": [{"index": 0, "delta": {}, "finish_reason": None}],
        }
        return b"data: " + dumps(chunk) + b"\n\n"
