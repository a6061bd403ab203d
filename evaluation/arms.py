"""Budgets and policies of an evaluation, as written on the command line."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from agentkv_serve.engine.policies import AutoBudget, Policy
from agentkv_serve.evaluation.session import Arm

PROTOCOL = 1
"""Raised whenever the replay or a measure changes its meaning: older results are then computed again."""

AUTO_FLOOR = 384
"""Smallest budget that `auto` may choose here; trajectories are shorter than what a worker's default is for."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A share of a trajectory's length, a number of KV tokens per layer and KV head, or chosen as the session goes."""

    text: str
    share: float | None = None
    tokens: int = 0
    auto: AutoBudget | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """`12.5%`, `0.125` (a share), `512` (tokens), `auto` or `auto:0.004` (at that price).

        `auto:0.004[floor=512;loss=lost_mass]` gives further settings of `AutoBudget`.

        Raises:
            ValueError: none of these.
        """
        kind, _, told = text.partition(":")
        try:
            if kind == "auto":
                auto = AutoBudget(floor=AUTO_FLOOR)
                price, settings = with_settings(told)
                auto = replace(auto, price=float(price)) if price else auto
                return cls(text, auto=replace(auto, **settings))
            if text.endswith("%"):
                share = float(text[:-1]) / 100
            elif float(text) < 1:
                share = float(text)
            else:
                return cls(text, tokens=int(text))
        except (ValueError, TypeError):
            share = 0.0
        if not 0 < share < 1:
            raise ValueError(
                f"budget {text!r} is neither a share (12.5% or 0.125) nor a number of tokens (512) nor auto"
            )
        return cls(f"{share * 100:g}%", share)

    def of(self, length: int) -> int:
        """KV tokens for a trajectory of `length` tokens; for `auto` the cap."""
        if self.auto:
            return length - 1
        return self.tokens if self.share is None else int(self.share * length)


@dataclass(frozen=True, slots=True)
class Entrant:
    """A policy under the name that it is shown by. noise: as in `Arm`."""

    name: str
    policy: Policy
    noise: float = 0.0


def with_settings(text: str) -> tuple[str, dict[str, Any]]:
    """The parts of `name[setting=value;…]`; what is no literal is text.

    Raises:
        ValueError: brackets that do not close.
    """
    match = re.fullmatch(r"\s*([^\[\]]*?)\s*(?:\[([^\[\]]*)\])?\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form name or name[setting=value;…]")
    settings: dict[str, Any] = {}
    for setting in filter(None, (match[2] or "").split(";")):
        name, _, value = setting.partition("=")
        try:
            settings[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            settings[name.strip()] = value.strip()
    return match[1], settings


def arms_of(
    entrants: Iterable[Entrant], budgets: Iterable[Budget], length: int, say: str, whole: bool = False
) -> list[Arm]:
    """Every policy at every budget that is smaller than the trajectory; named `policy@budget`.

    whole: larger ones too: such a session is never compressed.

    Raises:
        ValueError: a budget below what a policy always keeps.
    """
    arms = []
    for budget in budgets:
        tokens = budget.of(length)
        if tokens >= length and not whole:
            continue
        for entrant in entrants:
            least = entrant.policy.least_budget
            if tokens < least:
                raise ValueError(f"{entrant.name} needs a budget of {least} tokens; {budget.text} is {tokens}")
            arms.append(Arm(f"{entrant.name}@{budget.text}", entrant.policy, tokens, say, entrant.noise, budget.auto))
    return arms


def fingerprint(arm: Arm, protocol: dict[str, object]) -> str:
    """Hash of everything that an arm's numbers depend on beside the code: settings of the policy and of the replay."""
    own = (arm.policy.name, repr(arm.policy), arm.budget, arm.say_phase, arm.noise, repr(arm.auto))
    settings = (PROTOCOL, *own, sorted(protocol.items()))
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
