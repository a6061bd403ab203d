"""Every term of agentkv_plus alone, against its formula or its promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agentkv_serve.engine.policies import get_policy
from agentkv_serve.engine.policies.noted_norms import decode, encode
from agentkv_serve.phase_tagger import Label, Phase

from .windows import GROUP, KV_HEADS, LABELS, LAYERS, LENGTH, SCALE, Session, session, softmax, union_mass

HEADS = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]
OFF: dict[str, Any] = {
    "sinks": 32,
    "queries": (8, 8, 8, 8),
    "strided_share": 0.0,
    "stride": 8,
    "say_as_think": False,
    "act_weight": 1.0,
    "head_share": 1.0,
    "value_power": 0.0,
    "note_norms": False,
    "consensus": 0.0,
    "pool": 7,
    "unread": 0,
}


def entries_of(made: Session) -> list[int]:
    return [entry for entry, position in enumerate(made.where) if position >= 0]


def in_turn(made: Session, layer: int, head: int, weights: np.ndarray) -> np.ndarray:
    """[N] weighted attention mass where ring entry r scores with head r mod G of each group alone."""
    mass = np.zeros(made.window.count)
    for entry in entries_of(made):
        query = made.queries[layer, entry, head * GROUP + entry % GROUP]
        mass += weights[entry] * softmax(made.keys[layer, head] @ query * SCALE)
    return mass


def test_with_every_term_off_it_is_agentkv() -> None:
    plus, ours = get_policy("agentkv_plus", **OFF), get_policy("agentkv")
    made = session(ours)
    torch.testing.assert_close(plus.score(made.window).keep, ours.score(made.window).keep)
    assert torch.equal(plus.protection(made.window), ours.protection(made.window))
    assert plus.samplers == ours.samplers and plus.ring_table() == ours.ring_table()
    assert plus.prefill_slack == ours.prefill_slack == 0 and plus.carry_dtype is None


@pytest.mark.parametrize("note_norms", [True, False])
def test_the_default_is_its_formula(note_norms: bool) -> None:
    policy = get_policy("agentkv_plus", note_norms=note_norms)
    made = session(policy)
    held = made.where >= 0
    weights = np.where(held, 1.0, 0.0)
    weights[np.repeat(np.arange(4), policy.queries) == Phase.ACT] *= policy.act_weight  # type: ignore[attr-defined]
    weights /= weights.sum()
    own = np.empty(made.positions.shape)
    for layer, head in HEADS:
        norms = np.linalg.norm(made.values[layer, head], axis=-1)
        norms = 2 ** (np.round(np.log2(norms) * 12) / 12) if note_norms else norms
        own[layer, head] = in_turn(made, layer, head, weights) * norms
        own[layer, head] /= own[layer, head].mean()
    everywhere = np.zeros(LENGTH)
    np.add.at(everywhere, made.positions, own)
    expected = own + policy.consensus * everywhere[made.positions] / len(HEADS)  # type: ignore[attr-defined]
    np.testing.assert_allclose(policy.score(made.window).keep.numpy(), expected, rtol=1e-3, atol=1e-5)


def test_generated_phases_have_more_queries_and_visible_text_is_one_of_them() -> None:
    policy = get_policy("agentkv_plus", stride=4)
    table = policy.ring_table()
    assert table[Label.SAY] == table[Label.THINK] == Phase.THINK and table[Label.GLUE] == Phase.OTHERS
    sizes = [sampler.capacity for sampler in policy.samplers]
    assert min(sizes[Phase.THINK], sizes[Phase.ACT]) > max(sizes[Phase.OTHERS], sizes[Phase.TOOL])
    made = session(policy)
    ring = made.where[sizes[0] : sizes[0] + sizes[1]]
    assert set(LABELS[ring]) == {Label.THINK, Label.SAY} and len(set(ring)) == sizes[1]


@pytest.mark.parametrize(("share", "heads"), [(0.34, 1), (0.7, 2)])
def test_heads_take_turns(share: float, heads: int) -> None:
    policy = get_policy("agentkv_plus", **{**OFF, "head_share": share, "pool": 1})
    made = session(policy)
    scores = policy.score(made.window).keep
    entries = entries_of(made)
    for layer, head in HEADS:
        expected = np.zeros(made.window.count)
        for entry in entries:
            for turn in range(heads):
                member = (entry * heads + turn) % GROUP
                query = made.queries[layer, entry, head * GROUP + member]
                expected += softmax(made.keys[layer, head] @ query * SCALE) / heads / len(entries)
        np.testing.assert_allclose(scores[layer, head].numpy(), expected, rtol=2e-4, atol=1e-6)


def test_a_call_s_queries_weigh_more() -> None:
    policy = get_policy("agentkv_plus", **{**OFF, "act_weight": 3.0, "pool": 1})
    made = session(policy)
    scores = policy.score(made.window).keep
    entries = entries_of(made)
    acts = [entry for entry in entries if LABELS[made.where[entry]] == Label.ACT]
    rest = [entry for entry in entries if entry not in acts]
    for layer, head in HEADS:
        mass = 3 * len(acts) * union_mass(made, layer, head, acts, 150, 1)
        mass += len(rest) * union_mass(made, layer, head, rest, 150, 1)
        expected = mass / (3 * len(acts) + len(rest))
        np.testing.assert_allclose(scores[layer, head].numpy(), expected, rtol=2e-4, atol=1e-6)


def test_a_token_that_all_other_heads_want_stays() -> None:
    """Head (0, 0) scores it lowest by itself; the others' wish keeps it there, and only with the term."""
    alone, together = (get_policy("agentkv_plus", consensus=weight) for weight in (0.0, 4.0))
    made = session(alone)
    wanted = 100
    values = [buffer.clone() for buffer in made.window.v_buffers]
    for layer, head in HEADS:
        for entry in np.flatnonzero(made.positions[layer, head] == wanted):
            values[layer][made.window.slots[int(entry)], head] *= 0.0 if (layer, head) == (0, 0) else 1e3
    made = made.with_(v_buffers=values)
    (entry,) = np.flatnonzero(made.positions[0, 0] == wanted).tolist()
    kept = [entry in policy.choose(made.window).kept[0, 0].tolist() for policy in (alone, together)]
    assert kept == [False, True]


