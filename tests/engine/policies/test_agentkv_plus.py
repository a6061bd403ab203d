"""Every term of agentkv_plus alone, against its formula or its promise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentkv_serve.engine.policies import get_policy
from agentkv_serve.engine.policies.transitions import expected_shares, transition_matrix
from agentkv_serve.kernels.redundancy import redundancy
from agentkv_serve.phase_tagger import Label

from .windows import GROUP, KV_HEADS, LABELS, LAYERS, LENGTH, SCALE, Session, session, union_mass

HEADS = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]
PLAIN = {"strided": 0, "score_queries": 0, "value_power": 0.0, "boundary_share": 0.0, "recent_share": 0.0}


def entries_of(made: Session) -> list[int]:
    return [entry for entry, position in enumerate(made.where) if position >= 0]


def positions_kept(made: Session, kept: torch.Tensor) -> torch.Tensor:
    return made.window.positions.gather(-1, kept)


def test_with_every_term_off_it_is_agentkv() -> None:
    plus = get_policy("agentkv_plus", say_ring=False, **PLAIN)
    ours = get_policy("agentkv")
    made = session(ours)
    torch.testing.assert_close(plus.score(made.window).keep, ours.score(made.window).keep)
    assert torch.equal(plus.protection(made.window), ours.protection(made.window))
    assert plus.samplers == ours.samplers and plus.ring_table() == ours.ring_table() and not plus.carries


def test_the_default_scores_by_attention_and_value_norm() -> None:
    policy = get_policy("agentkv_plus", score_queries=0)
    made = session(policy)
    assert len(policy.samplers) == 5 and policy.ring_table()[Label.SAY] == 4
    scores = policy.score(made.window).keep
    for layer, head in HEADS:
        mass = union_mass(made, layer, head, entries_of(made), 150, 7)
        norms = np.linalg.norm(made.values[layer, head], axis=-1)
        np.testing.assert_allclose(scores[layer, head].numpy(), mass * norms**1.5, rtol=2e-4, atol=1e-6)


def test_only_so_many_queries_are_scored_with_shared_among_the_rings() -> None:
    policy = get_policy("agentkv_plus", **{**PLAIN, "strided": 8, "score_queries": 20})
    made = session(policy)
    entries, weights, rings = policy._queries(made.window)
    assert len(set(entries.tolist())) == 20 and weights.sum() == pytest.approx(1)
    assert np.bincount(rings, minlength=5).tolist() == [4] * 5
    for ring in range(5):
        mine = [made.where[entry] for entry in entries_of(made) if entry // 16 == ring]
        newest = sorted(mine)[-2:]
        assert set(newest) <= set(made.where[entries[rings == ring]])
        assert min(mine) in made.where[entries[rings == ring]]
    scores = policy.score(made.window).keep
    expected = union_mass(made, 1, 0, entries.tolist(), 150, 7)
    np.testing.assert_allclose(scores[1, 0].numpy(), expected, rtol=2e-4, atol=1e-6)


def test_a_ring_that_holds_little_leaves_its_share_to_the_others() -> None:
    policy = get_policy("agentkv_plus", score_queries=40)
    made = session(policy)
    few = made.where.copy()
    few[16:32] = -1  # no think
    few[35:48] = -1  # three acts
    made = made.with_(query_positions=torch.from_numpy(few), valid=torch.from_numpy(few >= 0))
    _, _, rings = policy._queries(made.window)
    assert np.bincount(rings, minlength=5).tolist() == [13, 0, 3, 13, 11]  # 11 of visible text are held


def test_value_norms_for_a_part_of_the_budget() -> None:
    policy = get_policy("agentkv_plus", **{**PLAIN, "value_power": 1.0}, value_share=0.5)
    plain = get_policy("agentkv_plus", **PLAIN)
    made = session(policy)
    scores, mass = policy.score(made.window).keep, plain.score(made.window).keep
    first = (100 - 64) // 2
    for layer, head in HEADS:
        by_mass = set(np.argsort(-mass[layer, head].numpy(), kind="stable")[:first])
        assert set(np.argsort(-scores[layer, head].numpy(), kind="stable")[:first]) == by_mass


def test_action_memory_decays_by_rounds() -> None:
    policy = get_policy("agentkv_plus", **PLAIN, action_memory=2.0)
    made = session(policy)
    carry = torch.rand(LAYERS, KV_HEADS, 150) * 0.1
    scored = policy.score(replace(made.window, carry=carry))
    acts = [entry for entry in entries_of(made) if LABELS[made.where[entry]] == Label.ACT]
    assert policy.carries and scored.carry is not None and len(acts) == 8
    for layer, head in HEADS:
        noted = carry[layer, head].numpy() * 2**-0.5 + union_mass(made, layer, head, acts, 150, 1)
        np.testing.assert_allclose(scored.carry[layer, head].numpy(), noted, rtol=2e-4, atol=1e-6)
        total = union_mass(made, layer, head, entries_of(made), 150, 1) + 2 * noted
        pooled = [total[max(0, i - 3) : i + 4].max() for i in range(150)]
        np.testing.assert_allclose(scored.keep[layer, head].numpy(), pooled, rtol=2e-4, atol=1e-6)
    later = replace(made.window, carry=carry, since=LENGTH - 5)  # no action since
    again = policy.score(later).carry
    assert again is not None and bool((again >= carry).all())


def test_transition_weights_follow_the_session() -> None:
    policy = get_policy("agentkv_plus", **PLAIN, transition_mix=1.0)
    made = session(policy)
    _, weights, rings = policy._queries(made.window)
    shares = expected_shares(LABELS, policy.ring_table(), 5)
    for ring in range(5):
        assert weights[rings == ring].sum() == pytest.approx(shares[ring] / shares.sum(), rel=1e-5)


def test_expected_shares_are_those_of_a_walk() -> None:
    matrix = transition_matrix(LABELS)
    np.testing.assert_allclose(matrix.sum(1), 1)
    now, total = np.eye(6)[LABELS[-1]], np.zeros(6)
    for _ in range(16):
        now = now @ matrix
        total += now / 16
    shares = expected_shares(LABELS, (0, 1, 2, 3, 4, 0), 5, doublings=4)
    np.testing.assert_allclose(shares, [total[0] + total[5], total[1], total[2], total[3], total[4]])
    sticky = expected_shares(LABELS, (0, 1, 2, 3, -1, -1), 4, doublings=4)
    np.testing.assert_allclose(sticky.sum(), 1)


def test_both_ends_of_the_opening_are_protected() -> None:
    policy = get_policy("agentkv_plus", sinks=2, recent=8, boundary_share=0.05)
    made = session(policy, count=200, since=200, keep=100)
    kept = positions_kept(made, policy.choose(made.window).kept)
    for position in [0, 1, 2, 3, 4, 38, 39, 40, 41, 42]:  # those that a head still held
        assert torch.equal((kept == position).any(-1), (made.window.positions == position).any(-1))


def test_every_span_keeps_its_floor() -> None:
    policy = get_policy("agentkv_plus", **PLAIN, sinks=0, recent=4, span_floor=2)
    made = session(policy, count=200, since=200, keep=60)
    spans = np.cumsum(np.concatenate(([0], LABELS[1:] != LABELS[:-1])))
    kept = positions_kept(made, policy.choose(made.window).kept)
    plain = get_policy("agentkv_plus", **PLAIN, sinks=0, recent=4).score(made.window).keep
    for layer, head in HEADS:
        stays = set(kept[layer, head].tolist())
        of_entry = spans[made.positions[layer, head]]
        for span in set(of_entry.tolist()):
            inside = np.flatnonzero(of_entry == span)
            best = inside[np.argsort(-plain[layer, head, inside].numpy(), kind="stable")[:2]]
            assert set(made.positions[layer, head][best].tolist()) <= stays


def test_a_fresh_tool_result_is_kept_until_it_was_read() -> None:
    policy = get_policy("agentkv_plus", **PLAIN, sinks=0, recent=4, fresh_tool_share=0.5, fresh_tool_tokens=4)
    labels = LABELS.copy()
    labels[-50:-30] = Label.SAY
    labels[-30:-3] = Label.TOOL  # the newest 27 entries but three
    labels[-3:] = Label.GLUE
    made = session(policy).with_(labels=torch.from_numpy(labels), keep=60)
    kept = positions_kept(made, policy.choose(made.window).kept)
    fresh = (kept >= LENGTH - 30) & (kept < LENGTH - 3)
    assert (fresh.sum(-1) == 27).all()
    labels[-4:] = Label.THINK  # read by four tokens
    made = made.with_(labels=torch.from_numpy(labels))
    plain = get_policy("agentkv_plus", **PLAIN, sinks=0, recent=4)
    assert torch.equal(policy.choose(made.window).kept, plain.choose(made.window).kept)


def test_redundancy_counts_inside_think_only() -> None:
    made = session(get_policy("agentkv_plus", **PLAIN))
    plain = get_policy("agentkv_plus", **PLAIN).score(made.window).keep
    mixed = get_policy("agentkv_plus", **PLAIN, think_redundancy=0.3).score(made.window).keep
    repeats = redundancy(made.window.k_buffers, made.window.slots)
    think = torch.from_numpy(LABELS[made.positions] == Label.THINK)
    assert think.any() and torch.equal(mixed[~think], plain[~think])
    torch.testing.assert_close(mixed[think], (0.7 * plain - 0.3 * repeats)[think])


def test_the_newest_tokens_get_their_share() -> None:
    policy = get_policy("agentkv_plus", sinks=2, recent=8, boundary_share=0.0, recent_share=0.25)
    window = session(policy, keep=100).window
    protected = policy.protection(window)
    assert protected.nonzero()[:, 0].tolist() == [0, 1, *range(window.count - 25, window.count)]
    greedy = get_policy("agentkv_plus", sinks=2, boundary_share=0.0, recent_share=1.0)
    assert int(greedy.protection(window).sum()) == 100


def test_heads_take_turns() -> None:
    """Query u scores with head u mod G of each group alone."""
    policy = get_policy("agentkv_plus", score_queries=0, heads_per_query=1, value_power=0.0, pool=1)
    made = session(policy)
    entries, weights, _ = policy._queries(made.window)
    scores = policy.score(made.window).keep
    for layer in range(made.window.positions.shape[0]):
        for head in range(KV_HEADS):
            expected = np.zeros(made.window.count)
            for number, entry in enumerate(entries):
                logits = made.keys[layer, head] @ made.queries[layer, entry, head * GROUP + number % GROUP] * SCALE
                shares = np.exp(logits - logits.max())
                expected += weights[number] * shares / shares.sum()
            np.testing.assert_allclose(scores[layer, head].numpy(), expected, rtol=2e-4, atol=1e-6)
