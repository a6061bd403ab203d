"""The engine's refusals, told to clients in the gateway's words."""

from __future__ import annotations

import re

import orjson

from agentkv_serve.gateway.errors import ApiError, bad_request

_OURS = re.compile(r"agentkv:([a-z_]+): ?(.*)", re.DOTALL)
_TOO_LONG = re.compile(r"context length|longer than the model|too large|maximum allowed length", re.IGNORECASE)


def client_error(status: int, body: bytes) -> ApiError:
    """The error for a worker's non-200 reply, or for an error frame (`status` 0: the frame's own code counts).

    Nothing of a 5xx reply is passed on: it may hold paths or traces.
    """
    message, code = _read(body)
    status = status or code or 500
    ours = _OURS.search(message)
    if ours:
        return _own(ours.group(1), ours.group(2))
    if status in (401, 403, 404):
        return ApiError(502, "worker_refused", "The worker refused the gateway: check its API key and version.")
    if status == 429 or status == 503:
        return ApiError(
            503, "worker_overloaded", "The worker is overloaded; try again soon.", headers={"retry-after": "2"}
        )
    if 400 <= status < 500:
        text = message[:2000] or "The engine refused the request."
        return bad_request(text, code="context_length_exceeded" if _TOO_LONG.search(text) else "invalid_request")
    return ApiError(502, "worker_error", "The worker failed on this request.")


def _own(code: str, text: str) -> ApiError:
    if code == "session_busy":
        return ApiError(409, "session_busy", text, headers={"x-should-retry": "false", "retry-after": "1"})
    if code == "stale_epoch":
        return ApiError(409, "session_conflict", text, headers={"x-should-retry": "false"})
    if code == "no_room":
        return ApiError(503, "worker_overloaded", text, headers={"retry-after": "2"})
    if code == "budget":
        return bad_request(text, param="x-agentkv-budget", code="invalid_budget")
    return bad_request(text)


def _read(body: bytes) -> tuple[str, int]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", 0
    if not isinstance(value, dict):
        return "", 0
    nested = value.get("error")
    inner = nested if isinstance(nested, dict) else value
    code = inner.get("code")
    return str(inner.get("message") or ""), code if isinstance(code, int) else 0
