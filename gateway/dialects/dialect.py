"""What every API's dialect can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.turns.turn import Turn

Json = dict[str, Any]


class Dialect(Protocol):
    """Writes one turn in the words of an API. One instance serves one request."""

    def headers(self, turn: Turn) -> Mapping[str, str]:
        """Headers of the reply, besides the turn's own."""

    async def whole(self, turn: Turn, reply: Json) -> Json:
        """A chat completion, as the API's reply."""

    def begin(self, turn: Turn) -> bytes:
        """What opens a stream."""

    def content(self, frames: list[bytes]) -> bytes:
        """Content frames of the engine, as the API's events."""

    async def end(self, turn: Turn) -> bytes:
        """What closes the stream of a turn that ended well."""

    def failure(self, error: ApiError) -> bytes:
        """What closes the stream of a turn that failed."""

    def keep_alive(self, turn: Turn) -> bytes:
        """What fills a silence."""
