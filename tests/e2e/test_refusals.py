"""What the AgentKV cache cannot serve is refused when the server starts, by name and with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fleet import PAGED, Fleet

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "sliding-window"),
        ("deepseek-mla", "MLA"),
        ("nemotron-nas-varied-heads", "Variable GQA"),
    ],
)
def test_models(module_fleet: Fleet, tiny: Callable[..., Path], name: str, reason: str) -> None:
    server = module_fleet.agentkv(tiny(name), *PAGED)
    with pytest.raises(RuntimeError, match=reason):
        server.wait()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--enable-hierarchical-cache",), "--enable-hierarchical-cache"),
        (("--speculative-algorithm", "NGRAM"), "--speculative-algorithm"),
        (("--kv-cache-dtype", "fp8_e4m3"), "--kv-cache-dtype"),
        (("--dp-size", "2"), "--dp-size"),
    ],
)
def test_flags(module_fleet: Fleet, tiny: Callable[..., Path], flags: tuple[str, ...], reason: str) -> None:
    server = module_fleet.agentkv(tiny("llama-one-layer"), *flags)
    with pytest.raises(RuntimeError, match=reason):
        server.wait()
