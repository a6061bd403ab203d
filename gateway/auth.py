"""Who is calling: API keys (held as hashes only) and the tenants they belong to."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers

from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.settings import Settings, TenantSettings

LOCAL_TENANT = "local"


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of sessions. Every key, index and cache salt of the gateway is scoped by `name`."""

    name: str
    limits: TenantSettings


class Authenticator:
    """Maps a request's key to its tenant. Without configured keys everybody is the one local tenant
    (the settings then allow a loopback address only)."""

    def __init__(self, settings: Settings) -> None:
        self._tenants: dict[bytes, Tenant] = {}
        keys = [(bytes.fromhex(key.sha256), key.tenant) for key in settings.api_keys]
        if settings.api_key:
            keys.append((_hash(settings.api_key.get_secret_value()), "default"))
        for hashed, name in keys:
            self._tenants[hashed] = Tenant(name, settings.tenants.get(name, TenantSettings()))
        self._local = Tenant(LOCAL_TENANT, settings.tenants.get(LOCAL_TENANT, TenantSettings()))

    def tenant(self, headers: Headers) -> Tenant:
        """The caller's tenant. Raises 401 for a missing or unknown key."""
        if not self._tenants:
            return self._local
        offered = _hash(_key_of(headers))
        # Every key is compared, in constant time, so that timing says nothing about the keys held.
        found: Tenant | None = None
        for hashed, tenant in self._tenants.items():
            if hmac.compare_digest(hashed, offered):
                found = tenant
        if found is None:
            raise ApiError(
                401,
                "invalid_api_key",
                "Missing or unknown API key: send `Authorization: Bearer KEY`.",
                headers={"www-authenticate": "Bearer"},
            )
        return found


def _key_of(headers: Headers) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value:
        return value.strip()
    return headers.get("x-api-key", "")


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
