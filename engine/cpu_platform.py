"""An out-of-tree SGLang platform, so that a plain `pip install sglang` serves on a machine without an accelerator.

Registered under the entry-point group `sglang.srt.platforms`. Where an accelerator is present, `activate` declines and
SGLang picks its own platform.
"""

from __future__ import annotations

import torch


def activate() -> str | None:
    """The dotted name of our platform class, or None where an accelerator (or SGLang's own choice) serves."""
    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return None
    return "agentkv_serve.engine.cpu_platform_class.TorchCpuPlatform"