def test_norms_of_values_are_read_once() -> None:
    """A later compression scores as if it read all values again, and does not: those of kept entries are gone here."""
    policy = get_policy("agentkv_plus")
    made = session(policy)
    first = policy.score(made.window)
    assert first.carry is not None and first.carry.dtype == torch.uint8
    fresh = LENGTH - made.window.since
    notes = first.carry.clone()
    notes[..., -fresh:] = 0
    values = [torch.full_like(buffer, torch.nan) for buffer in made.window.v_buffers]
    for gone, buffer in zip(values, made.window.v_buffers, strict=True):
        gone[made.window.slots[-fresh:]] = buffer[made.window.slots[-fresh:]]
    later = policy.score(replace(made.window, carry=notes, v_buffers=values))
    assert torch.equal(later.keep, first.keep)
    assert later.carry is not None and torch.equal(later.carry, first.carry)
    choice = policy.choose(made.window)
    assert choice.carry is not None and torch.equal(choice.carry, first.carry.gather(-1, choice.kept))


def test_a_noted_norm_is_within_three_percent() -> None:
    norms = torch.logspace(-2.9, 3.3, 5000)
    rounded = decode(encode(norms))
    assert ((rounded / norms).log().abs() < 0.03).all() and (rounded.diff() >= 0).all()
    assert encode(torch.tensor([0.0, 1e-9, 1.0, 1e9, torch.inf])).tolist() == [1, 1, 121, 255, 255]


def test_no_query_no_preference() -> None:
    policy = get_policy("agentkv_plus")
    made = session(policy)
    none = torch.full((len(made.where),), -1)
    window = replace(made.window, query_positions=none, valid=none >= 0)
    scores = policy.score(window).keep
    assert scores.isfinite().all() and not scores.any()
