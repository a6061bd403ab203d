"""Which session a request names, and the keys that sessions have inside the product."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.datastructures import Headers

from agentkv_serve.gateway.errors import bad_request

SESSION_HEADER = "x-agentkv-session"
Source = Literal["header", "body", "content", "issued", "none"]

_ID = re.compile(r"[A-Za-z0-9._:/@+=-]{1,256}")


@dataclass(frozen=True, slots=True)
class Named:
    """A session id that the client sent, and where it stood."""

    id: str
    source: Source


def named_session(headers: Headers, body: Mapping[str, Any], harness_headers: Sequence[str]) -> Named | None:
    """The session id that the request carries, by the documented order of places; None without any.

    `X-AgentKV-Session` > `X-Session-Id` > harness headers > `agentkv.session_id` > `session_id` >
    `metadata.session_id` > `prompt_cache_key`. Raises 400 for a malformed id, for a repeated header with several
    values, and when two places of the first kind that is used name different sessions.
    """
    strong: list[tuple[str, Any, Source]] = []
    for name in (SESSION_HEADER, "x-session-id"):
        strong += [(name, value, "header") for value in headers.getlist(name)]
    mirror, metadata = body.get("agentkv"), body.get("metadata")
    if isinstance(mirror, Mapping) and mirror.get("session_id") is not None:
        strong.append(("agentkv.session_id", mirror["session_id"], "body"))
    if body.get("session_id") is not None:
        strong.append(("session_id", body["session_id"], "body"))
    if isinstance(metadata, Mapping) and metadata.get("session_id") is not None:
        strong.append(("metadata.session_id", metadata["session_id"], "body"))

    # What harnesses send for their own purposes may well differ from an explicit id: it only counts without one.
    weak: list[tuple[str, Any, Source]] = []
    if not strong:
        for name in harness_headers:
            weak = [(name, value, "header") for value in headers.getlist(name)]
            if weak:
                break
    if not strong and not weak and body.get("prompt_cache_key") is not None:
        weak = [("prompt_cache_key", body["prompt_cache_key"], "body")]

    found = strong or weak
    for place, value, _ in found:
        _check(place, value)
    if len({value for _, value, _ in found}) > 1:
        places = ", ".join(f"{place}={value!r}" for place, value, _ in found)
        raise bad_request(f"The request names different sessions: {places}.", code="session_id_conflict")
    return Named(found[0][1], found[0][2]) if found else None


def _check(place: str, value: Any) -> None:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise bad_request(
            f"Malformed session id in {place}: use 1 to 256 characters of A-Z a-z 0-9 . _ : / @ + = -",
            param=place,
            code="invalid_session_id",
        )


def issue_id() -> str:
    """A new session id of 128 random bits."""
    return f"akv-{secrets.token_hex(16)}"


class Keys:
    """Keys inside the product: HMACs of a secret that clients never see, so that no tenant can name or
    guess another's. After a rotation sessions of the previous secret live on under their old keys."""

    def __init__(self, secret: bytes, previous: bytes | None = None) -> None:
        self._secret = secret
        self._previous = previous
        self._salts: dict[str, str] = {}  # as many as there are tenants

    def session(self, tenant: str, session_id: str, model: str) -> str:
        """The store's key of a session, 64 hex digits."""
        return self._mac(b"session", tenant, session_id, model)

    def sessions(self, tenant: str, session_id: str, model: str) -> list[str]:
        """The keys that a session may have, the one for new sessions first."""
        keys = [self.session(tenant, session_id, model)]
        if self._previous is not None:
            keys.append(Keys(self._previous).session(tenant, session_id, model))
        return keys

    def engine(self, key: str, incarnation: str) -> str:
        """The engine's key of one life of a session."""
        return self._mac(b"engine", key, incarnation)

    def response(self, tenant: str, response_id: str) -> str:
        """The store's key of a kept response."""
        return self._mac(b"response", tenant, response_id)

    def cache_salt(self, tenant: str) -> str:
        """The salt that keeps tenants apart in the engine's prefix cache."""
        salt = self._salts.get(tenant)
        if salt is None:
            salt = self._salts[tenant] = self._mac(b"salt", tenant)
        return salt

    def _mac(self, purpose: bytes, *parts: str) -> str:
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        lengthened = [len(data).to_bytes(4, "big") + data for data in encoded]
        return hmac.digest(self._secret, purpose + b"".join(lengthened), "sha256").hex()
