"""GET /v1/models: what the workers serve."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.runtime import runtime_of


async def list_models(request: Request) -> Response:
    """All served models."""
    runtime = runtime_of(request)
    runtime.auth.tenant(request.headers)
    models = [_card(name, length) for name, length in sorted(runtime.registry.models().items())]
    return Response(dumps({"object": "list", "data": models}), media_type="application/json")


async def get_model(request: Request) -> Response:
    """One served model."""
    runtime = runtime_of(request)
    runtime.auth.tenant(request.headers)
    name = request.path_params["model"]
    models = runtime.registry.models()
    if name not in models:
        raise ApiError(404, "model_not_found", f"The model {name[:128]!r} is not served here.", param="model")
    return Response(dumps(_card(name, models[name])), media_type="application/json")


def _card(name: str, length: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentkv", "max_model_len": length or None}
