"""Policies by name."""

from __future__ import annotations

from typing import Any

from agentkv_serve.engine.policies.actkv import ActKV
from agentkv_serve.engine.policies.agentkv import AgentKV, AgentKVPaper, Recent
from agentkv_serve.engine.policies.agentkv_plus import AgentKVPlus
from agentkv_serve.engine.policies.base import Policy
from agentkv_serve.engine.policies.expected_attention import ExpectedAttention
from agentkv_serve.engine.policies.full import Full
from agentkv_serve.engine.policies.h2o import H2O
from agentkv_serve.engine.policies.random import Random
from agentkv_serve.engine.policies.rkv import RKV
from agentkv_serve.engine.policies.snapkv import SnapKV
from agentkv_serve.engine.policies.streamingllm import StreamingLLM
from agentkv_serve.engine.policies.triattention import TriAttention

_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Full,
        AgentKV,
        AgentKVPaper,
        Recent,
        RKV,
        TriAttention,
        SnapKV,
        StreamingLLM,
        H2O,
        ExpectedAttention,
        Random,
        ActKV,
        AgentKVPlus,
    )
}


def policy_names() -> list[str]:
    """Every registered name, `full` first."""
    return list(_POLICIES)


def get_policy(name: str, **settings: Any) -> Policy:
    """A policy object by name; settings are its dataclass fields.

    Raises:
        KeyError: an unknown name; the message lists the known ones.
        TypeError: a setting that the policy does not have.
        ValueError: a setting's value that the policy cannot use.
    """
    try:
        policy = _POLICIES[name]
    except KeyError:
        raise KeyError(f"unknown policy {name!r}; known: {', '.join(_POLICIES)}") from None
    return policy(**settings)
