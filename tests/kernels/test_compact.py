from __future__ import annotations

import pytest
import torch

from agentkv_serve.kernels.compact import gather_write

pytestmark = pytest.mark.usefixtures("poison")

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn]


def pools(layers, size, hkv, dim, v_dim, dtype, fresh, device):
    def make(width):
        raw = torch.randint(
            0, 256, (size, hkv, width * dtype.itemsize), generator=fresh, device=device, dtype=torch.uint8
        )
        return raw.view(dtype)

    return [make(dim) for _ in range(layers)], [make(v_dim) for _ in range(layers)]


def bits(buffer):
    return buffer.view(torch.uint8)


def expected(buffers, source, kept, target):
    """One row at a time, from a copy made before."""
    result = [bits(buffer).clone() for buffer in buffers]
    for layer, buffer in enumerate(buffers):
        for head in range(buffer.shape[1]):
            for j, slot in enumerate(target.tolist()):
                result[layer][slot, head] = bits(buffer)[int(source[kept[layer, head, j]]), head]
    return result


def keep_sets(layers, hkv, count, keep, fresh, device):
    order = torch.rand(layers, hkv, count, generator=fresh, device=device).argsort(-1)
    return order[..., :keep].sort(-1).values


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "any"])
@pytest.mark.parametrize(
    ("count", "keep", "hkv", "dim", "v_dim", "page", "dtype"),
    [
        (1, 1, 1, 64, 64, 1, torch.bfloat16),
        (2, 1, 2, 80, 80, 1, torch.float16),
        (65, 64, 3, 96, 64, 16, torch.float32),
        (64, 63, 2, 128, 128, 64, torch.uint8),
        (500, 129, 1, 256, 256, 16, torch.float8_e4m3fn),
        (130, 65, 2, 5, 3, 1, torch.bfloat16),
    ],
)
def test_compact_moves_bits(count, keep, hkv, dim, v_dim, page, dtype, shifted, device, fresh, paged, backend):
    slots = paged(count, page)
    k, v = pools(2, int(slots.max()) + 1, hkv, dim, v_dim, dtype, fresh, device)
    kept = keep_sets(2, hkv, count, keep, fresh, device)
    target = slots[count - keep :]
    wanted_k, wanted_v = expected(k, slots, kept, target), expected(v, slots, kept, target)
    gather_write(k, v, slots, kept, target, shifted=shifted, backend=backend)
    for layer in range(2):
        assert torch.equal(bits(k[layer]), wanted_k[layer])
        assert torch.equal(bits(v[layer]), wanted_v[layer])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("case", range(6))
def test_compact_onto_any_slots(case, device, fresh, backend):
    """Targets drawn from the source's own slots in random order, kept in random order: the worst overlap."""
    count, keep, size = 90, 40, 100
    k, v = pools(2, size, 2, 64, 64, torch.bfloat16, fresh, device)
    slots = torch.randperm(size, generator=fresh, device=device)
    source, target = slots[:count], slots[torch.randperm(size, generator=fresh, device=device)[:keep]]
    kept = torch.randint(count, (2, 2, keep), generator=fresh, device=device)
    wanted_k, wanted_v = expected(k, source, kept, target), expected(v, source, kept, target)
    gather_write(k, v, source, kept, target, backend=backend)
    for layer in range(2):
        assert torch.equal(bits(k[layer]), wanted_k[layer])
        assert torch.equal(bits(v[layer]), wanted_v[layer])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("fresh_slots", [0, 13, 40])
def test_compact_copies_out_of_a_shared_prefix(fresh_slots, device, fresh, backend):
    """The first targets are new slots (copy-on-compact): the shared source slots stay bit-identical."""
    count, keep, size = 90, 40, 200
    k, v = pools(2, size, 2, 64, 64, torch.bfloat16, fresh, device)
    source = torch.arange(1, count + 1, device=device)
    target = source[count - keep :].clone()
    target[:fresh_slots] = torch.arange(150, 150 + fresh_slots, device=device)
    kept = keep_sets(2, 2, count, keep, fresh, device)
    before = [bits(buffer).clone() for buffer in k]
    wanted_k, wanted_v = expected(k, source, kept, target), expected(v, source, kept, target)
    gather_write(k, v, source, kept, target, shifted=True, backend=backend)
    for layer in range(2):
        assert torch.equal(bits(k[layer]), wanted_k[layer])
        assert torch.equal(bits(v[layer]), wanted_v[layer])
        untouched = torch.ones(size, dtype=torch.bool, device=device)
        untouched[target] = False
        assert torch.equal(bits(k[layer])[untouched], before[layer][untouched])


def test_compact_does_not_care_where_the_rows_lie(device, fresh):
    content = torch.randn(60, 2, 64, generator=fresh, device=device)
    kept = keep_sets(1, 2, 60, 20, fresh, device)
    results = []
    for _ in range(2):
        slots = torch.randperm(80, generator=fresh, device=device)[:60]
        k, v = (torch.zeros(80, 2, 64, device=device) for _ in range(2))
        k[slots], v[slots] = content, -content
        gather_write([k], [v], slots, kept, slots[40:], shifted=True)
        results.append((k[slots[40:]], v[slots[40:]]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0], -results[0][1])


def test_compact_refuses_what_does_not_fit(device):
    k = [torch.zeros(10, 2, 64, device=device)]
    slots = torch.arange(8, device=device)
    kept = torch.tensor([[[0, 1], [2, 5]]], device=device)
    with pytest.raises(ValueError, match=r"kept must be \[1, 2, 3\]"):
        gather_write(k, k, slots, kept, slots[:3])
    with pytest.raises(ValueError, match="v_buffers"):
        gather_write(k, [*k, *k], slots, kept, slots[:2])
    if device.type == "cpu":
        with pytest.raises(ValueError, match="same place of the source's tail"):
            gather_write(k, k, slots, kept, slots[:2], shifted=True)
        with pytest.raises(ValueError, match="ascend"):
            gather_write(k, k, slots, kept.flip(-1), slots[6:], shifted=True)
