from __future__ import annotations

import pytest
import torch

from agentkv_serve.kernels.value_norm import value_norms

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("count", "dim", "hkv", "page", "dtype"),
    [
        (1, 64, 2, 1, torch.float32),
        (63, 80, 1, 16, torch.bfloat16),
        (65, 96, 3, 64, torch.float16),
        (500, 128, 2, 16, torch.bfloat16),
        (130, 256, 1, 1, torch.float32),
    ],
    ids=str,
)
def test_norms_are_the_formula(count, dim, hkv, page, dtype, backend, device, fresh, paged, close):
    slots = paged(count, page)
    pool = [torch.full((int(slots.max()) + 1, hkv, dim), torch.nan, device=device, dtype=dtype) for _ in range(2)]
    for buffer in pool:
        buffer[slots] = torch.randn(count, hkv, dim, generator=fresh, device=device).to(dtype) * 3
        buffer[slots[0]] = 0.0
    got = value_norms(pool, slots, backend=backend)
    assert got.dtype == torch.float32
    for layer, buffer in enumerate(pool):
        close(got[layer], buffer[slots].double().norm(dim=-1).T, 1e-5)
    assert not got[..., 0].any()


def test_an_empty_window_has_no_norms_and_other_shapes_are_refused(device):
    pool = [torch.zeros(4, 2, 64, device=device)]
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert value_norms(pool, none).shape == (1, 2, 0)
    with pytest.raises(ValueError, match="slots must be int64"):
        value_norms(pool, none.int())
    with pytest.raises(ValueError, match="all layers must be alike"):
        value_norms([*pool, pool[0].half()], none)
