"""KV selection policies: one file each, one interface, no SGLang import (the evaluation harness runs the same code)."""

from agentkv_serve.engine.policies.auto import AutoBudget
from agentkv_serve.engine.policies.base import Choice, Policy, Scores, Window
from agentkv_serve.engine.policies.registry import get_policy, policy_names
from agentkv_serve.engine.policies.rope import Rope
from agentkv_serve.engine.policies.sampler import Sampler, entry_positions, entry_rings, prompt_length

__all__ = [
    "AutoBudget",
    "Choice",
    "Policy",
    "Rope",
    "Sampler",
    "Scores",
    "Window",
    "entry_positions",
    "entry_rings",
    "get_policy",
    "policy_names",
    "prompt_length",
]
