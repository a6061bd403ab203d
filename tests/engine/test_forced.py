"""Given tokens take the places of sampled ones, with their log-probability under the raw logits."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentkv_serve.engine import forced
from agentkv_serve.engine import runtime as runtime_module
from agentkv_serve.engine.policies import get_policy
from agentkv_serve.engine.turn import Turn
from agentkv_serve.engine.wire import TurnSpec


def turn(prompt: int, ids: tuple[int, ...], launched: int) -> Turn:
    spec = TurnSpec("s", 0, 128, "agentkv", np.zeros(prompt, np.int8), "plain", "start", force_ids=ids)
    made = Turn(spec=spec, policy=get_policy("agentkv"), prompt=array("q", range(prompt)), initial=0)
    made.launched = launched
    return made


@pytest.mark.parametrize(("launched", "expected"), [(5, None), (9, None), (10, 7), (11, 8), (12, None)])
def test_which_token_a_forward_has_to_yield(launched: int, expected: int | None) -> None:
    """The forward over the prompt's last token yields the first one; chunks before it yield none."""
    assert forced.next_id(turn(10, (7, 8), launched)) == expected


@pytest.mark.parametrize("logprobs", [True, False])
def test_the_sampler_s_choice_is_replaced(monkeypatch: pytest.MonkeyPatch, logprobs: bool) -> None:
    raw = torch.randn(4, 30)
    output: Any = SimpleNamespace(next_token_logits=raw.clone(), next_token_logprobs=None)

    def sampler(_: Any, logits_output: Any, info: Any, return_logprob: bool, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits_output.next_token_logits.div_(0.1)  # as the real one does at a temperature
        if return_logprob:
            logits_output.next_token_logprobs = torch.zeros(4)
        return torch.zeros(4, dtype=torch.int32)

    given = forced.gather([(1, 17), (3, 4)], torch.device("cpu"))
    monkeypatch.setattr(runtime_module, "current", lambda: SimpleNamespace(forced=given))
    ids = forced.around_sampler_forward(sampler, None, output, None, logprobs)
    assert ids.tolist() == [0, 17, 0, 4] and ids.dtype == torch.int32
    if logprobs:
        expected = raw.log_softmax(-1)
        wanted = torch.tensor([0, expected[1, 17], 0, expected[3, 4]])
        torch.testing.assert_close(output.next_token_logprobs, wanted)


def test_without_given_tokens_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forced.gather([], torch.device("cpu")) is None
    monkeypatch.setattr(runtime_module, "current", lambda: SimpleNamespace(forced=None))
    assert forced.around_sampler_forward(lambda *_: "ids", None, None, None, False) == "ids"
