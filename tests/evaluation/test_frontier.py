from __future__ import annotations

import numpy as np
import pytest

from agentkv_serve.evaluation.frontier import Point, against, budgets_of, hindsight, points

TASKS = 6
FIXED = [Point(str(n), np.full(TASKS, float(n)), np.full(TASKS, 0.4 * 2 ** -(n / 100))) for n in (100, 200, 400)]


def auto(tokens: float, kl: float) -> Point:
    return Point("auto", np.full(TASKS, tokens), np.full(TASKS, kl))


def test_equal_tokens_and_equal_kl_are_read_off_the_fixed_budgets() -> None:
    """The fixed budgets halve the KL with every 100 tokens: 0.2, 0.1, 0.025."""
    found = against(auto(225.0, 0.05), FIXED)
    assert found["fixed_tokens_at_equal_kl"] == pytest.approx(300)
    assert found["tokens_change"] == pytest.approx(-0.25)
    assert found["fixed_kl_at_equal_tokens"] == pytest.approx(0.4 * 2**-2.25, abs=1e-6)
    assert found["kl_change"] == pytest.approx(0.05 / (0.4 * 2**-2.25) - 1, abs=1e-6)
    assert found["tokens_change_95"] == [-0.25, -0.25]


def test_beyond_the_fixed_budgets_nothing_is_said() -> None:
    found = against(auto(500.0, 0.05), FIXED)
    assert found["kl_change"] is None and found["kl_change_95"] is None
    assert found["tokens_change"] == pytest.approx(500 / 300 - 1, abs=1e-6)
    assert against(auto(300.0, 0.01), FIXED)["tokens_change"] is None


def test_a_budget_that_is_worse_than_a_smaller_one_is_not_used() -> None:
    worse = Point("300", np.full(TASKS, 300.0), np.full(TASKS, 0.3))
    assert against(auto(300.0, 0.05), [*FIXED, worse]) == against(auto(300.0, 0.05), FIXED)


def test_tasks_differ_in_what_they_need() -> None:
    """One budget for all wastes it on the easy half: auto has the same KL with fewer tokens, in almost every draw."""
    easy = np.array([True, False] * 8)
    fixed = [Point(str(n), np.full(16, float(n)), np.where(easy, 0.01, 40.0 / n)) for n in (100, 200, 400, 800)]
    chosen = Point("auto", np.where(easy, 100.0, 400.0), np.where(easy, 0.01, 0.1))
    found = against(chosen, fixed)
    assert found["fixed_tokens_at_equal_kl"] == pytest.approx(400)
    assert found["tokens_change"] == pytest.approx(250 / 400 - 1)
    low, high = found["tokens_change_95"]
    assert low < found["tokens_change"] < high < 0


def test_in_hindsight_every_task_has_the_budget_that_its_curve_asks_for() -> None:
    easy = np.array([True, False] * 8)
    fixed = [Point(str(n), np.full(16, float(n)), np.where(easy, 0.01, 40.0 / n)) for n in (100, 200, 400, 800)]
    assert hindsight(fixed, 250.0) == pytest.approx((0.01 + 0.1) / 2, rel=5e-3), "100 for the easy half, 400 for others"
    assert hindsight(FIXED, 250.0) == pytest.approx(0.4 * 2**-2.5, rel=5e-3), "tasks that are alike share one budget"
    assert hindsight(fixed, 900.0) is None


def test_only_trajectories_with_all_budgets_count() -> None:
    def record(task: str, **arms: float) -> dict:
        return {
            "task": task,
            "arms": {f"p@{b[1:]}": {"scores": {"kv_tokens": 9.0, "kl": kl}} for b, kl in arms.items()},
        }

    records = [record("a", b100=0.2, b200=0.1), record("a", b100=0.4, b200=0.3), record("b", b100=5.0)]
    found = points(records, "p", ["100", "200"])
    assert found["100"].kl.tolist() == [pytest.approx(0.3)] and found["200"].kl.tolist() == [pytest.approx(0.2)]
    with pytest.raises(ValueError, match="longer than what"):
        points(records, "p", ["100", "400"])


def test_budgets_of_two_lists() -> None:
    found = budgets_of("0.01, auto:0.02[floor=64]", "512,25%")
    assert [budget.text for budget in found] == ["512", "25%", "auto:0.01", "auto:0.02[floor=64]"]
    assert found[3].auto is not None and found[3].auto.floor == 64
