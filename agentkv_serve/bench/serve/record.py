"""Finished runs in a folder: a benchmark of hours that was cut off goes on where it stopped.

Rows are compared repeat by repeat, so all rows of a repeat must come from one machine, between two of its starts. Runs
of a repeat that was left half done by another one are made again.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Collection
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from agentkv_serve.bench.report import machine
from agentkv_serve.bench.serve.client import Reply, Setting
from agentkv_serve.bench.serve.engine import Pressure
from agentkv_serve.bench.serve.load import Run

ALONE = "alone"
"""The run of one session with nothing else on the server, beside the repeats."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Record:
    """The runs of one preset. Without a folder nothing is kept.

    Args:
        configuration: everything that the runs' figures depend on; runs of another one are not taken up.
        boot: which start of which machine this is.
    """

    def __init__(self, folder: Path | None, configuration: dict[str, Any], boot: str | None = None) -> None:
        self._folder = folder
        self._hash = hashlib.sha256(json.dumps(configuration, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self._boot = boot or this_boot()
        self._machine = machine()
        self.machines: dict[str, dict[str, Any]] = {}
        """By start of a machine: what it was, of every run taken up or made."""

    def load(self, repeat: int | str, settings: Collection[Setting]) -> dict[str, Run]:
        """The repeat's runs by setting: all of them, or those of this start of this machine."""
        found = {}
        for setting in settings:
            kept = self._read(repeat, setting)
            if kept is not None:
                found[setting.name] = kept
        if len(found) < len(settings):
            found = {name: kept for name, kept in found.items() if kept["boot"] == self._boot}
        self.machines |= {kept["boot"]: kept["machine"] for kept in found.values()}
        return {name: _run(kept["run"]) for name, kept in found.items()}

    def save(self, repeat: int | str, run: Run) -> None:
        """Writes a run into the folder, in one step."""
        self.machines[self._boot] = self._machine
        if self._folder is None:
            return
        kept = {"hash": self._hash, "boot": self._boot, "machine": self._machine, "run": asdict(run)}
        path = self._path(repeat, run.setting)
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".part")
        half.write_text(json.dumps(kept))
        half.replace(path)

    def _read(self, repeat: int | str, setting: Setting) -> dict[str, Any] | None:
        if self._folder is None or not (path := self._path(repeat, setting)).is_file():
            return None
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept if kept.get("hash") == self._hash else None

    def _path(self, repeat: int | str, setting: Setting) -> Path:
        assert self._folder is not None
        return self._folder / f"{repeat}-{re.sub('[^a-z0-9]+', '-', setting.name)}.json"


def this_boot() -> str:
    """A name of this start of this machine."""
    return _BOOT.read_text().strip() if _BOOT.is_file() else platform.node()


def _run(kept: dict[str, Any]) -> Run:
    names = {field.name for field in fields(Run)}
    parts = {name: value for name, value in kept.items() if name in names}
    return Run(
        setting=Setting(**parts["setting"]),
        replies=[Reply(**reply) for reply in parts["replies"]],
        ended={int(number): moment for number, moment in parts["ended"].items()},
        pressure=Pressure(**parts["pressure"]) if parts["pressure"] else None,
    )
