from __future__ import annotations

from itertools import product

import pytest
import torch

from agentkv_serve.kernels.score import attention_mass, attention_mass_layers

pytestmark = pytest.mark.usefixtures("poison")

# (keys, queries, head size, GQA group, KV heads, page, dtype)
FAST = [
    (1, 1, 64, 1, 2, 1, torch.float32),
    (2, 5, 80, 3, 1, 16, torch.bfloat16),
    (63, 32, 64, 3, 3, 1, torch.bfloat16),
    (64, 64, 96, 4, 2, 64, torch.float16),
    (65, 33, 128, 8, 1, 16, torch.bfloat16),
    (500, 32, 128, 4, 2, 16, torch.bfloat16),
    (500, 7, 256, 1, 1, 1, torch.float32),
    (4097, 32, 64, 4, 1, 64, torch.bfloat16),
]
# Every size with every head size, group and dtype; the numbers of queries and the pages take turns.
TURNS = ((1, 1), (8, 16), (32, 64), (64, 1), (33, 16))
FULL = [
    (count, TURNS[turn % 5][0], dim, group, 1 if count > 500 else 2, TURNS[turn % 5][1], dtype)
    for turn, (count, dim, group, dtype) in enumerate(
        product(
            (1, 2, 63, 64, 65, 500, 4097),
            (64, 80, 96, 128, 256),
            (1, 3, 4, 8),
            (torch.bfloat16, torch.float16, torch.float32),
        )
    )
]


def oracle(q, valid, k, scale, group_max, pool):
    """The formula of the module's docstring in float64, one loop per index that is not summed."""
    q, k = q.double().cpu()[valid.cpu()], k.double().cpu()
    count, hkv, _ = k.shape
    group = q.shape[1] // hkv
    mass = torch.zeros(hkv, count, dtype=torch.float64)
    for head in range(hkv):
        for query in q:
            logits = query[head * group : (head + 1) * group] @ k[:, head].T * scale
            part = logits.amax(0).softmax(0) if group_max else logits.softmax(1).mean(0)
            mass[head] += part / len(q)
    if pool > 1:
        half = pool // 2
        mass = torch.stack([mass[:, max(0, i - half) : i + half + 1].amax(1) for i in range(count)], 1)
    return mass


