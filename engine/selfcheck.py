"""Verifies at start that SGLang is the pinned version and that every hook is in place.

SGLang only logs a failing plug-in and goes on; a worker without one of our hooks would corrupt sessions, so it stops.
"""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
import sys
from typing import NoReturn

from agentkv_serve.engine import SGLANG_VERSION


def stop(reason: str) -> NoReturn:
    """Ends this process at once, with the reason. SGLang's launcher ends the server when a child dies."""
    print(f"AgentKV: {reason}", file=sys.stderr, flush=True)
    os._exit(70)


def require_version() -> None:
    """Raises RuntimeError unless the installed SGLang is the one that the hooks were written for."""
    installed = importlib.metadata.version("sglang")
    if installed != SGLANG_VERSION:
        raise RuntimeError(
            f"SGLang {installed} is installed, this plug-in is written for {SGLANG_VERSION}; install that version"
        )


def missing_targets() -> list[str]:
    """Hook targets that do not exist in the installed SGLang."""
    from agentkv_serve.engine.hooks import HOOKS

    missing = []
    for target, _, _ in HOOKS:
        owner, _, name = target.rpartition(".")
        try:
            getattr(pkgutil.resolve_name(owner), name)
        except (ImportError, AttributeError):
            missing.append(target)
    return missing


def unwrapped_targets() -> list[str]:
    """Hook targets that exist but do not run our hook."""
    from agentkv_serve.engine.hooks import HOOKS

    unwrapped = []
    for target, _, hook in HOOKS:
        owner, _, name = target.rpartition(".")
        function = getattr(pkgutil.resolve_name(owner), name)
        while function is not None and not _runs(function, hook):
            function = getattr(function, "__wrapped__", None)
        if function is None:
            unwrapped.append(target)
    return unwrapped


def _runs(function: object, hook: object) -> bool:
    cells = getattr(getattr(function, "__func__", function), "__closure__", None) or ()
    return any(cell.cell_contents is hook for cell in cells)


def require_hooks() -> None:
    """Stops the process unless every hook target exists and is wrapped."""
    missing = missing_targets()
    if missing:
        stop(f"SGLang has no {', '.join(missing)}")
    unwrapped = unwrapped_targets()
    if unwrapped:
        stop(f"these functions of SGLang do not run our hooks: {', '.join(unwrapped)}")
