"""With a budget that the conversation never reaches, the server says token for token what stock SGLang says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import transformers
from fleet import PAGED, Fleet
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


def test_smollm2_equals_stock_cold_and_after_a_radix_hit(fleet: Fleet, smollm2: Path) -> None:
    """Session A fills the prefix tree; B, of its tenant, starts from it; C, of another, cold; D has no budget."""
    steps = agent_steps(transformers.AutoTokenizer.from_pretrained(smollm2), rows=(10, 4, 3))
    flags = ("--max-total-tokens", "16384")
    stock, ours = fleet.stock(smollm2, *flags), fleet.agentkv(smollm2, *flags)
    expected = stock_turns(stock.wait(), steps)
    assert all(len(reply.output_ids) > 5 for reply in expected)
    first, hit, cold, full = (
        session_turns(Conversation(ours.wait(), budget, family="smollm2", salt=salt), steps)
        for salt, budget in (("one", BUDGET), ("one", BUDGET), ("two", BUDGET), ("one", 0))
    )
    assert first[0].cached == cold[0].cached == 0
    assert hit[0].cached > len(steps[0].ids) // 2
    for replies in (first, hit, cold, full):
        assert_identical(replies, expected)


@pytest.mark.parametrize(
    "flags",
    [
        PAGED,
        pytest.param(("--page-size", "1", "--chunked-prefill-size", "256"), marks=pytest.mark.long),
        pytest.param(("--page-size", "64", "--chunked-prefill-size", "512"), marks=pytest.mark.long),
    ],
    ids=lambda flags: "-".join(flags[1:4:2]),
)
def test_pages_and_chunks(fleet: Fleet, tiny: Callable[..., Path], flags: tuple[str, ...]) -> None:
    """Under the same flags, three sessions in turns that share their first 400 tokens."""
    folder = tiny("llama-gqa")
    stock, ours = fleet.stock(folder, *flags), fleet.agentkv(folder, *flags)
    head = random_steps([400], [0])[0].pieces
    scripts = [random_steps([150, 30, 270, 1], [40, 150, 3, 20], seed=seed) for seed in range(3)]
    for script in scripts:
        script[0].pieces[:0] = head
    expected = [stock_turns(stock.wait(), script, ignore_eos=True) for script in scripts]
    sessions = [Conversation(ours.wait(), BUDGET) for _ in scripts]
    replies: list[list[Reply]] = [[] for _ in scripts]
    for number in range(len(scripts[0])):
        for session, script, said in zip(sessions, scripts, replies, strict=True):
            said += session_turns(session, script[number : number + 1], ignore_eos=True)
    assert [said[0].cached > 300 for said in replies] == [False, True, True]
    for session, said, stock_said in zip(sessions, replies, expected, strict=True):
        assert_identical(said, stock_said)
        session.close()
