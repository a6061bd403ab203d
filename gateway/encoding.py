"""JSON and digests on the request path."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

DIGEST_BYTES = 16


def dumps(value: Any) -> bytes:
    """Compact JSON; numpy integer arrays are written as JSON arrays."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def canonical(value: Any) -> bytes:
    """JSON with sorted keys: equal for equal values, whatever the client's key order or spacing."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def digest(*parts: bytes) -> bytes:
    """A 16-byte digest of length-prefixed parts, so that no two part lists collide by concatenation."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()
