"""KV selection policies: one file each, one interface, no SGLang import (the evaluation harness runs the same code)."""

from agentkv_serve.engine.policies.base import Policy, Window
from agentkv_serve.engine.policies.registry import get_policy, policy_names

__all__ = ["Policy", "Window", "get_policy", "policy_names"]
