"""Forced tokens, for evaluation: a turn runs a given transcript through everything that a sampled turn runs through.

Prompt log-probabilities would not do: SGLang drops them for streaming sessions, and a prompt is compressed at other
points than what is generated.
"""

from __future__ import annotations

from typing import Any

import torch

from agentkv_serve.engine import runtime as runtime_module
from agentkv_serve.engine.turn import Forced, Turn


def next_id(turn: Turn) -> int | None:
    """The token that a turn's running forward has to yield; None if it may sample.

    `turn.launched` counts the running forward's tokens, so the place is known under overlap scheduling too.
    """
    place = turn.launched - len(turn.prompt)
    return turn.spec.force_ids[place] if 0 <= place < len(turn.spec.force_ids) else None


def gather(given: list[tuple[int, int]], device: torch.device) -> Forced | None:
    """(row, id) pairs as tensors."""
    if not given:
        return None
    rows, ids = torch.tensor(given, dtype=torch.int64).to(device, non_blocking=True).unbind(1)
    return Forced(rows, ids)


def around_sampler_forward(
    original: Any, sampler: Any, logits_output: Any, sampling_info: Any, return_logprob: bool, *args: Any, **kwargs: Any
) -> Any:
    """Puts the given tokens in the place of the sampled ones, with their log-probability under the raw logits.

    Mutates SGLang's outputs: the sampled ids, and their log-probabilities where they were asked for.
    """
    runtime = runtime_module.current()
    forced = runtime.forced if runtime is not None else None
    if forced is None:
        return original(sampler, logits_output, sampling_info, return_logprob, *args, **kwargs)
    raw = logits_output.next_token_logits[forced.rows].float().log_softmax(-1)  # the sampler scales logits in place
    sampled = original(sampler, logits_output, sampling_info, return_logprob, *args, **kwargs)
    sampled[forced.rows] = forced.ids.to(sampled.dtype)
    if return_logprob and logits_output.next_token_logprobs is not None:
        given = raw.gather(1, forced.ids[:, None])[:, 0]
        logits_output.next_token_logprobs[forced.rows] = given.to(logits_output.next_token_logprobs.dtype)
    return sampled
