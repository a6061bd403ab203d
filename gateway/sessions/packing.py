"""Sessions and turns as bytes: what stands in a shared store. Token ids are content: they can be encrypted."""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Mapping

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from agentkv_serve.gateway.sessions.ledger import Turn
from agentkv_serve.gateway.sessions.session import Head, Session

_HEAD = struct.Struct("<BbHII")  # has a parent, open block, bytes of call ids, tokens, run numbers
_NONCE = 12
_PLAIN, _SEALED = b"\x01", b"\x02"

_META = (
    *("key", "tenant", "model", "id", "created", "used", "incarnation", "instance"),
    *("budget", "policy", "token_limit", "retain", "spent", "turns"),
)


class SealError(Exception):
    """A stored value that this gateway cannot read: another key, or damage."""


class Seal:
    """AES-GCM around stored values when a key is given; each value is bound to the name that it stands under."""

    def __init__(self, key: bytes | None) -> None:
        self._cipher = AESGCM(key) if key else None

    def close(self, value: bytes, name: bytes) -> bytes:
        """The value as it is stored."""
        if self._cipher is None:
            return _PLAIN + value
        nonce = os.urandom(_NONCE)
        return _SEALED + nonce + self._cipher.encrypt(nonce, value, name)

    def open(self, stored: bytes, name: bytes) -> bytes:
        """The value of a stored one. Raises SealError."""
        if stored[:1] == _PLAIN and self._cipher is None:
            return stored[1:]
        if stored[:1] != _SEALED or self._cipher is None:
            raise SealError("the ledger key of this gateway does not fit the stored value")
        try:
            return self._cipher.decrypt(stored[1 : 1 + _NONCE], stored[1 + _NONCE :], name)
        except InvalidTag:
            raise SealError("the ledger key of this gateway does not fit the stored value") from None


def pack_turn(turn: Turn) -> bytes:
    """A turn without its link, under which it is stored."""
    calls = "\n".join(turn.call_ids).encode()
    head = _HEAD.pack(turn.parent is not None, turn.open_block, len(calls), len(turn.ids), len(turn.runs))
    reasoning = bytes([len(turn.reasoning)]) + turn.reasoning
    return b"".join((head, turn.parent or b"", reasoning, calls, turn.ids.tobytes(), turn.runs.tobytes()))


def unpack_turn(link: bytes, data: bytes) -> Turn:
    """The turn of `pack_turn`."""
    has_parent, open_block, calls_size, tokens, runs_size = _HEAD.unpack_from(data)
    at = _HEAD.size
    parent = data[at : at + len(link)] if has_parent else None
    at += len(link) if has_parent else 0
    reasoning = data[at + 1 : at + 1 + data[at]]
    at += 1 + len(reasoning)
    calls = data[at : at + calls_size].decode()
    at += calls_size
    ids, runs = array("i"), array("i")
    ids.frombytes(data[at : at + 4 * tokens])
    runs.frombytes(data[at + 4 * tokens : at + 4 * (tokens + runs_size)])
    return Turn(link, parent, ids, runs, open_block, reasoning, tuple(calls.split("\n")) if calls else ())


def pack_session(session: Session) -> dict[str, bytes]:
    """The fields of a session besides its ledger's turns and its epoch, which the store itself counts. Few fields:
    what the store need not see stands in one."""
    meta = {name: getattr(session, name) for name in _META}
    meta["tip"] = (session.ledger.head or b"").hex()
    return {
        "worker": session.worker.encode(),
        "kv_tokens": str(session.kv_tokens).encode(),
        "head": session.head.system + session.head.tools if session.head else b"",
        "meta": orjson.dumps(meta),
    }


def unpack_session(fields: Mapping[bytes, bytes]) -> Session:
    """The session of `pack_session`, with an empty ledger whose tip is set. Raises KeyError, ValueError."""
    meta = orjson.loads(fields[b"meta"])
    tip, head = bytes.fromhex(meta.pop("tip")), fields[b"head"]
    session = Session(**meta, worker=fields[b"worker"].decode(), kv_tokens=int(fields[b"kv_tokens"]))
    session.epoch = int(fields.get(b"epoch", b"0"))
    session.ledger.head = tip or None
    session.head = Head(head[: len(head) // 2], head[len(head) // 2 :]) if head else None
    return session
