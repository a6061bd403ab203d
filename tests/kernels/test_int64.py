"""Slot arithmetic beyond 2^31 elements: int32 offsets would wrap and read or write somewhere else.

The pools are mapped, not touched: only the pages of the rows in use become memory. Each lies in the upper
half of an allocation, so that a wrapped (negative) offset hits the untouched zeros below instead of another
object.
"""

from __future__ import annotations

import pytest
import torch

from agentkv_serve.kernels.capture import write
from agentkv_serve.kernels.compact import gather_write
from agentkv_serve.kernels.score import attention_mass
from agentkv_serve.kernels.value_norm import value_norms
from agentkv_serve.kernels.window_indices import window_indices

LIMIT = 1 << 31
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


def vast(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of more than 2^31 elements, with as many mapped elements before it if they are
    small."""
    size = torch.Size(shape).numel()
    assert size > LIMIT
    below = LIMIT if dtype.itemsize <= 2 else 0
    return torch.empty(below + size, dtype=dtype, device=device)[below:].view(shape)


@BACKENDS
def test_score_reads_beyond_int32(device, fresh, close, backend):
    dim = 128
    far = LIMIT // dim
    keys = vast((far + 64, 1, dim), torch.float16, device)
    slots = torch.cat([torch.arange(1, 20), torch.arange(far + 3, far + 30)]).to(device)
    content = torch.randn(len(slots), 1, dim, generator=fresh, device=device).half()
    keys[slots] = content
    queries = torch.randn(8, 2, dim, generator=fresh, device=device).half()
    valid = torch.ones(8, dtype=torch.bool, device=device)
    got = attention_mass(queries, valid, keys, slots, scale=0.1, backend=backend)
    near = torch.arange(len(slots), device=device)
    close(got, attention_mass(queries, valid, content, near, scale=0.1, backend="torch"), 2e-5)
    close(value_norms([keys], slots, backend=backend), value_norms([content], near, backend="torch"), 2e-5)


@BACKENDS
@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "any"])
def test_compact_moves_beyond_int32(shifted, device, fresh, backend):
    dim = 63  # moved byte by byte: wider words would count fewer elements
    far = LIMIT // dim + 1
    pool = vast((far + 64, 1, dim), torch.uint8, device)
    source = torch.cat([torch.arange(1, 20), torch.arange(far, far + 30)]).to(device)
    content = torch.randint(0, 256, (len(source), 1, dim), generator=fresh, device=device).to(torch.uint8)
    pool[source] = content
    kept = torch.arange(5, 25, device=device).view(1, 1, -1)
    gather_write([pool], [pool[:, :, :31]], source, kept, source[-20:], shifted=shifted, backend=backend)
    assert torch.equal(pool[source[-20:]], content[5:25])


@BACKENDS
def test_capture_writes_beyond_int32(device, fresh, backend):
    slots = LIMIT // (4 * 8 * 16 * 128) + 2
    ring = vast((slots, 1, 4, 8, 16, 128), torch.float16, device)
    queries = torch.randn(3, 16, 128, generator=fresh, device=device).half()
    slot = torch.tensor([slots - 1, 1, slots - 1], device=device)
    phase, position = torch.tensor([3, 0, 2], device=device), torch.tensor([7, 1, 0], device=device)
    write(ring, 0, queries, slot, phase, position, backend=backend)
    assert torch.equal(ring[slot, 0, phase, position], queries)


@BACKENDS
def test_window_indices_reach_beyond_int32(device, backend):
    width = 1 << 20
    table = vast((LIMIT // width + 4, width), torch.int32, device)
    last = table.shape[0] - 1
    table[last, width - 40 :] = torch.arange(40, device=device, dtype=torch.int32)
    start = torch.zeros(table.shape[0], dtype=torch.int64, device=device)
    start[last] = width - 40
    rows, lens = torch.tensor([last], device=device), torch.tensor([width - 2], device=device)
    _, indices = window_indices(table, rows, start, lens, backend=backend)
    assert indices.tolist() == list(range(38))
