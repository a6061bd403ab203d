"""Tokenizers for the tagger's tests: a tiny one per kind of vocabulary, and the default model's real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentkv_serve.phase_tagger import Vocabulary

from .tiny import tiny_tokenizer

CACHE = Path(os.environ.get("AGENTKV_CACHE", "build/cache"))


@pytest.fixture(scope="session")
def tiny() -> Vocabulary:
    """ChatML control tokens; every phase marker is plain text."""
    return Vocabulary(tiny_tokenizer())


@pytest.fixture(scope="session")
def tiny_ids() -> Vocabulary:
    """ChatML control tokens; every phase marker is one id."""
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    return Vocabulary(tiny_tokenizer(plain=markers))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    folder = CACHE / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "tokenizer.json").is_file():
        pytest.fail("the default model is not in the cache; run `agentkv model`")
    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Vocabulary:
    return Vocabulary(smollm2_folder)
