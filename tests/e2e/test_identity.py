"""With a budget that the conversation never reaches, the server says token for token what stock SGLang says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import transformers
from conftest import Fleet
from server import Conversation, Reply, Server
from transcripts import Step, agent_steps, random_steps

pytestmark = pytest.mark.engine
BUDGET = 4096


def stock_turns(server: Server, steps: Sequence[Step], **more: object) -> list[Reply]:
    """The same conversation on stock SGLang: whole prompts, no session."""
    ids: list[int] = []
    replies = []
    for step in steps:
        ids = ids + step.ids
        replies.append(server.complete(ids, step.max_tokens, **more))
        ids = ids + replies[-1].output_ids
    return replies


def session_turns(conversation: Conversation, steps: Sequence[Step], **more: object) -> list[Reply]:
    replies = []
    for step in steps:
        for label, ids in step.pieces:
            conversation.extend(ids, label)
        replies.append(conversation.send(step.max_tokens, step.initial, **more))
    return replies


def assert_identical(ours: Sequence[Reply], stock: Sequence[Reply]) -> None:
    """Ours resumed every turn after the first, held everything, and sampled the same tokens."""
    for number, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        assert mine.output_ids == theirs.output_ids
        assert mine.finish == theirs.finish
        assert mine.facts["state"] == ("resumed" if number else "new")
        assert mine.facts["evicted"] == 0
        # The last sampled token is not fed back before the next turn.
        assert mine.facts["held"] == mine.facts["logical"] - 1


@pytest.mark.parametrize("budget", [0, BUDGET])
def test_smollm2_equals_stock_cold_and_after_a_radix_hit(fleet: Fleet, smollm2: Path, budget: int) -> None:
    """Session A fills the prefix tree; session B, of the same tenant, starts from it; session C, of another, cold."""
    steps = agent_steps(transformers.AutoTokenizer.from_pretrained(smollm2), rows=(16, 6, 4))
    flags = ("--max-total-tokens", "16384")
    stock, ours = fleet.stock(smollm2, *flags), fleet.agentkv(smollm2, *flags)
    expected = stock_turns(stock.wait(), steps)
    assert len({len(reply.output_ids) for reply in expected} | {0}) > 1
    first, hit, cold = (
        session_turns(Conversation(ours.wait(), budget, family="smollm2", salt=f"{salt}-{budget}"), steps)
        for salt in ("one", "one", "two")
    )
    assert first[0].cached == cold[0].cached == 0
    assert hit[0].cached > len(steps[0].ids) // 2
    for replies in (first, hit, cold):
        assert_identical(replies, expected)


@pytest.mark.parametrize(
    "page", [1, pytest.param(16, marks=pytest.mark.long), pytest.param(64, marks=pytest.mark.long)]
)
def test_pages(module_fleet: Fleet, tiny: Callable[..., Path], page: int) -> None:
    """Under the same flags, page by page, in chunks, with other sessions in between."""
    folder = tiny("llama-gqa")
    flags = ("--page-size", str(page), "--chunked-prefill-size", "256", "--max-total-tokens", "16384")
    stock, ours = module_fleet.stock(folder, *flags), module_fleet.agentkv(folder, *flags)
    scripts = [random_steps([500, 30, 270, 1], [40, 150, 3, 20], seed=seed) for seed in range(3)]
    for script in scripts:
        script[0].pieces[0][1][:] = scripts[0][0].pieces[0][1]  # the same head
    expected = [stock_turns(stock.wait(), script, ignore_eos=True) for script in scripts]
    sessions = [Conversation(ours.wait(), BUDGET) for _ in scripts]
    replies: list[list[Reply]] = [[] for _ in scripts]
    for number in range(len(scripts[0])):
        for session, script, said in zip(sessions, scripts, replies, strict=True):
            said += session_turns(session, script[number : number + 1], ignore_eos=True)
    for said, stock_said in zip(replies, expected, strict=True):
        assert_identical_to = [reply.output_ids for reply in stock_said]
        assert [reply.output_ids for reply in said] == assert_identical_to
        assert [reply.facts["state"] for reply in said] == ["new", "resumed", "resumed", "resumed"]
