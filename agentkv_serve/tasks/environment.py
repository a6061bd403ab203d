"""Environments of their own for benchmarks whose pins cannot live beside the engine's. Made on first use."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


class EnvironmentFailed(Exception):
    """The environment cannot be made; the message is the installer's."""


def environment(
    folder: Path, requirements: Sequence[str], console: Console, *, python: str, without: Sequence[str] = ()
) -> Path:
    """Returns the Python of a virtual environment with the requirements; makes it where it is missing.

    Args:
        python: its version, such as 3.11.
        without: dependencies of the requirements that are left out.

    Raises:
        EnvironmentFailed: no uv, no such Python, or the installation failed.
    """
    done, wanted = folder / ".agentkv-done", "\n".join((python, *requirements, *(f"-{name}" for name in without)))
    interpreter = folder / "bin" / "python"
    if done.is_file() and done.read_text() == wanted:
        return interpreter
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise EnvironmentFailed("uv is needed to make the benchmark's environment: pip install uv")
    console.print(f"making {folder} …")
    _run([uv, "venv", "--quiet", "--allow-existing", "--python", python, str(folder)])
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        # A requirement that no platform meets takes the dependency out.
        overrides.writelines(f"{name} ; python_version < '3'\n" for name in without)
        overrides.flush()
        command = [uv, "pip", "install", "--quiet", "--python", str(interpreter), *requirements]
        _run([*command, *(["--overrides", overrides.name] if without else [])])
    done.write_text(wanted)
    return interpreter


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EnvironmentFailed(f"{' '.join(command[:3])} failed:\n{done.stderr.strip()[-2000:]}")
