"""Which ports the stack takes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from agentkv_serve.children import free_port
from agentkv_serve.stack import StackError, StackSettings, choose_ports


def settings(workers: int, port: int | None = None, *engine_ports: int) -> StackSettings:
    return StackSettings(Path("m"), workers=workers, port=port, engine_ports=engine_ports)


@pytest.mark.parametrize("workers", [1, 3])
def test_free_ports_are_distinct(workers: int) -> None:
    engines, port = choose_ports(settings(workers))
    assert len({*engines, port}) == workers + 1


def test_given_ports_are_kept_and_the_rest_chosen() -> None:
    first, public = free_port(), free_port()
    engines, port = choose_ports(settings(2, public, first))
    assert port == public and engines[0] == first and engines[1] not in (first, public)


def test_wrong_ports_are_refused_by_number() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(StackError, match=f"port {number} is in use"):
            choose_ports(settings(1, number))
    with pytest.raises(StackError, match="twice"):
        choose_ports(settings(1, number, number))
    with pytest.raises(StackError, match="2 engine ports given for 1"):
        choose_ports(settings(1, None, 1, 2))
