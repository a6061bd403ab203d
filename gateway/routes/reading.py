"""Request bodies, bounded before they are parsed."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.turns.departure import ClientGone


async def read_json(request: Request, limit: int, headers: Headers | None = None) -> Any:
    """The JSON body of at most `limit` bytes. Raises 400, 413 or 415."""
    headers = headers or request.headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps foreign web pages from posting to a gateway on the user's own machine.
        raise ApiError(415, "unsupported_media_type", "Send the body as application/json.")
    if headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise ApiError(415, "unsupported_encoding", "Send the body without a content-encoding.")
    declared = headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit() or int(declared) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientGone from error
    try:
        return orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from error


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"The body is larger than {limit} bytes.", headers={"connection": "close"})
