"""The scores of R-KV (redundancy), TriAttention (trigonometric) and Expected Attention."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from agentkv_serve.kernels.expected import expected_attention, rotated_statistics
from agentkv_serve.kernels.redundancy import redundancy
from agentkv_serve.kernels.trigonometric import OFFSETS, trigonometric

pytestmark = pytest.mark.usefixtures("poison")

BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])
# (keys, head size, GQA group, KV heads, page, dtype)
CASES = [
    (1, 64, 1, 2, 1, torch.float32),
    (2, 80, 3, 1, 16, torch.bfloat16),
    (63, 64, 3, 3, 1, torch.bfloat16),
    (65, 96, 4, 2, 64, torch.float16),
    (500, 128, 8, 1, 16, torch.bfloat16),
    (130, 256, 1, 1, 1, torch.float32),
]
FULL = [
    (count, dim, group, 2, (1, 16, 64)[turn % 3], (torch.bfloat16, torch.float16, torch.float32)[turn // 3 % 3])
    for turn, (count, dim, group) in enumerate(product((1, 64, 300), (64, 80, 96, 128, 256), (1, 3, 4, 8)))
]
SHAPES = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in FULL)], ids=str
)


@pytest.fixture
def pool(device, fresh, paged):
    """Two layers of a pool that is NaN outside of the window, whose keys fall into a few clusters."""

    def make(case):
        count, dim, _, hkv, page, dtype = case
        slots = paged(count, page)
        centres = torch.randn(2, 5, hkv, dim, generator=fresh, device=device)
        which = torch.randint(5, (count,), generator=fresh, device=device)
        rows = centres[:, which] + torch.randn(2, count, hkv, dim, generator=fresh, device=device) * 0.7
        buffers = [
            torch.full((int(slots.max()) + 1, hkv, dim), torch.nan, device=device, dtype=dtype) for _ in range(2)
        ]
        for buffer, content in zip(buffers, rows, strict=True):
            buffer[slots] = content.to(dtype)
        return buffers, slots

    return make


@BACKENDS
@SHAPES
def test_redundancy_is_the_formula(case, pool, close, backend):
    buffers, slots = pool(case)
    got = redundancy(buffers, slots, backend=backend)
    for layer, buffer in enumerate(buffers):
        for head in range(case[3]):
            keys = buffer[slots, head].double().cpu()
            unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
            similarity = (unit @ unit.T).fill_diagonal_(0.0)
            for row in similarity:
                alike = (row > 0.5).nonzero().flatten().tolist()
                row[alike[-1] if alike else 0] = 0.0
            # Room for one pair that rounding puts on the other side of the threshold.
            close(got[layer, head], similarity.mean(0).softmax(0), 1e-4)


@BACKENDS
def test_redundancy_spares_the_newest_of_equal_keys(device, backend):
    keys = torch.eye(6, 64, device=device)[:, None].repeat(1, 1, 1)
    keys[1] = keys[3] = keys[5] = keys[0]  # keys 0, 1, 3 and 5 are one
    got = redundancy([keys], torch.arange(6, device=device), backend=backend)[0, 0]
    assert got[0] > got[3] > got[5]
    assert torch.allclose(got.sum(), torch.ones((), device=device))


@BACKENDS
@pytest.mark.parametrize("maximum", [False, True], ids=["mean", "max"])
@SHAPES
def test_trigonometric_is_the_formula_on_unrotated_keys(case, maximum, pool, device, fresh, close, backend):
    count, dim, group, hkv, _, _ = case
    buffers, slots = pool(case)
    pairs, position = dim // 2 if dim != 96 else 24, 70_000
    frequencies = 10_000.0 ** (-torch.arange(pairs, dtype=torch.float64, device=device) / pairs)
    mean = torch.randn(2, hkv * group, pairs, generator=fresh, device=device, dtype=torch.complex64)
    magnitude = mean.abs() + torch.rand(2, hkv * group, pairs, generator=fresh, device=device)
    # Any position does: the key's own rotation is undone and done again.
    places = torch.randint(position, (count,), generator=fresh, device=device).double()
    got = trigonometric(
        mean, magnitude, buffers, slots, frequencies, position, maximum=maximum, backend=backend
    )  # fmt: skip
    offsets = torch.tensor(OFFSETS, dtype=torch.float64, device=device)
    for layer in range(2):
        for head in range(hkv * group):
            rotated = buffers[layer][slots, head // group].double()
            rotated = torch.complex(rotated[:, :pairs], rotated[:, pairs : 2 * pairs])
            key = rotated * torch.polar(torch.ones_like(places[:, None]), -places[:, None] * frequencies)
            query = mean[layer, head].to(torch.complex128)
            phase = (query * key.conj()).angle()[:, None]
            delta = (position - places)[:, None] + offsets
            wave = (delta[:, :, None] * frequencies + phase).cos()
            each = (query.abs() * key.abs()[:, None] * wave).sum(-1)
            each = each.amax(1) if maximum else each.mean(1)
            close(got[layer, head], each + ((magnitude[layer, head] - query.abs()) * key.abs()).sum(-1), 2e-5)


@BACKENDS
@pytest.mark.parametrize("covariance", [True, False], ids=["gaussian", "mean"])
@SHAPES
def test_expected_attention_is_the_formula(case, covariance, pool, device, fresh, close, backend):
    _, dim, group, hkv, _, _ = case
    buffers, slots = pool(case)
    mean = torch.randn(2, hkv * group, dim, generator=fresh, device=device)
    root = torch.randn(2, hkv * group, dim, dim, generator=fresh, device=device) / dim**0.5
    spread = root @ root.mT if covariance else None
    got = expected_attention(mean, spread, buffers, slots, v_buffers=buffers, epsilon=0.02, backend=backend)
    for layer in range(2):
        keys = buffers[layer][slots].double()
        mass = torch.zeros(hkv, len(slots), dtype=torch.float64, device=device)
        for head in range(hkv * group):
            key = keys[:, head // group]
            logits = key @ mean[layer, head].double() / math.sqrt(dim)
            if spread is not None:
                logits += ((key @ spread[layer, head].double()) * key).sum(-1) / (2 * dim)
            mass[head // group] += logits.softmax(0) / group
        close(got[layer], (mass + 0.02) * keys.norm(dim=-1).T, 2e-5)


def test_rotated_statistics_are_those_of_rotated_samples(device, fresh, close):
    """For one future position the rotation is exact: the statistics of the rotated samples themselves."""
    dim, pairs, position = 20, 8, 1234
    samples = (
        torch.randn(50, dim, generator=fresh, device=device).double()
        @ torch.randn(dim, dim, generator=fresh, device=device).double()
    )
    frequencies = 100.0 ** (-torch.arange(pairs, device=device) / pairs)
    turned = samples.clone()
    angles = position * frequencies.double()
    turned[:, :pairs] = samples[:, :pairs] * angles.cos() - samples[:, pairs : 2 * pairs] * angles.sin()
    turned[:, pairs : 2 * pairs] = samples[:, pairs : 2 * pairs] * angles.cos() + samples[:, :pairs] * angles.sin()
    mean, covariance = rotated_statistics(samples.mean(0), samples.T.cov(), frequencies, position, horizon=1)
    close(mean, turned.mean(0), 1e-5)
    close(covariance, turned.T.cov(), 1e-5)
    with pytest.raises(ValueError, match="horizon"):
        rotated_statistics(samples.mean(0), samples.T.cov(), frequencies, position, horizon=0)


def test_other_scores_refuse_what_does_not_fit(device):
    pool, slots = [torch.zeros(9, 2, 64, device=device)], torch.arange(4, device=device)
    mean, frequencies = torch.zeros(1, 4, 32, device=device, dtype=torch.complex64), torch.ones(32, device=device)
    with pytest.raises(ValueError, match="threshold"):
        redundancy(pool, slots, threshold=1.0)
    with pytest.raises(ValueError, match="mean must be complex"):
        trigonometric(mean.real, mean.abs(), pool, slots, frequencies, 9)
    with pytest.raises(ValueError, match="do not fit 2 KV heads of size 64"):
        trigonometric(mean[:, :3], mean.abs()[:, :3], pool, slots, frequencies, 9)
    with pytest.raises(ValueError, match="magnitude"):
        trigonometric(mean, mean.abs()[:, :2], pool, slots, frequencies, 9)
    with pytest.raises(ValueError, match="offsets"):
        trigonometric(mean, mean.abs(), pool, slots, frequencies, 9, offsets=())
    with pytest.raises(ValueError, match="mean must be"):
        expected_attention(mean.abs(), None, pool, slots)
    with pytest.raises(ValueError, match="covariance must be"):
        expected_attention(torch.zeros(1, 4, 64, device=device), torch.zeros(1, 4, 64, device=device), pool, slots)
    none = slots[:0]
    assert redundancy(pool, none).shape == (1, 2, 0)
    assert trigonometric(mean, mean.abs(), pool, none, frequencies, 9).shape == (1, 4, 0)
    assert expected_attention(torch.zeros(1, 4, 64, device=device), None, pool, none).shape == (1, 2, 0)
