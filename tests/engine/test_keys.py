"""The worker's key is taken out of the command line and kept out of the log."""

from __future__ import annotations

import os
import pickle
from types import SimpleNamespace

import pytest

from agentkv_serve.engine import keys


@pytest.mark.parametrize("given", [["--api-key", "k-1"], ["--api-key=k-1"]])
def test_a_key_on_the_command_line_goes_to_the_environment(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(keys.ENVIRONMENT, raising=False)
    assert keys.to_environment(["--page-size", "16", *given, "--admin-api-key", "a"]) == [
        "--page-size",
        "16",
        "--admin-api-key",
        "a",
    ]
    assert os.environ[keys.ENVIRONMENT] == "k-1"
    arguments = SimpleNamespace(api_key=None)
    keys.take(arguments)
    assert arguments.api_key == "k-1" and keys.ENVIRONMENT not in os.environ


@pytest.mark.parametrize("given", [["--api-key"], ["--api-key="], ["--api-key", ""]])
def test_a_key_without_a_value_is_no_open_server(given: list[str]) -> None:
    with pytest.raises(ValueError, match="--api-key has no value"):
        keys.to_environment(["--page-size", "16", *given])


def test_without_a_key_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(keys.ENVIRONMENT, raising=False)
    arguments = SimpleNamespace(api_key=None)
    keys.take(arguments)
    assert arguments.api_key is None
    assert keys.to_environment(["--tp-size", "2"]) == ["--tp-size", "2"]


def test_a_key_does_not_show_itself_in_what_is_logged() -> None:
    arguments = SimpleNamespace(api_key="k-1")
    keys.take(arguments)
    assert "k-1" not in f"server_args={ {'api_key': arguments.api_key} }"
    assert arguments.api_key == "k-1" and f"Bearer {arguments.api_key}" == "Bearer k-1"
    assert pickle.loads(pickle.dumps(arguments.api_key)) == "k-1"
