"""POST /v1/messages and /v1/messages/count_tokens, for Anthropic's SDKs."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.dialects.anthropic import AnthropicDialect, chat_body
from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.routes.reading import read_json
from agentkv_serve.gateway.routes.serving import serve_turn
from agentkv_serve.gateway.runtime import runtime_of
from agentkv_serve.gateway.sessions.rendering import PromptError
from agentkv_serve.gateway.turns.request import read_chat


async def messages(request: Request) -> Response:
    """One turn, streamed or not."""
    runtime = runtime_of(request)
    tenant = runtime.auth.tenant(request.headers)
    limits = runtime.settings.limits
    body = await read_json(request, limits.body_bytes)
    if not isinstance(body, dict) or body.get("max_tokens") is None:
        raise bad_request("max_tokens is required.", param="max_tokens")
    chat = read_chat(chat_body(body), limits)
    return await serve_turn(request, tenant, chat, AnthropicDialect())


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt has; nothing is generated and no session is touched."""
    runtime = runtime_of(request)
    runtime.auth.tenant(request.headers)
    limits = runtime.settings.limits
    chat = read_chat({**chat_body(await read_json(request, limits.body_bytes)), "max_tokens": None}, limits)
    if chat.model not in runtime.registry.models():
        raise ApiError(404, "model_not_found", f"The model {chat.model[:128]!r} is not served here.", param="model")
    renderer = runtime.services.renderer
    try:
        prompt = await asyncio.to_thread(renderer.whole, chat.messages, chat.tools, chat.template_kwargs)
    except PromptError as error:
        raise bad_request(str(error), param="messages", code="prompt_not_renderable") from error
    return Response(dumps({"input_tokens": len(prompt.ids)}), media_type="application/json")
