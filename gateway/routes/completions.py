"""POST /v1/completions, and clear refusals of what is not served here."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.dialects.chat import ChatDialect
from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.routes.reading import read_json
from agentkv_serve.gateway.routes.serving import serve_turn
from agentkv_serve.gateway.runtime import runtime_of
from agentkv_serve.gateway.turns.request import read_completion


async def completions(request: Request) -> Response:
    """A text completion, streamed or not, without a session."""
    runtime = runtime_of(request)
    tenant = runtime.auth.tenant(request.headers)
    body = read_completion(await read_json(request, runtime.settings.limits.body_bytes))
    return await serve_turn(request, tenant, body, ChatDialect(runtime.settings.stream))


async def embeddings(request: Request) -> Response:
    """Refused: the workers serve generation only."""
    runtime_of(request).auth.tenant(request.headers)
    raise ApiError(
        501, "not_supported", "This gateway serves text generation only; ask an embedding server for embeddings."
    )
