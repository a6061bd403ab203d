"""Liveness, readiness, metrics and the OpenAPI document."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.openapi import describe
from agentkv_serve.gateway.runtime import runtime_of


async def healthz(request: Request) -> Response:
    """The process is up."""
    return Response(dumps({"status": "ok"}), media_type="application/json")


async def readyz(request: Request) -> Response:
    """200 when a worker can take a turn; `degraded` while sessions are not shared, since Redis is down."""
    runtime = runtime_of(request)
    workers = {w.id: "up" if w.healthy else "down" for w in runtime.registry}
    ready = "up" in workers.values() and not runtime.stopping
    status = "stopping" if runtime.stopping else "no_worker" if not ready else "ready"
    if ready and runtime.store.degraded:
        status = "degraded"
    body = {"status": status, "workers": workers, "store": "down" if runtime.store.degraded else "up"}
    return Response(dumps(body), 200 if ready else 503, media_type="application/json")


async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    document = describe()
    if runtime_of(request).settings.metrics.port is not None:
        del document["paths"]["/metrics"]
    return Response(dumps(document), media_type="application/json")


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    runtime = runtime_of(request)
    await runtime.sample()
    return Response(runtime.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
