"""Whole turns through the engine's own planning, capture and compaction, against an independent replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentkv_serve.engine.policies import AutoBudget, get_policy, policy_names
from agentkv_serve.engine.policies.statistics import Statistics
from agentkv_serve.phase_tagger import Label, fold

from .mini_engine import MiniEngine  # first: it makes the oracle importable

from agentkv_serve.engine import progress, reclaim  # isort: skip
from oracle import Replay, Settings  # isort: skip
from oracle.rivals import HeavyHitterReplay, RecentReplay, SnapReplay, StreamingReplay  # isort: skip
from tiny_models import write_model  # isort: skip
from transcripts import random_steps  # isort: skip

BUDGET = 192
STEPS = random_steps([420, 90], [140, 20], seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", "llama-gqa")


def converse(engine: MiniEngine, budget: int = BUDGET, **more: Any) -> tuple[list[int], list[int]]:
    """Two turns; the ids of the whole conversation and the label of every token as the engine's automaton sees it."""
    ids: list[int] = []
    labels: list[int] = []
    for step in STEPS:
        for label, piece in step.pieces:
            ids += piece
            labels += [int(label)] * len(piece)
        output = engine.play(ids, labels, step.max_tokens, budget, initial=step.initial, **more)
        bank = engine.runtime.automata
        sampled, _ = bank.run("qwen3", bank.initial("qwen3", step.initial), output)
        ids, labels = ids + output, labels + sampled.tolist()
    return ids, labels


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        pytest.param("agentkv", Replay, {}, marks=pytest.mark.long),
        ("recent", RecentReplay, {}),
        pytest.param("streamingllm", StreamingReplay, {"sinks": 4, "recent": 4}, marks=pytest.mark.long),
        pytest.param("snapkv", SnapReplay, {"sinks": 0, "recent": 64}, marks=pytest.mark.long),
        ("h2o", HeavyHitterReplay, {"sinks": 0, "recent": 4}),
    ],
)
def test_what_is_kept_is_what_the_formula_keeps(
    folder: Path, name: str, kind: type[Replay], settings: dict[str, int]
) -> None:
    engine = MiniEngine(folder, get_policy(name))
    replay = kind(engine.model, replace(Settings(BUDGET, chunk=256), **settings))
    ids, labels = converse(engine)
    phases = [int(fold(label)) for label in labels]
    seen, end = 0, 0
    for step in STEPS:
        begin, end = end + len(step.ids), end + len(step.ids) + step.max_tokens
        follow = [kept for _, kept in engine.kept[seen:]]
        turn = replay.turn(
            ids[:begin],
            phases[:begin],
            lambda output, begin=begin: phases[begin + len(output) - 1],  # type: ignore[misc]
            step.max_tokens,
            follow=iter(follow),
        )
        assert turn.output_ids == ids[begin:end]
        for mine, theirs in zip(turn.compactions, engine.kept[seen:], strict=False):
            assert mine.length == theirs[0] and torch.equal(mine.kept, theirs[1].long())
        seen += len(turn.compactions)
    assert seen == len(engine.kept) >= 4
    assert engine.held == BUDGET


@pytest.mark.parametrize("name", [name for name in policy_names() if name != "full"])
def test_every_policy_holds_its_budget_and_loses_no_slot(folder: Path, name: str) -> None:
    settings: dict[str, Any] = {}
    if name == "triattention":
        mean = torch.randn(2, 4, 8, dtype=torch.complex64)
        settings = {"statistics": Statistics(mean, mean.abs() + 1)}
    policy = get_policy(name, **settings)
    engine = MiniEngine(folder, policy)
    converse(engine)
    slack = 128 if policy.prefill_slack or not policy.compress_prefill else 0
    assert BUDGET <= engine.held <= BUDGET + slack
    assert engine.facts is not None and engine.facts.held == engine.held and engine.facts.budget == BUDGET
    assert sum(engine.facts.phases.values()) == pytest.approx(engine.held, abs=0.01)


def test_given_tokens_are_compressed_where_sampled_ones_are(folder: Path) -> None:
    """Forced decoding runs the same path: the same tokens, given, lead to the same compactions."""
    policy = get_policy("agentkv")
    sampled, given = MiniEngine(folder, policy), MiniEngine(folder, policy)
    ids, labels = converse(sampled)
    end = 0
    for step in STEPS:
        begin, end = end + len(step.ids), end + len(step.ids) + step.max_tokens
        given.play(
            ids[:begin], labels[:begin], step.max_tokens, BUDGET, initial=step.initial, given=tuple(ids[begin:end])
        )
    assert [length for length, _ in given.kept] == [length for length, _ in sampled.kept]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(given.kept, sampled.kept, strict=True))


def test_a_session_does_not_give_way_to_its_own_compression(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang calls a session idle as soon as its turn has ended; its compression then looks for idle ones."""
    engine = MiniEngine(folder, get_policy("agentkv"))
    runtime = engine.runtime
    stock = {key: SimpleNamespace(session_id=key, _inflight=False, last_active_time=0.0) for key in (engine.key, "o")}
    runtime.scheduler.session_controller = stock
    finish, compress = progress.finish_turns, progress.compress
    idle: list[list[str]] = []

    def finish_beside_another(*args: Any) -> None:
        engine.session.slots["o"] = SimpleNamespace(kv=SimpleNamespace(holds_kv=True))
        finish(*args)
        idle.append([session.session_id for session in reclaim.idle_sessions(runtime)])

    def look_and_compress(*args: Any) -> bool:
        if engine.session.slots:
            idle.append([session.session_id for session in reclaim.idle_sessions(runtime)])
        return compress(*args)

    monkeypatch.setattr(progress, "finish_turns", finish_beside_another)
    monkeypatch.setattr(progress, "compress", look_and_compress)
    step = STEPS[0]
    ids = [number for _, piece in step.pieces for number in piece]
    labels = [int(label) for label, piece in step.pieces for _ in piece]
    engine.play(ids, labels, 20, BUDGET, initial=step.initial)
    assert idle == [["o"], [engine.key, "o"]]


@pytest.mark.parametrize(("epsilon", "expected"), [(1.0, 160), (0.0, 400)])
def test_budget_auto_goes_from_the_floor_to_the_cap(folder: Path, epsilon: float, expected: int) -> None:
    """A bound of 1 is content with the floor; one of 0 (of lost mass) lets nothing go below the cap."""
    auto = AutoBudget(epsilon=epsilon, floor=160, loss="lost_mass")
    engine = MiniEngine(folder, get_policy("agentkv"), auto)
    converse(engine, 400, auto=True)
    assert engine.facts is not None and engine.facts.budget == expected
    assert engine.held == expected


def test_relabelled_history_changes_nothing_that_was_captured(folder: Path) -> None:
    """The ledger may call old tokens otherwise; the rings still hold what they held."""
    first, second = (MiniEngine(folder, get_policy("agentkv")) for _ in range(2))
    ids, labels = converse(first)
    half = len(STEPS[0].ids) + STEPS[0].max_tokens
    second.play(ids[: len(STEPS[0].ids)], labels[: len(STEPS[0].ids)], STEPS[0].max_tokens, BUDGET, initial="start")
    wrong = [int(Label.TOOL)] * (half - 1) + labels[half - 1 : half + len(STEPS[1].ids)]
    second.play(ids[: len(wrong)], wrong, STEPS[1].max_tokens, BUDGET, initial=STEPS[1].initial)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.kept, second.kept, strict=True))
