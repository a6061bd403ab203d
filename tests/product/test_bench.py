"""What benchmarks compute and print."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest

from agentkv_serve.bench.decode import SKIP, Run, Workload, check_held, prompt, results, turn
from agentkv_serve.bench.report import machine, publish, show_spread, spread
from agentkv_serve.model import default_model
from agentkv_serve.phase_tagger import Vocabulary
from agentkv_serve.stack import StackError

WORK = Workload("http://127.0.0.1:1", "key", list(range(1000)), 100, 256, "smollm2")


def run(gap: float, held: int | None, tokens: int = 20) -> Run:
    """A run whose tokens come `gap` seconds apart, the uncounted first ones more slowly."""
    arrivals = list(accumulate([5 * gap] * SKIP + [gap] * (tokens - SKIP)))
    return Run(arrivals, {} if held is None else {"held": held})


def test_speed_leaves_the_first_tokens_out() -> None:
    assert run(0.05, None).tok_s == pytest.approx(20)


def test_ratios_are_made_pair_by_pair() -> None:
    runs = {
        "full": [run(0.1, None), run(0.2, None)],
        "window": [run(0.08, 1100), run(0.16, 1100)],
        "budget": [run(0.05, 256), run(0.1, 256)],
    }
    found = results(runs, context=1000, tokens=100)
    assert found["ratio"] == pytest.approx({"median": 2, "min": 2, "max": 2, "n": 2})
    assert found["ratio_same_path"]["median"] == pytest.approx(1.6)
    assert found["full_tok_s"] == pytest.approx({"median": 7.5, "min": 5, "max": 10, "n": 2})


def test_a_tokens_time_is_split() -> None:
    """With 20 ms + 0.1 ms a KV token on our path, and 7 ms more on the stock one, just that is found."""
    length = 1000 + 100 / 2
    window, budget = 0.020 + 0.0001 * length, 0.020 + 0.0001 * 256
    runs = {"full": [run(window + 0.007, None)], "window": [run(window, 1100)], "budget": [run(budget, 256)]}
    split = results(runs, context=1000, tokens=100)["where_a_token_goes_ms"]
    assert split == pytest.approx(
        {
            "whatever_the_kv_length": 20,
            "attention_over_the_window": 0.1 * length,
            "attention_over_the_budget": 25.6,
            "stock_path_more_than_ours": 7,
        }
    )


@pytest.mark.parametrize(
    ("mode", "held", "fits"),
    [
        ("full", None, True),
        ("full", 512, False),
        ("window", 1100, True),
        ("window", 900, False),
        ("window", None, False),
        ("budget", 256, True),
        ("budget", 256 + 128 + 16, True),
        ("budget", 256 + 128 + 17, False),
        ("budget", None, False),
    ],
)
def test_a_run_that_held_something_else_does_not_count(mode: str, held: int | None, fits: bool) -> None:
    if fits:
        check_held(run(0.1, held), WORK, mode)
    else:
        with pytest.raises(StackError, match=f"as {mode} held {held}"):
            check_held(run(0.1, held), WORK, mode)


@pytest.mark.parametrize(("mode", "budget"), [("window", 2200), ("budget", 256)])
def test_turns_cover_their_prompt(mode: str, budget: int) -> None:
    told = turn(WORK, "s", mode)
    runs = told["runs"]
    assert runs[0] == 0 and runs[-2] == 1000 and runs[1:-2:3] == runs[3::3]
    assert (told["budget"], told["force_window"]) == (budget, mode == "window")
    json.dumps(told)


def test_prompts_have_the_length_asked_for() -> None:
    vocabulary = Vocabulary(default_model())
    ids = prompt(vocabulary, 7000)
    assert len(ids) == 7000 and ids[:5000] == prompt(vocabulary, 5000)
    assert len(set(ids)) > 300


def test_spread() -> None:
    assert spread([3, 1, 2]) == {"median": 2, "min": 1, "max": 3, "n": 3}
    assert show_spread(spread([1.0, 2.0])) == "1.50 [1.00, 2.00]"
    with pytest.raises(ValueError, match="nothing was measured"):
        spread([])


def test_publish_prints_one_json_object_or_every_leaf(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"speed": spread([1.0, 2.0, 3.0]), "configuration": {"tokens": 5}, "machine": machine()}
    publish(result, "decode", as_json=True)
    assert json.loads(capsys.readouterr().out)["configuration"] == {"tokens": 5}
    publish(result, "decode", as_json=False)
    table = capsys.readouterr().out
    assert "2.00 [1.00, 3.00] over 3" in table and "configuration.tokens" in table and "machine.cores" in table


def test_the_machine_is_described() -> None:
    told = machine()
    assert told["cores"] >= 1 and told["memory_gib"] > 0 and told["cpu"] and told["agentkv-serve"]
