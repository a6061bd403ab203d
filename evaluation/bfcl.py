"""Builds BFCL multi-turn transcripts in an environment of their own, since bfcl-eval pins old packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = ("bfcl-eval==2026.3.23", "mpmath==1.3.0")
"""The package and what its simulators import; the rest of its dependencies are for running models."""
LICENCE = "Apache-2.0 (bfcl-eval, the Gorilla project)"
CATEGORIES = ("base", "long_context", "miss_func", "miss_param")


class BuildError(Exception):
    """The transcripts cannot be built; the message says what to do."""


def build(out: Path, categories: Sequence[str], environment: Path, all_tools: bool) -> int:
    """Writes one transcript per line to `out`, named `multi_turn_<category>_<n>`; returns how many.

    Raises:
        BuildError: an unknown category, or the environment or the package cannot be had.
    """
    unknown = sorted(set(categories) - set(CATEGORIES))
    if unknown:
        raise BuildError(f"unknown categories {', '.join(unknown)}; known: {', '.join(CATEGORIES)}")
    python = environment / "bin" / "python"
    if not _has_package(python):
        _make(environment, python)
    script = Path(__file__).with_name("bfcl_transcripts.py")
    command = [str(python), "-P", str(script), *categories, *(["--all-tools"] if all_tools else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"the simulators failed:\n{done.stderr.strip()[-2000:]}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(done.stdout)
    return done.stdout.count("\n")


def _has_package(python: Path) -> bool:
    return (
        python.exists() and not subprocess.run([str(python), "-c", "import bfcl_eval"], capture_output=True).returncode
    )


def _make(environment: Path, python: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    installer = [str(uv), "pip", "install", "--quiet", "--python", str(python)]
    if not uv.exists():
        installer = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(environment)],
        [*installer, "--no-deps", *REQUIREMENTS],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
