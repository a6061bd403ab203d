"""Fixtures of the cases. SGLang is imported only when one runs: the suite's own process passes here too."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The published arguments of a server on a tiny model."""
    from .rig import server_arguments

    return server_arguments(tmp_path_factory.mktemp("model"))
