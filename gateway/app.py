"""The gateway application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from agentkv_serve.gateway.edge import Edge, Handler, api_error, client_gone, http_error, nested_too_deeply
from agentkv_serve.gateway.encoding import NestedTooDeeply
from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.routes import admin, ui_data
from agentkv_serve.gateway.routes.chat import chat_completions
from agentkv_serve.gateway.routes.completions import completions, embeddings
from agentkv_serve.gateway.routes.health import healthz, metrics, openapi, readyz
from agentkv_serve.gateway.routes.joining import register
from agentkv_serve.gateway.routes.messages import count_tokens, messages
from agentkv_serve.gateway.routes.models import get_model, list_models
from agentkv_serve.gateway.routes.responses import create_response, one_response
from agentkv_serve.gateway.routes.sessions import list_sessions, one_session, release_session
from agentkv_serve.gateway.routes.ui import page
from agentkv_serve.gateway.runtime import Runtime
from agentkv_serve.gateway.sessions.rendering import Renderer
from agentkv_serve.gateway.settings import Settings
from agentkv_serve.gateway.turns.departure import ClientGone

_TURNS: Mapping[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/messages": messages,
    "/v1/responses": create_response,
    "/v1/completions": completions,
}


def create_app(settings: Settings) -> Starlette:
    """The gateway for `settings`. All state is made in the lifespan and ends with it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        renderer = await asyncio.to_thread(Renderer.load, settings.model_path)
        async with Runtime(settings, renderer) as runtime:
            app.state.runtime = runtime
            yield

    routes = [
        *(Route(path, handler, methods=["POST"]) for path, handler in _TURNS.items()),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/responses/{response_id}", one_response, methods=["GET", "DELETE"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/agentkv/sessions", list_sessions, methods=["GET"]),
        Route("/v1/agentkv/sessions/{session_id:path}/release", release_session, methods=["POST"]),
        Route("/v1/agentkv/sessions/{session_id:path}", one_session, methods=["GET", "DELETE"]),
        Route("/internal/workers/register", register, methods=["POST"]),
        Route("/admin/workers", admin.workers, methods=["GET", "POST"]),
        Route("/admin/workers/{worker_id}", admin.one_worker, methods=["GET", "DELETE"]),
        Route("/admin/workers/{worker_id}/drain", admin.drain, methods=["POST"]),
        Route("/admin/workers/{worker_id}/undrain", admin.drain, methods=["POST"]),
        Route("/admin/workers/{worker_id}/sessions", admin.worker_sessions, methods=["GET"]),
        Route("/admin/config", admin.configuration, methods=["GET"]),
        Route("/admin/fleet", ui_data.fleet_now, methods=["GET"]),
        Route("/admin/events", ui_data.events, methods=["GET"]),
        Route("/admin/sessions/{key}", ui_data.session_now, methods=["GET"]),
        Route("/admin/sessions/{key}/texts", ui_data.session_texts, methods=["GET"]),
        Route("/ui", page, methods=["GET"]),
        Route("/ui/{file}", page, methods=["GET"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", get_model, methods=["GET"]),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
    ]
    if settings.metrics.port is None:
        routes.append(Route("/metrics", metrics, methods=["GET"]))
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(Edge, direct={("POST", path): handler for path, handler in _TURNS.items()})],
        exception_handlers={
            ApiError: api_error,
            NestedTooDeeply: nested_too_deeply,
            ClientGone: client_gone,
            HTTPException: http_error,
        },
    )
