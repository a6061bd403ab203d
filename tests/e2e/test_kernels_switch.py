"""`--agentkv-kernels triton` and `torch` are one engine: equal tokens, equal keep-sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from duel import Dump, read_dumps
from fleet import Fleet
from server import Conversation, Reply
from test_identity import session_turns
from transcripts import random_steps

pytestmark = [pytest.mark.engine, pytest.mark.long]
FLAGS = ("--page-size", "16", "--chunked-prefill-size", "256", "--max-total-tokens", "4096")


def play(fleet: Fleet, folder: Path, kernels: str) -> tuple[list[Reply], list[Dump]]:
    interpreter = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    server = fleet.agentkv(folder, *FLAGS, "--agentkv-kernels", kernels, **interpreter).wait()
    conversation = Conversation(server, budget=128)
    replies = session_turns(conversation, random_steps([270, 40], [150, 20], seed=70), ignore_eos=True)
    dumps = read_dumps(server.dumps, conversation.key)
    assert f"{kernels} kernels" in server.log.read_text()
    fleet.stop()
    return replies, dumps


def test_both_kernels_keep_and_say_the_same(module_fleet: Fleet, tiny: Callable[..., Path]) -> None:
    folder = tiny("llama-gqa")
    (ours, kept), (theirs, reference) = (play(module_fleet, folder, kernels) for kernels in ("triton", "torch"))
    assert [reply.output_ids for reply in ours] == [reply.output_ids for reply in theirs]
    assert [reply.facts for reply in ours] == [reply.facts for reply in theirs]
    assert len(kept) == len(reference) >= 4
    for mine, other in zip(kept, reference, strict=True):
        assert (mine.length, mine.start) == (other.length, other.start)
        assert torch.equal(mine.kept, other.kept)
        torch.testing.assert_close(mine.queries, other.queries)
