"""Stored values: what is packed comes back, and sealed values stay where they were put."""

from __future__ import annotations

from array import array

import pytest

from agentkv_serve.gateway.sessions.ledger import Turn
from agentkv_serve.gateway.sessions.packing import Seal, SealError, pack_turn, unpack_turn


def test_sealed_values_are_bound_to_their_place() -> None:
    seal = Seal(bytes(32))
    stored = seal.close(b"value", b"place")
    assert seal.open(stored, b"place") == b"value"
    for wrong, name in ((stored, b"other"), (stored[:-1] + b"x", b"place"), (b"\x01value", b"place")):
        with pytest.raises(SealError):
            seal.open(wrong, name)
    with pytest.raises(SealError):
        Seal(None).open(stored, b"place")


@pytest.mark.parametrize("parent", [None, b"p" * 16])
@pytest.mark.parametrize("calls", [(), ("c1",), ("c1", "c2")])
def test_turns_survive_packing(parent: bytes | None, calls: tuple[str, ...]) -> None:
    original = Turn(b"l" * 16, parent, array("i", range(1000)), array("i", [0, 1000, 3]), 1, b"r" * 16, calls)
    assert unpack_turn(b"l" * 16, pack_turn(original)) == original
