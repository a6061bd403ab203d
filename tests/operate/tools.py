"""Tools that only long tests need: fetched once into `build/tools`, or from Debian. What cannot be had skips loudly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build" / "tools"


def python_tool(requirement: str) -> Path:
    """The folder into which a pinned package was installed apart from the product's environment."""
    folder = TOOLS / requirement
    if not (folder / ".done").exists():
        uv = Path(sys.executable).with_name("uv")
        command = [str(uv), "pip", "install", "-q", "--python", sys.executable, "--target", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"NOT TESTED: {requirement} cannot be had: {done.stderr[-300:]}")
        (folder / ".done").touch()
    return folder


def importable(requirement: str) -> None:
    """Makes a pinned package importable in this process."""
    folder = str(python_tool(requirement))
    if folder not in sys.path:
        sys.path.append(folder)


def debian(program: str, package: str) -> str:
    """The path of a program; as root it is installed from Debian where it is missing."""
    found = shutil.which(program)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for step in (command, ["apt-get", "update", "-q"], command):
            if subprocess.run(step, capture_output=True, env=environment, check=False).returncode == 0:
                found = shutil.which(program)
                if found:
                    break
    if found is None:
        pytest.skip(f"NOT TESTED: {program} is not here and cannot be installed; try `apt-get install {package}`")
    return found
