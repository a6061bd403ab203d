"""Which queries a ring holds, against lists that are written down token by token."""

from __future__ import annotations

import numpy as np
import pytest

from agentkv_serve.engine.policies import Sampler, entry_positions, entry_rings, prompt_length
from agentkv_serve.engine.policies.sampler import KEEP_LAST, NO_RING

SAMPLERS = [Sampler(8), Sampler(1), Sampler(8, 8, 8), Sampler(4, 4, 2), Sampler(3, 5, 3), Sampler(16, 2, 100)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_newest_and_strided_tokens_are_held(sampler: Sampler) -> None:
    others: list[int] = []
    strided: list[int] = []
    before = sampler.held(0)
    assert (before == -1).all()
    for number in range(400):
        (strided if sampler.strided and (number + 1) % sampler.stride == 0 else others).append(number)
        held = sampler.held(number + 1)
        expected = others[-sampler.newest :] + (strided[-sampler.strided :] if sampler.strided else [])
        assert sorted(held[held >= 0]) == sorted(expected)
        changed = np.flatnonzero(held != before)
        assert len(changed) == 1 and held[changed[0]] == number  # the others keep their places
        before = held


def test_entries_are_found_by_label() -> None:
    labels = np.array([0, 0, 1, 1, 1, 3, 2, 0, 4, 1], dtype=np.int8)
    samplers = (Sampler(2), Sampler(3))
    assert entry_positions(labels, samplers, (0, 1, 1, 0, 0, 0)).tolist() == [8, 7, 6, 9, 4]
    assert entry_positions(labels, samplers, (NO_RING, 1, KEEP_LAST, NO_RING, NO_RING, 0)).tolist() == [-1, -1, 9, 3, 4]
    assert entry_positions(labels[:1], samplers, (0, 1, 1, 0, 0, 0)).tolist() == [0, -1, -1, -1, -1]
    assert entry_rings(samplers).tolist() == [0, 0, 1, 1, 1]


def test_the_opening_ends_with_the_first_token_that_is_no_input() -> None:
    assert prompt_length(np.array([0, 0, 5, 0, 5, 1, 0], dtype=np.int8)) == 5
    assert prompt_length(np.array([0, 5], dtype=np.int8)) == 2
