"""Runs the Triton kernels where there is no GPU: in Triton's interpreter, without disturbing the other tests.

`triton.jit` decides at decoration whether a function is compiled or interpreted, by the environment. So the
variable is set only while our kernel modules are imported, and Triton's own library functions, which other
tests may have imported compiled, are swapped for interpreted ones while the tests of this folder run.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import agentkv_serve.kernels as kernels

settings.register_profile(
    "kernels", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="package", autouse=True)
def interpreter(device: torch.device) -> Iterator[None]:
    """Interpreted kernels on a machine without a GPU; nothing on one that has it."""
    if device.type == "cuda":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        importlib.import_module("triton.experimental.gluon")  # which takes the library functions as it finds them
        import triton.language as tl
        from triton.runtime import interpreter
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        def call(function: InterpretedFunction, *args: object, **kwargs: object) -> object:
            # As the original, which leaves triton.language changed for the rest of the process.
            scope = interpreter._patch_lang(function.fn)
            try:
                return function.rewrite()(*args, **kwargs)
            finally:
                scope.restore()

        patch.setattr(InterpretedFunction, "__call__", call)
        patch.setenv("TRITON_INTERPRET", "1")
        for module in (tl, tl.standard):
            for name, member in vars(module).items():
                if isinstance(member, JITFunction):
                    patch.setattr(module, name, InterpretedFunction(member.fn))
        for info in pkgutil.iter_modules(kernels.__path__):
            if info.ispkg and importlib.util.find_spec(f"{kernels.__name__}.{info.name}.kernel"):
                importlib.import_module(f"{kernels.__name__}.{info.name}.kernel")
        importlib.import_module("agentkv_serve.check.attention")
        patch.delenv("TRITON_INTERPRET")
        yield


@pytest.fixture
def fresh(device: torch.device) -> torch.Generator:
    """New random inputs in every run; the seed is shown with a failing test's captured output."""
    generator = torch.Generator(device=device)
    print("seed", generator.seed())
    return generator


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory is NaN, or far out of range: what a kernel leaves unwritten cannot pass for a result."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def create(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

        return create

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def close() -> Callable[[torch.Tensor, torch.Tensor, float], None]:
    """Compare by relative root-mean-square error, and refuse NaN and infinities."""

    def check(got: torch.Tensor, wanted: torch.Tensor, ratio: float) -> None:
        assert got.shape == wanted.shape
        assert torch.isfinite(got).all()
        got, wanted = got.double().cpu(), wanted.double().cpu()
        error = (got - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt().clamp(min=1e-12)
        assert error < ratio, f"relative error {error:.2e} is above {ratio:.0e}"

    return check


@pytest.fixture
def paged(device: torch.device, fresh: torch.Generator) -> Callable[[int, int], torch.Tensor]:
    """Slots int64 `[count]` of a window: whole pages in random order, the first one never used (slot 0 is
    padding)."""

    def make(count: int, page: int) -> torch.Tensor:
        pages = torch.randperm(count // page + 3, generator=fresh, device=device)[: count // page + 1] + 1
        return (pages[:, None] * page + torch.arange(page, device=device)).flatten()[:count]

    return make
