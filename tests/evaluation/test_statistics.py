from __future__ import annotations

import numpy as np

from agentkv_serve.evaluation.statistics import by_task, compare, compare_shares, interval
from agentkv_serve.evaluation.summary import pairs, summarise


def test_runs_of_a_task_count_once() -> None:
    assert by_task(["a", "b", "a"], [1.0, 5.0, 3.0]) == {"a": 2.0, "b": 5.0}


def test_interval_covers_the_mean_and_is_that_of_the_normal_theory() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = interval(values)
    assert low < values.mean() < high
    assert abs((high - low) - 2 * 1.96 * values.std() / 20) < 0.03


def test_compare() -> None:
    theirs = np.array([1.0, 2.0, 3.0, 4.0])
    result = compare(theirs / 2, theirs)
    assert (result["change"], result["better_in"], result["worse_in"], result["tasks"]) == (-0.5, 4, 0, 4)
    assert result["change_95"] == [-0.5, -0.5]
    assert result["difference"] == -1.25


def test_shares_weigh_tasks_by_their_copies() -> None:
    result = compare_shares(np.array([9.0, 1.0, 0.0]), np.array([8.0, 1.0, 0.0]), np.array([10.0, 1.0, 0.0]))
    assert result["tasks"] == 2
    assert result["difference"] == round(1 / 11, 4)
    assert (result["better_in"], result["worse_in"]) == (1, 0)


def record(name: str, task: str, **kl: float | None) -> dict:
    def scores(value: float) -> dict:
        return {"n": 10, "kl": value, "n_copy": 2, "copy_right": 1, "copy_right_full": 2, "coverage": {"act": 0.5},
                "retained": {}, "kv_tokens": 100.0, "top1": 0.5}  # fmt: skip

    arms = {arm: {"scores": None if value is None else scores(value)} for arm, value in kl.items()}
    return {"name": name, "task": task, "arms": {f"{arm}@25%": value for arm, value in arms.items()}}


def test_only_what_every_policy_has_is_compared() -> None:
    records = [
        record("a0", "a", agentkv=0.2, recent=0.4),
        record("a1", "a", agentkv=0.4, recent=0.8),
        record("b0", "b", agentkv=0.1, recent=0.1),
        record("c0", "c", agentkv=9.0, recent=None),
        record("d0", "d", agentkv=9.0),
    ]
    table = summarise(records, ["agentkv", "recent"], ["25%", "50%"])
    assert list(table) == ["25%"]
    assert (table["25%"]["trajectories"], table["25%"]["tasks"]) == (3, 2)
    assert table["25%"]["policies"]["agentkv"]["kl"] == 0.2
    assert table["25%"]["policies"]["recent"]["copy_acc"] == 0.5
    paired = table["25%"]["paired"]["recent"]["kl"]
    assert (paired["difference"], paired["better_in"], paired["worse_in"]) == (0.15, 0, 1)
    assert pairs(records, "agentkv@25%", "recent@25%")["kl"]["better_in"] == 1
    assert pairs(records, "agentkv@25%", "rkv@25%") is None
