"""`agentkv check gpu --standalone` from a bare source tree: `python agentkv_serve/check/standalone.py
[--json]`.

For a machine with torch and triton and nothing else of ours: neither the package nor its dependencies are
installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path


def find_package() -> None:
    """Make the tree's parts importable as `agentkv_serve.*`, as the installed package maps them."""
    root = Path(__file__).resolve().parents[2]
    package = root / "agentkv_serve"
    spec = importlib.util.spec_from_file_location(
        "agentkv_serve", package / "__init__.py", submodule_search_locations=[str(package), str(root)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["agentkv_serve"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    find_package()
    from agentkv_serve.check.gpu import run

    report = run()
    print(json.dumps(report.as_dict(), indent=2) if "--json" in sys.argv[1:] else report.as_table())
    sys.exit(0 if report.ok else 1)