def check(case, device, fresh, paged, close, backend, group_max=True, pool=7):
    count, number, dim, group, hkv, page, dtype = case
    slots = paged(count, page)
    size = int(slots.max()) + 1
    make = lambda *shape: torch.randn(*shape, generator=fresh, device=device)  # noqa: E731
    keys = torch.full((size, hkv, dim), torch.nan, device=device, dtype=dtype)
    keys[slots] = make(count, hkv, dim).to(dtype)
    queries = (make(number, hkv * group, dim) * 2).to(dtype)
    valid = torch.rand(number, generator=fresh, device=device) < 0.7
    valid[0] = True
    queries[~valid] = torch.nan
    scale = dim**-0.5
    got = attention_mass(
        queries, valid, keys, slots, scale=scale, group_max=group_max, pool=pool, backend=backend
    )  # fmt: skip
    assert got.dtype == torch.float32
    close(got, oracle(queries, valid, keys[slots], scale, group_max, pool), 2e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("case", FAST, ids=str)
def test_score_is_the_formula(case, device, fresh, paged, close, backend):
    check(case, device, fresh, paged, close, backend)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("case", FULL, ids=str)
def test_score_is_the_formula_on_the_full_grid(case, device, fresh, paged, close, backend):
    check(case, device, fresh, paged, close, backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("group_max", "pool"), [(False, 0), (False, 7), (True, 1), (True, 5)])
def test_score_switches(group_max, pool, device, fresh, paged, close, backend):
    check((130, 12, 64, 3, 2, 16, torch.bfloat16), device, fresh, paged, close, backend, group_max, pool)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("group_max", [True, False])
def test_weighted_score_is_the_weighted_sum_of_each_query_s_score(group_max, device, fresh, paged, close, backend):
    slots = paged(130, 16)
    keys = torch.randn(int(slots.max()) + 1, 2, 64, generator=fresh, device=device)
    queries = torch.randn(37, 6, 64, generator=fresh, device=device)
    valid = torch.rand(37, generator=fresh, device=device) < 0.7
    weights = torch.rand(37, generator=fresh, device=device)
    got = attention_mass(
        queries, valid, keys, slots, scale=0.3, group_max=group_max, pool=7, weights=weights, backend=backend
    )  # fmt: skip
    alone = lambda u: oracle(queries[u : u + 1], valid[u : u + 1], keys[slots], 0.3, group_max, 0)  # noqa: E731
    mass = sum(float(weights[u]) * alone(u) for u in range(37) if valid[u])
    close(got, torch.nn.functional.max_pool1d(mass, 7, 1, 3), 2e-5)
    with pytest.raises(ValueError, match=r"weights must be float32 \[37\]"):
        attention_mass(queries, valid, keys, slots, scale=0.3, weights=weights[:5])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_score_of_layers_is_the_score_of_each(device, fresh, paged, close, backend):
    layers, number, hkv, dim = 3, 20, 2, 64
    slots = paged(200, 16)
    make = lambda *shape: torch.randn(*shape, generator=fresh, device=device).bfloat16()  # noqa: E731
    k = [make(300, hkv, dim) for _ in range(layers)]
    ring = make(2, layers, 4, number // 4, hkv * 3, dim)
    queries = ring[1].flatten(1, 2)
    valid = torch.ones(number, dtype=torch.bool, device=device)
    got = attention_mass_layers(queries, valid, k, slots, scale=0.1, backend=backend)
    for layer in range(layers):
        alone = attention_mass(queries[layer], valid, k[layer], slots, scale=0.1, backend="torch")
        close(got[layer], alone, 2e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_score_without_valid_queries_is_zero(device, paged, backend):
    slots = paged(40, 1)
    keys = torch.ones(int(slots.max()) + 1, 2, 64, device=device)
    queries = torch.full((8, 4, 64), torch.nan, device=device)
    got = attention_mass(
        queries, torch.zeros(8, dtype=torch.bool, device=device), keys, slots, scale=1.0, backend=backend
    )
    assert torch.equal(got, torch.zeros(2, 40, device=device))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_score_does_not_depend_on_where_the_rows_lie(device, fresh, paged, close, backend):
    content = torch.randn(150, 2, 64, generator=fresh, device=device)
    queries = torch.randn(16, 4, 64, generator=fresh, device=device)
    valid = torch.ones(16, dtype=torch.bool, device=device)
    results = []
    for _ in range(2):
        slots = paged(150, 1)[torch.randperm(150, generator=fresh, device=device)]
        keys = torch.full((int(slots.max()) + 1, 2, 64), torch.nan, device=device)
        keys[slots] = content
        results.append(attention_mass(queries, valid, keys, slots, scale=0.125, backend=backend))
    assert torch.equal(*results)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_score_survives_large_logits(device, fresh, paged, close, backend):
    """Logits of some hundred must neither overflow nor lose the sum: softmax is shift invariant."""
    slots = paged(300, 1)
    keys = torch.randn(int(slots.max()) + 1, 1, 64, generator=fresh, device=device) * 20
    queries = torch.randn(4, 1, 64, generator=fresh, device=device) * 20
    valid = torch.ones(4, dtype=torch.bool, device=device)
    got = attention_mass(queries, valid, keys, slots, scale=0.125, pool=0, backend=backend)
    close(got, oracle(queries, valid, keys[slots], 0.125, True, 0), 1e-3)
    assert torch.allclose(got.sum(-1), torch.ones(1, device=device), atol=1e-3)


def test_score_refuses_shapes_that_do_not_fit(device):
    keys, slots = torch.zeros(9, 2, 64, device=device), torch.arange(4, device=device)
    queries, valid = torch.zeros(3, 4, 64, device=device), torch.ones(3, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="multiple of the pool's 2 KV heads"):
        attention_mass(queries[:, :3], valid, keys, slots, scale=1.0)
    with pytest.raises(ValueError, match=r"valid must be bool \[3\]"):
        attention_mass(queries, valid[:2], keys, slots, scale=1.0)
    with pytest.raises(ValueError, match="slots must be int64"):
        attention_mass(queries, valid, keys, slots.int(), scale=1.0)
    with pytest.raises(ValueError, match="pool must be odd"):
        attention_mass(queries, valid, keys, slots, scale=1.0, pool=4)
    with pytest.raises(ValueError, match="all layers must be alike"):
        attention_mass_layers(queries.expand(2, 3, 4, 64), valid, [keys, keys.half()], slots, scale=1.0)
    with pytest.raises(ValueError, match="unknown kernel backend 'cuda'"):
        attention_mass(queries, valid, keys, slots, scale=1.0, backend="cuda")


def test_score_of_an_empty_window_is_empty(device):
    none = torch.empty(0, dtype=torch.int64, device=device)
    got = attention_mass(
        torch.zeros(1, 2, 64, device=device), torch.ones(1, dtype=torch.bool, device=device),
        torch.zeros(4, 2, 64, device=device), none, scale=1.0,
    )  # fmt: skip
    assert got.shape == (2, 0)
