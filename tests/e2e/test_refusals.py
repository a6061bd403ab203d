"""What the AgentKV cache cannot serve is refused when the server starts, by name and with the reason."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet import PAGED, Arena, Fleet
from server import agentkv_command
from transcripts import random_steps

from agentkv_serve.phase_tagger import Label

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "sliding-window attention"),
        ("deepseek-mla", "multi-head latent attention (MLA)"),
        ("nemotron-nas-varied-heads", "Variable GQA"),
    ],
)
def test_models_before_sglang_is_loaded(tiny: Callable[..., Path], name: str, reason: str) -> None:
    run = subprocess.run(agentkv_command(tiny(name), *PAGED), capture_output=True, text=True, timeout=180)
    assert run.returncode == 2
    assert reason in run.stderr and "--model-path" in run.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--enable-hierarchical-cache",), "--enable-hierarchical-cache"),
        (("--speculative-algorithm", "NGRAM"), "--speculative-algorithm"),
        (("--kv-cache-dtype=fp8_e4m3",), "--kv-cache-dtype"),
        (("--data-parallel-size", "2"), "--dp-size"),
        (("--kv-canary", "log"), "--kv-canary"),
        (("--lora-paths", "a=b"), "--lora-paths"),
    ],
)
def test_flags_before_sglang_is_loaded(tiny: Callable[..., Path], flags: tuple[str, ...], reason: str) -> None:
    """The launcher itself refuses, in the time that it takes to read a command line."""
    run = subprocess.run(agentkv_command(tiny("llama-one-layer"), *flags), capture_output=True, text=True, timeout=180)
    assert run.returncode == 2
    assert reason in run.stderr and "cannot be used with the AgentKV cache" in run.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--enable-hier",), "--enable-hierarchical-cache"),  # SGLang takes unambiguous beginnings of flags
        (("--attention-backend", "flex_attention"), "--attention-backend"),
    ],
)
def test_flags_by_other_names(
    module_fleet: Fleet, tiny: Callable[..., Path], flags: tuple[str, ...], reason: str
) -> None:
    """What the launcher cannot tell, the server refuses before it takes a request."""
    server = module_fleet.agentkv(tiny("llama-one-layer"), *flags)
    with pytest.raises(RuntimeError, match=reason):
        server.wait()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"sampling_params": {"beam_width": 2}}, "beam_width"),
        ({"input_embeds": [[0.0] * 64] * 8}, "input_embeds"),
    ],
)
def test_requests(arena: Arena, more: dict[str, Any], reason: str) -> None:
    """What a session cannot do is refused by name; the session and the server are well afterwards."""
    with arena.duel(128) as duel:
        duel.play(random_steps([100], [5], seed=90)[0])
        conversation = duel.conversation
        conversation.extend(range(8), Label.INPUT)
        sampling = {"max_new_tokens": 4, "temperature": 0, "custom_params": conversation.custom_params()}
        sampling |= more.get("sampling_params", {})
        body = {"input_ids": conversation.ids, **more, "sampling_params": sampling}
        if "input_embeds" in more:
            del body["input_ids"]
        response = arena.server.post("/generate", body)
        assert response.status_code == 400 and reason in response.text
        del conversation.ids[-8:], conversation.labels[-8:]
        one = duel.play(random_steps([40], [5], seed=91)[0])
        assert one.reply.facts["state"] == "resumed"
