"""Norms of values that a policy remembers in a byte per entry: only the values of new tokens are read.

A code stands for a norm on a logarithmic scale, `STEPS` codes to the octave, so it is off by at most 3%, far less than
what the few queries leave open. New tokens are rounded too: an entry's score does not depend on when it was read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv_serve.engine.policies.base import Window
from agentkv_serve.kernels.value_norm import value_norms

STEPS = 12
_ONE = 121  # the code of a norm of 1: codes 1 to 255 are norms from 0.001 to 2,298; 0 = not noted


def noted_norms(window: Window) -> Tensor:
    """[L, Hkv, N] uint8 codes of the norms of the window's values: those in `Window.carry`, and the new tokens'."""
    if window.carry is None:
        return encode(value_norms(window.v_buffers, window.slots, backend=window.backend))
    old = window.count - (window.length - window.since)
    new = value_norms(window.v_buffers, window.slots[old:], backend=window.backend)
    return torch.cat((window.carry[..., :old], encode(new)), -1)


def encode(norms: Tensor) -> Tensor:
    """uint8 codes of fp32 norms, of any shape."""
    return norms.log2().mul_(STEPS).add_(_ONE).round_().clamp_(1, 255).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """fp32 norms of codes."""
    return codes.float().sub_(_ONE).div_(STEPS).exp2_()
