from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv_serve.kernels.select import top_keep

pytestmark = pytest.mark.usefixtures("poison")

INF, NAN = float("inf"), float("nan")


def oracle(scores: list[float], keep: int, protected: list[bool]) -> list[int]:
    """Sort by (protected first, score down, position up)."""
    limit = torch.finfo(torch.float32).max
    value = [-limit if s != s else max(-limit, min(limit, s)) for s in scores]
    order = sorted(range(len(scores)), key=lambda i: (not protected[i], -value[i], i))
    return sorted(order[:keep])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@settings.get_profile("kernels")
@given(data=st.data())
def test_select_is_a_stable_sort(data, device, backend):
    levels = st.sampled_from([-INF, -1.5, -0.0, 0.0, 1e-42, 0.25, 0.25000003, 1.0, 3e38, INF, NAN])
    scores = data.draw(st.lists(st.one_of(levels, st.floats(width=32)), min_size=1, max_size=90))
    protected = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    keep = data.draw(st.integers(sum(protected), len(scores)))
    got = top_keep(
        torch.tensor(scores, dtype=torch.float32, device=device), keep,
        torch.tensor(protected, device=device), backend=backend,
    )  # fmt: skip
    assert got.tolist() == oracle(torch.tensor(scores, dtype=torch.float32).tolist(), keep, protected)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 500, 4097])
@pytest.mark.parametrize("levels", [3, 1 << 20], ids=["ties", "distinct"])
def test_select_on_ragged_sizes(count, levels, device, fresh, backend):
    scores = torch.randint(-levels, levels, (2, 3, count), generator=fresh, device=device).float() / 7
    protected = torch.rand(2, 3, count, generator=fresh, device=device) < 0.1
    for keep in {int(protected.sum(-1).max()), (count + 1) // 2, count}:
        if keep < int(protected.sum(-1).max()):
            continue
        got = top_keep(scores, keep, protected, backend=backend)
        assert got.dtype == torch.int64
        assert got.shape == (2, 3, keep)
        for row, line, mask in zip(got.view(6, -1), scores.view(6, -1), protected.view(6, -1), strict=True):
            assert row.tolist() == oracle(line.tolist(), keep, mask.tolist())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_select_shares_one_mask_between_rows(device, fresh, backend):
    scores = torch.randn(4, 100, generator=fresh, device=device)
    protected = torch.zeros(100, dtype=torch.bool, device=device)
    protected[:4] = protected[-8:] = True
    got = top_keep(scores, 20, protected, backend=backend)
    assert torch.equal(got, top_keep(scores, 20, protected.expand(4, 100), backend=backend))
    for row in got.tolist():
        assert {0, 1, 2, 3, *range(92, 100)} <= set(row)
        assert row == sorted(set(row))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_select_unchecked_keeps_the_first_protected(device, backend):
    scores = torch.arange(50, device=device).float()
    protected = torch.ones(50, dtype=torch.bool, device=device)
    assert top_keep(scores, 5, protected, validate=False, backend=backend).tolist() == [0, 1, 2, 3, 4]


def test_select_refuses_what_cannot_be_kept(device):
    scores, protected = torch.zeros(2, 10, device=device), torch.ones(10, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="cannot keep 11 of 10"):
        top_keep(scores, 11, protected)
    with pytest.raises(ValueError, match="10 protected tokens do not fit 9"):
        top_keep(scores, 9, protected, validate=True)
    with pytest.raises(ValueError, match="float32"):
        top_keep(scores.half(), 5, protected)
    with pytest.raises(ValueError, match="protected must be bool"):
        top_keep(scores, 5, protected[:9])
    assert top_keep(scores, 0, ~protected).shape == (2, 0)
