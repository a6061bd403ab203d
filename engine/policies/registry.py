"""Policies by name."""

from __future__ import annotations

from agentkv_serve.engine.policies.agentkv import AgentKV, AgentKVPaper
from agentkv_serve.engine.policies.base import Policy
from agentkv_serve.engine.policies.full import Full

_POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Full, AgentKV, AgentKVPaper)}


def policy_names() -> list[str]:
    """Every registered name, `full` first."""
    return list(_POLICIES)


def get_policy(name: str) -> Policy:
    """A policy object by name.

    Raises:
        KeyError: an unknown name; the message lists the known ones.
    """
    try:
        return _POLICIES[name]()
    except KeyError:
        raise KeyError(f"unknown policy {name!r}; known: {', '.join(_POLICIES)}") from None
