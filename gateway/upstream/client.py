"""The transport seam: everything that the gateway ever sends to a worker goes through this client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import aiohttp
import orjson
from aiohttp.payload import BytesPayload

from agentkv_serve.gateway.settings import UpstreamSettings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Address(Protocol):
    """Where a worker is and what opens it."""

    @property
    def url(self) -> str: ...
    @property
    def key(self) -> str | None: ...


class UpstreamError(Exception):
    """The worker could not be used. `sent` is False when the request certainly never reached it."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Reply:
    """An open reply of a worker: its status, and its body whole or in pieces as they arrive."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def read(self) -> bytes:
        """The whole body. Raises UpstreamError when the worker goes away."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(_say(error), sent=True) from error

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body in pieces. Raises UpstreamError when the worker goes away."""
        try:
            async for piece in self._response.content.iter_any():
                yield piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(_say(error), sent=True) from error

    def close(self) -> None:
        """Drop the connection; a no-op once the body was read to its end."""
        self._response.close()


class EngineClient:
    """HTTP to SGLang workers. Open it inside a running event loop, close it when the gateway stops."""

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=20),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect, sock_read=settings.silence),
            auto_decompress=True,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "accept", "accept-encoding"),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def generate(
        self, worker: Address, body: bytes, *, path: str = CHAT, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """POST a generation. Raises UpstreamError when there is no reply at all."""
        sending = {**_headers(worker), "content-type": "application/json", **(headers or {})}
        try:
            response = await self._session.post(
                worker.url + path, data=BytesPayload(body), headers=sending, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamError(_say(error), sent=False) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(_say(error), sent=True) from error
        return Reply(response)

    async def abort(self, worker: Address, rid: str) -> bool:
        """Ask the worker to stop a request; False when that could not be said."""
        return await self._post(worker, "/abort_request", {"rid": rid})

    async def close_session(self, worker: Address, key: str) -> bool:
        """Release a session's KV state; False when the worker does not know it or could not be reached."""
        return await self._post(worker, "/close_session", {"session_id": key})

    async def healthy(self, worker: Address) -> bool:
        """Whether the worker answers its own health check."""
        try:
            await self._get(worker, "/health")
        except UpstreamError:
            return False
        return True

    async def models(self, worker: Address) -> list[dict[str, Any]]:
        """The models that the worker serves, as its `/v1/models` says."""
        return list(orjson.loads(await self._get(worker, "/v1/models"))["data"])

    async def server_info(self, worker: Address) -> dict[str, Any]:
        """The worker's `/server_info`."""
        return dict(orjson.loads(await self._get(worker, "/server_info")))

    async def kv_map(self, worker: Address, key: str, layer: int | None) -> dict[str, Any]:
        """Which tokens of a session the worker holds: over all layers, or in one. Raises UpstreamError."""
        query = f"?session={key}" + ("" if layer is None else f"&layer={layer}")
        return dict(orjson.loads(await self._get(worker, f"/agentkv/kv_map{query}")))

    async def _get(self, worker: Address, path: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self._settings.control, sock_connect=self._settings.connect)
        try:
            async with self._session.get(
                worker.url + path, headers=_headers(worker), timeout=timeout, allow_redirects=False
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(_say(error), sent=False) from error
        if response.status != 200:
            raise UpstreamError(f"{path} answered {response.status}", sent=True)
        return body

    async def _post(self, worker: Address, path: str, body: dict[str, Any]) -> bool:
        timeout = aiohttp.ClientTimeout(total=self._settings.control, sock_connect=self._settings.connect)
        try:
            async with self._session.post(
                worker.url + path, json=body, headers=_headers(worker), timeout=timeout, allow_redirects=False
            ) as response:
                await response.read()
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


def _headers(worker: Address) -> dict[str, str]:
    return {"authorization": f"Bearer {worker.key}"} if worker.key else {}


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
