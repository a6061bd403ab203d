"""The three operations of every decode step: query capture, automaton, index stream."""

from __future__ import annotations

import pytest
import torch

from agentkv_serve.kernels.capture import write, write_layers
from agentkv_serve.kernels.phase_step import step
from agentkv_serve.kernels.window_indices import window_indices

pytestmark = pytest.mark.usefixtures("poison")

BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


@BACKENDS
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "dtype"),
    [
        (1, 1, 64, torch.float32),
        (2, 9, 80, torch.bfloat16),
        (63, 3, 96, torch.float16),
        (64, 32, 128, torch.bfloat16),
        (65, 8, 256, torch.bfloat16),
    ],
)
def test_capture_writes_the_named_cells_only(tokens, heads, dim, dtype, device, fresh, backend):
    slots, layers, phases, depth = 9, 3, 4, 8
    ring = torch.randn(slots, layers, phases, depth, heads, dim, generator=fresh, device=device).to(dtype)
    cells = torch.randperm((slots - 1) * phases * depth, generator=fresh, device=device)[:tokens]
    slot, phase, position = cells // (phases * depth) + 1, cells // depth % phases, cells % depth
    slot[::5] = 0
    queries = torch.randn(tokens, heads, dim, generator=fresh, device=device).to(dtype)
    wanted = ring.clone()
    for t in range(tokens):
        wanted[slot[t], 1, phase[t], position[t]] = queries[t]
    write(ring, 1, queries, slot, phase, position, backend=backend)
    assert torch.equal(ring[1:], wanted[1:])


@BACKENDS
def test_capture_takes_strided_queries(device, fresh, backend):
    """A model hands over a slice of its fused QKV projection, whose rows are not dense."""
    ring = torch.zeros(3, 1, 4, 8, 2, 64, device=device)
    qkv = torch.randn(5, 4 * 64, generator=fresh, device=device)
    queries = qkv[:, :128].view(5, 2, 64)
    place = torch.arange(5, device=device)
    write(ring, 0, queries, torch.full((5,), 2, device=device), place % 4, place, backend=backend)
    assert torch.equal(ring[2, 0, place % 4, place], queries)


@BACKENDS
@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
def test_all_layers_of_a_step_are_written_as_one_by_one(tokens, device, fresh, backend):
    slots, layers, phases, depth, heads, dim = 9, 4, 4, 8, 3, 64
    ring = torch.randn(slots, layers, phases, depth, heads, dim, generator=fresh, device=device).bfloat16()
    cells = torch.randperm((slots - 1) * phases * depth, generator=fresh, device=device)[:tokens]
    slot, phase, position = cells // (phases * depth) + 1, cells // depth % phases, cells % depth
    slot[::5] = 0
    queries = list(torch.randn(layers, tokens, heads, dim, generator=fresh, device=device).bfloat16())
    wanted = ring.clone()
    for layer, rows in enumerate(queries):
        write(wanted, layer, rows, slot, phase, position, backend="torch")
    write_layers(ring, queries, slot, phase, position, backend=backend)
    assert torch.equal(ring[1:], wanted[1:])


def test_capture_refuses_what_does_not_fit(device):
    ring = torch.zeros(3, 1, 4, 8, 2, 64, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="queries must be"):
        write(ring, 0, torch.zeros(1, 3, 64, device=device), one, one, one)
    with pytest.raises(ValueError, match="layer 1 is outside"):
        write(ring, 1, torch.zeros(1, 2, 64, device=device), one, one, one)
    with pytest.raises(ValueError, match="phase must be int64"):
        write(ring, 0, torch.zeros(1, 2, 64, device=device), one, one.int(), one)
    with pytest.raises(ValueError, match="position has 1 entries for 2"):
        write(ring, 0, torch.zeros(2, 2, 64, device=device), one.repeat(2), one.repeat(2), one)
    with pytest.raises(ValueError, match="queries of 2 layers for the ring's 1"):
        write_layers(ring, [torch.zeros(1, 2, 64, device=device)] * 2, one, one, one)


@BACKENDS
@pytest.mark.parametrize("rows", [0, 1, 2, 63, 64, 65, 500])
def test_phase_step_is_a_table_lookup(rows, device, fresh, backend):
    states, vocabulary = 17, 1001
    table = torch.randint(states, (states, vocabulary), generator=fresh, device=device).short()
    label = torch.randint(6, (states, vocabulary), generator=fresh, device=device).to(torch.int8)
    state = torch.randint(states, (rows,), generator=fresh, device=device)
    for _ in range(3):
        ids = torch.randint(-2, vocabulary + 9, (rows,), generator=fresh, device=device)
        read, state_after = step(table, label, state, ids, backend=backend)
        clamped = [min(max(i, 0), vocabulary - 1) for i in ids.tolist()]
        assert read.dtype == torch.int8
        assert state_after.dtype == torch.int64
        assert read.tolist() == [int(label[s, i]) for s, i in zip(state.tolist(), clamped, strict=True)]
        assert state_after.tolist() == [int(table[s, i]) for s, i in zip(state.tolist(), clamped, strict=True)]
        state = state_after


def test_phase_step_refuses_what_does_not_fit(device):
    table, label = torch.zeros(2, 9, device=device).short(), torch.zeros(2, 9, device=device).to(torch.int8)
    one = torch.ones(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="int16 and int8"):
        step(label, label, one, one)
    with pytest.raises(ValueError, match="1 states for 2 ids"):
        step(table, label, one, one.repeat(2))


@BACKENDS
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_window_indices_are_row_slices(batch, page, device, fresh, backend):
    table_rows, width = 12, 640
    table = torch.randint(1, 1 << 30, (table_rows, width), generator=fresh, device=device, dtype=torch.int32)
    rows = torch.randperm(table_rows, generator=fresh, device=device)[:batch]
    start = torch.randint(0, width // page // 2, (table_rows,), generator=fresh, device=device) * page
    lens = start[rows] + torch.randint(0, width // 2, (batch,), generator=fresh, device=device)
    lens[0] = start[rows[0]]  # an empty window
    if batch > 2:
        lens[1] = start[rows[1]] - 1  # a padded row of a graph: shorter than its start
        start[rows[2]] = 0  # never compressed
    slices = [
        table[r, int(start[r]) : max(int(n), int(start[r]))] for r, n in zip(rows.tolist(), lens.tolist(), strict=True)
    ]
    wanted = torch.cat(slices).long()
    indptr, indices = window_indices(table, rows, start, lens, backend=backend)
    assert indptr.tolist() == [0, *torch.tensor([len(s) for s in slices]).cumsum(0).tolist()]
    assert indices.dtype == torch.int64
    assert torch.equal(indices, wanted)
    for dtype in (torch.int32, torch.int64):
        static = torch.full((batch * width,), -7, device=device, dtype=dtype)
        again, same = window_indices(table, rows, start, lens, out=static, backend=backend)
        assert same is static
        assert torch.equal(again, indptr)
        assert torch.equal(static[: len(wanted)].long(), wanted)
        assert (static[len(wanted) :] == -7).all()


def test_window_indices_refuse_what_does_not_fit(device):
    table = torch.zeros(3, 8, device=device, dtype=torch.int32)
    rows, start = torch.zeros(2, device=device).long(), torch.zeros(3, device=device).long()
    with pytest.raises(ValueError, match="must be int32"):
        window_indices(table.long(), rows, start, rows)
    with pytest.raises(ValueError, match="2 rows, 1 lengths"):
        window_indices(table, rows, start, rows[:1])
