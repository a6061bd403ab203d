"""The budget that is predicted to lose little, against losses counted one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentkv_serve.engine.policies import AutoBudget, get_policy
from agentkv_serve.phase_tagger import Label

from .windows import GROUP, KV_HEADS, LAYERS, SCALE, Session, session, softmax


def ranks(made: Session, name: str) -> np.ndarray:
    """[L, Hkv, N] place of every entry in the order in which the policy would keep them."""
    policy = get_policy(name)
    scores = policy.score(made.window).keep.numpy()
    protected = policy.protection(made.window).numpy()
    result = np.empty(scores.shape, dtype=int)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            score = np.where(protected, np.inf, scores[layer, head])
            order = np.argsort(-score, kind="stable")
            result[layer, head, order] = range(150)
    return result


def expected_loss(made: Session, place: np.ndarray, budget: int, loss: str, sharp: float) -> float:
    misses, mass, pairs = 0, 0.0, 0
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            for entry, position in enumerate(made.where):
                if position < 0:
                    continue
                for member in range(GROUP):
                    logits = made.keys[layer, head] @ made.queries[layer, entry, head * GROUP + member] * SCALE
                    logits[made.positions[layer, head] > position] = -np.inf
                    attention = softmax(logits)
                    pairs += 1
                    best = int(attention.argmax())
                    misses += attention[best] > sharp and place[layer, head, best] >= budget
                    mass += attention[place[layer, head] >= budget].sum()
    return (misses if loss == "sharp_miss" else mass) / pairs


@pytest.mark.parametrize("loss", ["sharp_miss", "lost_mass"])
@pytest.mark.parametrize("name", ["agentkv", "streamingllm"])
def test_losses_are_those_of_the_buffered_queries(name: str, loss: str) -> None:
    made = session(get_policy("agentkv"))
    auto = AutoBudget(loss=loss, crossed=False, sharp=0.05, asking="all")  # type: ignore[arg-type]
    losses = auto.losses(get_policy(name), made.window)
    assert losses is not None and losses.shape == (151,)
    place = ranks(made, name)
    for budget in (0, 40, 66, 90, 149, 150):
        assert float(losses[budget]) == pytest.approx(expected_loss(made, place, budget, loss, 0.05), abs=1e-5)
    assert bool((losses.diff() <= 1e-7).all()) and losses[150] == 0


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.3])
def test_the_smallest_budget_under_the_bound(epsilon: float) -> None:
    policy = get_policy("agentkv")
    made = session(policy)
    auto = AutoBudget(epsilon=epsilon, inertia=0.0, loss="lost_mass", floor=70, step=1, crossed=False)
    budget = auto.choose(policy, made.window, cap=140)
    losses = auto.losses(policy, made.window)
    assert losses is not None
    if budget < 140:
        assert losses[budget] <= epsilon
    if budget > 70:
        assert losses[budget - 1] > epsilon
    assert 70 <= budget <= 140


@pytest.mark.parametrize("price", [0.0, 0.5, 2.0, 50.0])
def test_the_budget_that_is_worth_its_price(price: float) -> None:
    policy = get_policy("agentkv")
    window = session(policy).window
    auto = AutoBudget(price=price, inertia=0.0, loss="lost_mass", floor=66, step=1, crossed=False)
    budget = auto.choose(policy, window, cap=150)
    losses = auto.losses(policy, window)
    assert losses is not None
    cost = losses.double().numpy() + price * np.arange(len(losses)) / 1000
    assert cost[budget] == pytest.approx(cost[66:].min(), abs=1e-6)
    if not price:
        assert losses[budget] == losses.min()
    if price == 50.0:
        assert budget == 66


def test_bounds_step_and_pressure() -> None:
    policy = get_policy("agentkv")
    window = session(policy).window
    strict = AutoBudget(epsilon=0.0, loss="lost_mass", floor=80)
    assert strict.choose(policy, window, cap=120) == 120
    assert strict.choose(policy, window, cap=120, pressure=0.5) == 100
    assert strict.choose(policy, window, cap=120, pressure=9.0) == 80
    assert strict.choose(policy, window, cap=70) == 70
    lax = AutoBudget(epsilon=1.0, inertia=0.0, floor=10)
    assert lax.choose(policy, window, cap=120) == policy.least_budget
    stepped = AutoBudget(epsilon=0.2, inertia=0.0, loss="lost_mass", floor=64, step=32)
    assert stepped.choose(policy, window, cap=150) in (96, 128, 150)


def test_without_queries_the_cap_is_in_force() -> None:
    policy = get_policy("agentkv")
    window = session(policy).window
    assert window.query_positions is not None
    none = torch.full_like(window.query_positions, -1)
    empty = replace(window, query_positions=none, valid=none >= 0)
    assert AutoBudget(epsilon=1.0).choose(policy, empty, cap=144) == 144


def test_crossed_halves_predict_more_loss_than_the_policy_sees_itself() -> None:
    """Scores come from the queries that they are measured on: held-out ones are missed more often."""
    policy = get_policy("agentkv")
    window = session(policy).window
    flattering = AutoBudget(sharp=0.1, crossed=False).losses(policy, window)
    honest = AutoBudget(sharp=0.1).losses(policy, window)
    assert flattering is not None and honest is not None
    assert honest[80:140].sum() > flattering[80:140].sum()


def test_only_queries_of_generated_tokens_are_measured() -> None:
    policy = get_policy("agentkv")
    made = session(policy)
    window = made.window
    assert window.query_positions is not None and window.labels is not None
    wrote = torch.isin(window.labels, torch.tensor([Label.THINK, Label.ACT, Label.SAY], dtype=torch.int8))
    asked = wrote[window.query_positions.clamp(min=0)] & window.valid
    where = torch.where(asked, window.query_positions, -1)
    alone = replace(window, query_positions=where, valid=asked)
    found = AutoBudget(loss="lost_mass", crossed=False)._losses(policy, window, window)
    every = AutoBudget(loss="lost_mass", crossed=False, asking="all")
    torch.testing.assert_close(found, every._losses(policy, window, alone))
    assert not torch.equal(found, every._losses(policy, window, window))


def test_nothing_is_decided_before_the_model_has_written() -> None:
    policy = get_policy("agentkv")
    window = session(policy).window
    assert window.query_positions is not None and window.labels is not None
    auto = AutoBudget(epsilon=1.0, floor=70, inertia=0.0)
    assert auto.choose(policy, window, cap=140) == 70
    unread = replace(window, labels=torch.full_like(window.labels, Label.TOOL))
    assert auto.choose(policy, unread, cap=140) == 140
    assert replace(auto, asking="all").choose(policy, unread, cap=140) == 70


def test_a_budget_sinks_by_halves_and_rises_at_once() -> None:
    policy = get_policy("agentkv")
    window = session(policy).window
    lax = AutoBudget(epsilon=1.0, floor=70, step=1)
    budgets = [lax.choose(policy, replace(window, budget=before), cap=150) for before in (0, 150, 110, 90)]
    assert budgets == [75, 75, 70, 70]  # half of the window, or of the last budget: a bound of 1 wants none
    assert replace(lax, inertia=0.9).choose(policy, replace(window, budget=110), cap=150) == 99
    strict = AutoBudget(epsilon=0.0, loss="lost_mass", floor=70, step=1)
    assert strict.choose(policy, replace(window, budget=80), cap=150) >= 140
