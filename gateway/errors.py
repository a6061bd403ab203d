"""Errors of the gateway as clients see them: one typed exception, one body shape (OpenAI's)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from agentkv_serve.gateway.encoding import dumps

_TYPES = {
    401: "authentication_error",
    402: "insufficient_quota",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error with an HTTP status, a stable `code` and a message that says what to do.

    `headers` go out with the reply; `x-should-retry` steers the official SDKs.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": {message, type, code, param}}`."""
        return {"error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param}}

    def response(self) -> Response:
        """The error as an HTTP response."""
        return Response(
            dumps(self.body()),
            self.status,
            {**self.headers, "x-agentkv-error-code": self.code},
            media_type="application/json",
        )

    def frame(self) -> bytes:
        """The error as a server-sent event; official SDKs raise it in the middle of a stream."""
        return b"data: " + dumps(self.body()) + b"\n\n"


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """A 400 with a message for the client's author."""
    return ApiError(400, code, message, param=param)
