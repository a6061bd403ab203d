"""The window that a policy sees of a session, and the pool's pressure on budgets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentkv_serve.engine.compaction import CROWDED, pressure, session_window
from agentkv_serve.engine.policies import get_policy
from agentkv_serve.engine.sessions import KvState, SessionRecord
from agentkv_serve.engine.state import ModelShape, SessionSlots


@pytest.mark.parametrize(("free", "cached", "expected"), [(1000, 0, 0.0), (100, 150, 0.0), (125, 0, 0.5), (0, 0, 1.0)])
def test_pressure_begins_where_the_pool_is_crowded(free: int, cached: int, expected: float) -> None:
    """Cached prefixes give way at once, so they count as free."""
    assert CROWDED == 0.75
    allocator = SimpleNamespace(available_size=lambda: free)
    tree = SimpleNamespace(token_to_kv_pool_allocator=allocator, evictable_size=lambda: cached)
    runtime: Any = SimpleNamespace(tree=tree, scheduler=SimpleNamespace(max_total_num_tokens=1000))
    assert pressure(runtime) == pytest.approx(expected)


def test_window_of_a_session_that_was_compressed_before() -> None:
    shape = ModelShape((0, 1), 4, 2, 8, 8, 0.25, torch.float32, torch.device("cpu"))
    policy = get_policy("h2o", queries=16)
    slots = SessionSlots(shape, rows=4, slots=2, ring_queries=16, rings=1)
    pools = [torch.randn(64, 2, 8) for _ in range(2)]
    runtime: Any = SimpleNamespace(
        shape=shape,
        slots=slots,
        policies={"h2o": policy},
        rope=None,
        backend="torch",
        config=SimpleNamespace(say_phase="others"),
        kv_pool=SimpleNamespace(get_key_buffer=pools.__getitem__, get_value_buffer=pools.__getitem__),
    )
    kept = torch.tensor([0, 3, 4, 9, 17], dtype=torch.int32).expand(2, 2, 5)
    state = KvState(row=1, slot=1, policy="h2o", start=15, kept=kept, carry=torch.ones(2, 2, 5), since=20)
    record = SessionRecord("ab" * 16, 3, 0.0, kv=state)
    labels = np.zeros(31, dtype=np.int8)
    window = session_window(runtime, record, torch.arange(15), 30, 8, labels)
    assert window.positions[1, 1].tolist() == [0, 3, 4, 9, 17, *range(20, 30)]
    assert window.carry is not None and window.carry[0, 0].tolist() == [1.0] * 5 + [0.0] * 10
    assert window.query_positions is not None
    # Token 30 was launched already and has taken the place of token 14.
    assert sorted(window.query_positions.tolist()) == [-1, *range(15, 30)]
    assert window.valid.sum() == 15 and window.queries.shape == (2, 16, 4, 8)
    assert (window.length, window.since, window.keep) == (30, 20, 8)
    assert window.labels is not None and len(window.labels) == 30
    choice = policy.choose(window)
    assert choice.kept.shape == (2, 2, 8) and choice.carry is not None
    other = SessionRecord("cd" * 16, 3, 0.0, kv=state)
    assert session_window(runtime, other, torch.arange(15), 30, 8, labels).seed != window.seed
