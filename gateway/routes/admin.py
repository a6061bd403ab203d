"""The operator's API, on a key of its own: workers, sessions by worker, the configuration without secrets."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.routes.reading import read_json
from agentkv_serve.gateway.routing.worker import Worker
from agentkv_serve.gateway.runtime import Runtime, runtime_of
from agentkv_serve.gateway.sessions.store import StoreDown
from agentkv_serve.gateway.settings import WorkerSettings


def admitted(request: Request) -> Runtime:
    """The runtime, for the holder of the admin key only; without a configured key the API does not exist."""
    runtime = runtime_of(request)
    key = runtime.settings.admin_key
    if key is None:
        raise ApiError(404, "not_found", "The admin API is off: set admin_key to use it.")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.get_secret_value().encode())
    if scheme.lower() != "bearer" or not right:
        raise ApiError(401, "invalid_api_key", "The admin API needs `Authorization: Bearer ADMIN_KEY`.")
    return runtime


async def workers(request: Request) -> Response:
    """All workers (GET), or one more (POST `{"url", "id"?, "key"?}`)."""
    runtime = admitted(request)
    if request.method == "POST":
        body = await read_json(request, 1 << 16)
        try:
            settings = WorkerSettings.model_validate(body)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in fault["loc"]) or "body"
            raise bad_request(f"{place}: {fault['msg']}", param=place) from None
        worker = runtime.add_worker(settings)
        with _shared(runtime, worker):
            await runtime.share_worker(worker, settings)
        await runtime.registry.check_one(worker)
        return Response(dumps(await _show(runtime, worker)), 201, media_type="application/json")
    data = [await _show(runtime, worker) for worker in runtime.registry]
    return Response(dumps({"object": "list", "data": data}), media_type="application/json")


async def one_worker(request: Request) -> Response:
    """One worker (GET), or its removal (DELETE): its sessions are rebuilt elsewhere at their next turn."""
    runtime = admitted(request)
    worker = _worker(runtime, request)
    if request.method == "DELETE":
        with _shared(runtime):
            await runtime.remove_worker(worker)
        return Response(status_code=204)
    return Response(dumps(await _show(runtime, worker)), media_type="application/json")


async def drain(request: Request) -> Response:
    """Give a worker no new sessions (`/drain`), or give it some again (`/undrain`)."""
    runtime = admitted(request)
    worker = _worker(runtime, request)
    worker.draining = request.url.path.endswith("/drain")
    with _shared(runtime):
        await runtime.share_worker(worker)
    return Response(dumps(await _show(runtime, worker)), media_type="application/json")


async def worker_sessions(request: Request) -> Response:
    """The sessions of a worker, without ids that clients chose."""
    runtime = admitted(request)
    worker = _worker(runtime, request)
    data = [
        {"key": s.key[:16], "tenant": s.tenant, "model": s.model, "turns": s.turns, "kv_tokens": s.kv_tokens}
        for s in await runtime.store.on_worker(worker.id)
    ]
    return Response(dumps({"object": "list", "data": data}), media_type="application/json")


async def configuration(request: Request) -> Response:
    """The settings in force; secrets are masked."""
    runtime = admitted(request)
    return Response(runtime.settings.model_dump_json().encode(), media_type="application/json")


@contextmanager
def _shared(runtime: Runtime, added: Worker | None = None) -> Iterator[None]:
    """What all gateway processes must hear of; a worker that could not be shared is not kept either."""
    try:
        yield
    except StoreDown:
        if added:
            runtime.registry.remove(added.id)
        raise ApiError(
            503,
            "store_down",
            "The shared store is down, so other gateways cannot be told.",
            headers={"retry-after": "5"},
        ) from None


def _worker(runtime: Runtime, request: Request) -> Worker:
    worker = runtime.registry.get(request.path_params["worker_id"])
    if worker is None:
        raise ApiError(404, "worker_not_found", "No worker of that id.")
    return worker


async def _show(runtime: Runtime, worker: Worker) -> dict[str, Any]:
    resident = await runtime.store.resident([worker.id])
    return {
        "id": worker.id,
        "url": worker.url,
        "healthy": worker.healthy,
        "draining": worker.draining,
        "breaker": worker.breaker.state,
        "instance": worker.instance,
        "models": worker.models,
        "inflight": worker.inflight,
        "kv_tokens": resident.get(worker.id, 0),
    }
