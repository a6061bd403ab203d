"""Labels, fold tables and runs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv_serve.phase_tagger import Label, Phase, fold, fold_table
from agentkv_serve.phase_tagger import labels as runs

LABELS = st.lists(st.sampled_from(Label), max_size=60)


def test_default_fold_is_the_four_phases() -> None:
    assert [fold(label) for label in Label] == [
        Phase.OTHERS,
        Phase.THINK,
        Phase.ACT,
        Phase.TOOL,
        Phase.OTHERS,
        Phase.OTHERS,
    ]


@pytest.mark.parametrize("say", ["others", "act", "think"])
def test_visible_text_can_count_as_another_phase(say: str) -> None:
    table = fold_table(say)
    assert fold(Label.SAY, table) is Phase[say.upper()]
    assert fold(Label.INPUT, table) is Phase.OTHERS


@given(LABELS)
def test_runs_and_labels_are_inverse(labels: list[Label]) -> None:
    found = runs.runs_of(labels)
    assert runs.labels_of(found) == labels
    assert all(left[2] != right[2] for left, right in pairwise(found))
    assert runs.read_runs(runs.flatten_runs(found), len(labels)) == found
    assert sum(runs.count_labels(found).values()) == len(labels)


@given(LABELS, LABELS)
def test_extending_equals_labelling_the_whole(left: list[Label], right: list[Label]) -> None:
    joined = runs.extend_runs(runs.runs_of(left), runs.runs_of(right, start=len(left)))
    assert joined == runs.runs_of(left + right)
    assert runs.shift_runs(runs.runs_of(right), len(left)) == runs.runs_of(right, start=len(left))
    assert runs.labels_of(runs.cut_runs(joined, len(left))) == left


@pytest.mark.parametrize(
    ("flat", "length", "fault"),
    [
        ([0, 5], 5, "triples"),
        ([0, 5, 9], 5, "unknown label 9"),
        ([0, 5, 1], 6, r"cover \[0, 5\)"),
        ([1, 5, 1], 5, "follows token 0"),
        ([0, 2, 1, 3, 5, 1], 5, "starts at token 3"),
        ([0, 0, 1], 0, "empty"),
        ([], 1, r"cover \[0, 0\)"),
    ],
)
def test_faulty_runs_are_refused(flat: list[int], length: int, fault: str) -> None:
    with pytest.raises(runs.RunsError, match=fault):
        runs.read_runs(flat, length)
