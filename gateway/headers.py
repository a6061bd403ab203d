"""The headers of a request."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope


class RequestHeaders(Headers):
    """Headers that many places look into: indexed once instead of searched each time."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._values: dict[str, list[str]] = {}
        for name, value in self.raw:
            self._values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))

    def __contains__(self, key: Any) -> bool:
        return isinstance(key, str) and key.lower() in self._values

    def __getitem__(self, key: str) -> str:
        return self._values[key.lower()][0]

    def get(self, key: str, default: Any = None) -> Any:
        found = self._values.get(key.lower())
        return found[0] if found else default

    def getlist(self, key: str) -> list[str]:
        return self._values.get(key.lower(), [])
