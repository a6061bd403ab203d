"""No Triton path reads a value on the host: all of them can run inside a CUDA graph, or at least never wait for the
GPU.

Meta tensors have no content, so any read of one (`item`, `tolist`, `if tensor`, boolean indexing) raises. The kernels
themselves are replaced by recorders of their launches.
"""

from __future__ import annotations

import pytest
import torch

from agentkv_serve.kernels.capture import write
from agentkv_serve.kernels.compact import gather_write
from agentkv_serve.kernels.phase_step import step
from agentkv_serve.kernels.score import attention_mass_layers
from agentkv_serve.kernels.select import top_keep
from agentkv_serve.kernels.value_norm import value_norms
from agentkv_serve.kernels.window_indices import window_indices

META = torch.device("meta")


class Launches:
    """Stands for a kernel; counts its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **kwargs: self.grids.append(grid)


@pytest.fixture
def recorded(monkeypatch):
    """Replace the named kernels of an operation by recorders."""
    import importlib

    def replace(operation: str, *names: str) -> list[Launches]:
        module = importlib.import_module(f"agentkv_serve.kernels.{operation}.kernel")
        recorders = [Launches() for _ in names]
        for name, recorder in zip(names, recorders, strict=True):
            monkeypatch.setattr(module, name, recorder)
        return recorders

    return replace


def index(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)


def test_meta_tensors_notice_host_reads():
    # Which of the two is torch's matter, by operation; that reading a meta tensor fails is what these tests rest on.
    with pytest.raises((RuntimeError, NotImplementedError)):
        index(3).sum().item()


def test_capture_reads_nothing(recorded):
    (launches,) = recorded("capture", "_write_kernel")
    ring = torch.empty(5, 2, 4, 8, 6, 64, device=META)
    write(ring, 1, torch.empty(7, 6, 64, device=META), index(7), index(7), index(7), backend="triton")
    assert launches.grids == [(7, 1)]


def test_phase_step_reads_nothing(recorded):
    (launches,) = recorded("phase_step", "_step_kernel")
    table = torch.empty(3, 50, dtype=torch.int16, device=META)
    label, state = step(table, table.to(torch.int8), index(200), index(200), backend="triton")
    assert (label.shape, state.shape) == ((200,), (200,))
    assert launches.grids == [(2,)]


def test_window_indices_with_out_reads_nothing(recorded):
    (launches,) = recorded("window_indices", "_fill_kernel")
    table = torch.empty(9, 64, dtype=torch.int32, device=META)
    window_indices(table, index(4), index(9), index(4), out=index(99), backend="triton")
    assert len(launches.grids) == 1


def test_compression_reads_nothing(recorded):
    passes = recorded("score", "_lse_kernel", "_mass_kernel", "_pool_kernel")
    (normed,) = recorded("value_norm", "_norm_kernel")
    (selected,) = recorded("select", "_select_kernel")
    (moved,) = recorded("compact", "_shift_kernel")
    pool = [torch.empty(500, 2, 64, device=META) for _ in range(3)]
    queries, valid = torch.empty(3, 8, 6, 64, device=META), torch.empty(8, dtype=torch.bool, device=META)
    scores = attention_mass_layers(queries, valid, pool, index(400), scale=1.0, backend="triton")
    scores *= value_norms(pool, index(400), backend="triton")
    kept = top_keep(scores, 64, torch.empty(400, dtype=torch.bool, device=META), backend="triton")
    gather_write(pool, pool, index(400), kept, index(64), shifted=True, backend="triton")
    # One launch each, for all layers and heads.
    assert [len(one.grids) for one in (*passes, normed, selected, moved)] == [1] * 6
