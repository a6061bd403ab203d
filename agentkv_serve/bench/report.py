"""What every benchmark prints: the machine, the versions, the configuration, medians with their spread."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("agentkv-serve", "sglang", "torch", "triton", "transformers")


def machine() -> dict[str, Any]:
    """Describes the machine and the software: CPU, cores we may use, memory in GiB, load, GPU, versions."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "gpu": _gpu_name(),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := _version(name))},
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Returns median, min, max and the number of values.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("nothing was measured")
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def show_spread(value: dict[str, Any], digits: int = 2) -> str:
    """Writes a spread as `median [min, max]`."""
    return f"{value['median']:.{digits}f} [{value['min']:.{digits}f}, {value['max']:.{digits}f}]"


def publish(result: dict[str, Any], title: str, as_json: bool, console: Console | None = None) -> None:
    """Prints a result with nested settings: one JSON object, or a table of its leaves."""
    if as_json:
        print(json.dumps(result, indent=2))
        return
    table = Table("", "", title=title, show_header=False)
    for name, value in _leaves(result):
        table.add_row(name, value)
    (console or Console()).print(table)


def _leaves(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict) and value.keys() == {"median", "min", "max", "n"}:
        return [(path, f"{show_spread(value)} over {value['n']}")]
    if isinstance(value, dict):
        dotted = f"{path}." if path else ""
        return [leaf for name, inner in value.items() for leaf in _leaves(inner, f"{dotted}{name}")]
    return [(path, f"{value:.3f}" if isinstance(value, float) else str(value))]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gpu_name() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
