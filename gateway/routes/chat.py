"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.dialects.chat import ChatDialect
from agentkv_serve.gateway.headers import RequestHeaders
from agentkv_serve.gateway.routes.reading import read_json
from agentkv_serve.gateway.routes.serving import serve_turn
from agentkv_serve.gateway.runtime import runtime_of
from agentkv_serve.gateway.turns.request import read_chat


async def chat_completions(request: Request) -> Response:
    """One chat turn, streamed or not."""
    runtime = runtime_of(request)
    headers = RequestHeaders(request.scope)
    tenant = runtime.auth.tenant(headers)
    limits = runtime.settings.limits
    chat = read_chat(await read_json(request, limits.body_bytes, headers), limits)
    return await serve_turn(request, tenant, chat, ChatDialect(runtime.settings.stream), headers)
