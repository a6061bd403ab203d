"""The page `/ui`: static files of the package. It holds no data; what it shows comes from the admin API."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.runtime import runtime_of

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from outside, no inline code, no frames: a session's text can never run.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """The page, or one of its files. Without an admin key there is nothing that it could show."""
    if runtime_of(request).settings.admin_key is None:
        raise ApiError(404, "not_found", "The page is off: set admin_key to use it.")
    name = request.path_params.get("file", "index.html")
    folder = files("agentkv_serve.gateway") / "ui"
    kind = _TYPES.get(name.rpartition(".")[2])
    # Only names that the folder lists: no path can lead out of it.
    if kind is None or name not in {entry.name for entry in folder.iterdir()}:
        raise ApiError(404, "not_found", "The page has no such file.")
    return Response((folder / name).read_bytes(), 200, _HEADERS, media_type=kind)
