"""One session as the page shows it: its transcript's phases from the ledger, what is held of it from the worker."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.runtime import Runtime
from agentkv_serve.gateway.sessions.ledger import concatenate
from agentkv_serve.gateway.sessions.session import Session
from agentkv_serve.gateway.upstream.client import UpstreamError
from agentkv_serve.gateway.views.fleet import summary
from agentkv_serve.phase_tagger import Label, fold

MAX_TEXTS = 4096


async def session_view(runtime: Runtime, session: Session, layer: int | None = None) -> dict[str, Any]:
    """The session's phases, turns and compactions, and how much of each token is held.

    `runs` are flat (start, end, label) triples, `ends` the tokens after each turn. `engine` is the worker's KV map
    (its `/agentkv/kv_map`), or an object that says in `error` why there is none.
    """
    path = session.ledger.path(session.ledger.head)
    ids, runs = concatenate(path, (), ())
    return {
        **summary(runtime, session),
        "tokens": len(ids),
        "runs": runs,
        "labels": [label.name.lower() for label in Label],
        "phases": [fold(label).name.lower() for label in Label],
        "ends": list(accumulate(turn.tokens for turn in path)),
        "content": runtime.settings.ui.show_content,
        "engine": await _kv_map(runtime, session, layer),
    }


def texts(runtime: Runtime, session: Session, start: int, end: int) -> list[str]:
    """The text of each token in [start, end). Raises 403 unless the settings allow content to be shown."""
    if not runtime.settings.ui.show_content:
        raise ApiError(403, "content_hidden", "Text is not shown: set ui.show_content to allow it.")
    if not 0 <= start <= end <= start + MAX_TEXTS:
        raise bad_request(f"Ask for at most {MAX_TEXTS} tokens, start <= end.", param="end")
    ids, _ = concatenate(session.ledger.path(session.ledger.head), (), ())
    return runtime.services.renderer.texts(ids[start:end])


async def _kv_map(runtime: Runtime, session: Session, layer: int | None) -> dict[str, Any]:
    worker = runtime.registry.get(session.worker)
    if worker is None:
        return {"error": "The worker that held this session is gone; its next turn is rebuilt."}
    key = runtime.keys.engine(session.key, session.incarnation)
    try:
        return await runtime.client.kv_map(worker, key, layer)
    except UpstreamError as error:
        return {"error": f"The worker gave no map: {error}"}
