"""JSON and digests on the request path."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import orjson

DIGEST_BYTES = 16


class NestedTooDeeply(ValueError):
    """A value that JSON could be read of, but not written: orjson reads about four times as deep as it writes."""


def dumps(value: Any) -> bytes:
    """Compact JSON; numpy integer arrays are written as JSON arrays. Raises NestedTooDeeply."""
    return _write(value, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def canonical(value: Any) -> bytes:
    """JSON with sorted keys: equal for equal values, whatever the client's key order or spacing. Raises
    NestedTooDeeply."""
    return _write(value, orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def digest(*parts: bytes) -> bytes:
    """A 16-byte digest of parts and their lengths, so that no two part lists collide by concatenation."""
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return hashlib.blake2b(lengths + b"".join(parts), digest_size=DIGEST_BYTES).digest()


def _write(value: Any, options: int) -> bytes:
    try:
        return orjson.dumps(value, option=options)
    except TypeError as error:  # orjson's JSONEncodeError is no class of its own
        if "Recursion" not in str(error):
            raise
        raise NestedTooDeeply("nested too deeply") from error
