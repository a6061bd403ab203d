"""What the engine says about a turn: output ids, and the KV state it really used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentkv_serve.gateway.upstream.client import UpstreamError

_BACKEND = "agentkv:"


@dataclass(slots=True)
class Facts:
    """The engine's report of one turn. `state` None: the worker reported none (a stateless turn)."""

    output_ids: list[int] | None = None
    cached: int = 0
    state: str | None = None
    reason: str | None = None
    logical: int = 0
    held: int = 0
    evicted: int = 0
    prefill: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    budget: int = 0  # in force at the turn's end; 0: nothing bounds the session, or the worker does not say

    def read(self, sglext: Mapping[str, Any]) -> None:
        """Take in an `sglext` object of a frame or a reply. Raises UpstreamError when it is none of our engines'."""
        try:
            self._read(sglext)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UpstreamError(f"its report of the turn cannot be read: {error!r}", sent=True) from error

    def _read(self, sglext: Mapping[str, Any]) -> None:
        ids = sglext.get("output_ids")
        if ids:
            self.output_ids = list(ids[0])
        details = sglext.get("cached_tokens_details")
        if not details:
            return
        self.cached = int(details.get("device") or 0) + int(details.get("host") or 0)
        backend = details.get("storage_backend") or ""
        if not backend.startswith(_BACKEND):
            return
        report = orjson.loads(backend[len(_BACKEND) :])
        self.state, self.reason = report["state"], report.get("reason")
        self.logical, self.held = int(report["logical"]), int(report["held"])
        self.evicted, self.prefill = int(report["evicted"]), int(report["prefill"])
        self.budget = int(report.get("budget") or 0)
        self.phases = dict(report.get("phases") or {})
