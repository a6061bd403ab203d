import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with grouped heads."""
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama-gqa")
