"""Which policies a worker serves, and what they need of its model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from agentkv_serve.engine.config import EngineConfig
from agentkv_serve.engine.policies import Policy, Rope, get_policy, policy_names
from agentkv_serve.engine.policies.statistics import Statistics, StatisticsError
from agentkv_serve.engine.policies.triattention import TriAttention
from agentkv_serve.engine.state import ModelShape


class PolicyError(ValueError):
    """The policies that were asked for cannot be served; the message says why and what to do."""


def served_policies(config: EngineConfig) -> dict[str, Policy]:
    """The policies of a worker by name: `full`, the default one, and those allowed beside it.

    Raises:
        PolicyError: an unknown name, or a policy without the statistics that it needs.
    """
    try:
        default = get_policy(config.policy)
        named = [get_policy(name) for name in config.policies]
    except KeyError as error:
        raise PolicyError(str(error.args[0])) from None
    if not config.policies:
        every = (get_policy(name) for name in policy_names())
        named = [p for p in every if p.ring_queries <= default.ring_queries and not p.needs_statistics]
        named = [p for p in named if default.needs_rope or not p.needs_rope]
    policies = {policy.name: policy for policy in (get_policy("full"), default, *named)}
    for policy in policies.values():
        if isinstance(policy, TriAttention):
            policies[policy.name] = dataclasses.replace(policy, statistics=_statistics(config, policy.name))
    return policies


def _statistics(config: EngineConfig, name: str) -> Statistics:
    if not config.statistics:
        raise PolicyError(
            f"the policy {name} needs query statistics of the model: make them with `agentkv calibrate` and give "
            "--agentkv-statistics FILE"
        )
    try:
        return Statistics.load(Path(config.statistics))
    except StatisticsError as error:
        raise PolicyError(f"--agentkv-statistics: {error}") from None


def of_model(policies: dict[str, Policy], shape: ModelShape, rank: int, rope: Rope | None) -> dict[str, Policy]:
    """The policies with what they hold of this rank's heads, on its device.

    Raises:
        PolicyError: statistics of another model, or a rotation that a policy cannot work with.
    """
    result = {}
    for name, policy in policies.items():
        if isinstance(policy, TriAttention) and policy.statistics is not None:
            if rope is None or rope.interleaved:
                raise PolicyError(f"the policy {name} needs a model whose rotary pairs are halves of the head")
            heads = shape.query_heads
            try:
                part = policy.statistics.of_rank(len(shape.attention_layers), rank * heads, heads, shape.device)
            except StatisticsError as error:
                raise PolicyError(f"--agentkv-statistics: {error}") from None
            policy = dataclasses.replace(policy, statistics=part)
        result[name] = policy
    return result


def model_rope(model: torch.nn.Module, config: Any) -> Rope:
    """The rotation of an SGLang model, read from its Hugging Face config and checked against the model's own table.

    Raises:
        PolicyError: the model's rotation is none that policies can undo.
    """
    tables = [module for module in model.modules() if isinstance(getattr(module, "cos_sin_cache", None), torch.Tensor)]
    try:
        rope = Rope.from_config(config)
    except (ValueError, AttributeError) as error:
        raise PolicyError(f"a served policy needs the model's RoPE: {error}") from None
    if not tables:
        raise PolicyError("a served policy needs the model's RoPE, and this model has none that is known")
    for module in tables:
        pairs = rope.frequencies.numel()
        positions = torch.tensor([1.0, 7.0, 101.0], dtype=torch.float64)
        angles = positions[:, None] * rope.frequencies.double()
        whole: Any = module.cos_sin_cache
        table = whole[positions.long()].double().cpu()
        expected = torch.cat([angles.cos(), angles.sin()], -1) * rope.attention_scaling
        if table.shape[-1] != 2 * pairs or not torch.allclose(table, expected, atol=2e-2):
            raise PolicyError(
                f"a served policy needs the model's RoPE, and {type(module).__name__} rotates otherwise than the "
                "model's configuration says"
            )
        rope = dataclasses.replace(rope, interleaved=not module.is_neox_style)
    return rope
