"""AgentKV's own request controls: headers, or the body mirror `agentkv` for clients that cannot set headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers

from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.settings import MIN_BUDGET, BudgetSettings

FULL = 0  # the wire value of an unlimited budget
# A budget below 0 is `auto`: the worker chooses it at each compression, and may go up to the absolute value.

_FIELDS = {
    "budget": "x-agentkv-budget",
    "policy": "x-agentkv-policy",
    "final": "x-agentkv-session-final",
    "token_limit": "x-agentkv-session-token-limit",
    "rebuild": "x-agentkv-session-rebuild",
    "affinity": "x-agentkv-affinity",
    "retain": "x-agentkv-retain",
}
_POLICY = re.compile(r"[a-z0-9_]{1,32}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Controls:
    """What the client asked of its session; None leaves the session's own value.

    `budget` is KV tokens, FULL, or for `auto` the most KV tokens that it may be, as a negative number.
    """

    budget: int | None = None
    policy: str | None = None
    final: bool = False
    token_limit: int | None = None
    rebuild: bool = False
    affinity: str | None = None
    retain: str | None = None


def read_controls(
    headers: Headers, body: Mapping[str, Any], budgets: BudgetSettings, cap: int | None, context_length: int
) -> Controls:
    """Read the controls. `cap` is the tenant's budget cap (None: none); a header wins over the body mirror.

    Raises 400 that names the header and the allowed values.
    """
    mirror = body.get("agentkv") or {}
    if not isinstance(mirror, Mapping):
        raise bad_request("agentkv must be an object.", param="agentkv")
    unknown = sorted(set(mirror) - set(_FIELDS) - {"session_id"})
    if unknown:
        raise bad_request(f"Unknown field agentkv.{unknown[0]}.", param="agentkv")

    def value(name: str, read: Callable[[str, str], T]) -> T | None:
        given = headers.getlist(_FIELDS[name])
        if len(set(given)) > 1:
            raise bad_request(f"Several values of {_FIELDS[name]}.", param=_FIELDS[name])
        if given:
            return read(_FIELDS[name], given[0].strip())
        if mirror.get(name) is None:
            return None
        raw = mirror[name]
        if not isinstance(raw, str | int | bool):
            raise bad_request(f"agentkv.{name} has the wrong type.", param=f"agentkv.{name}")
        return read(f"agentkv.{name}", str(raw).lower() if isinstance(raw, bool) else str(raw))

    def budget(place: str, text: str) -> int:
        return read_budget(place, text, budgets, cap, context_length)

    return Controls(
        budget=value("budget", budget),
        policy=value("policy", _policy),
        final=bool(value("final", _flag)),
        token_limit=value("token_limit", _count),
        rebuild=bool(value("rebuild", _flag)),
        affinity=value("affinity", _one_of("soft", "hard")),
        retain=value("retain", _one_of("all", "template")),
    )


def read_budget(place: str, text: str, budgets: BudgetSettings, cap: int | None, context_length: int) -> int:
    """A budget in KV tokens per layer and KV head: `full`, `auto`, or a number up to `cap`, as in `Controls`."""
    limit = min(x for x in (cap, budgets.cap, context_length or None, 1 << 31) if x is not None)
    if text == "full":
        # `full` counts as the model's context length, so a cap below that refuses it.
        if (context_length or limit) > limit:
            raise _out_of_range(place, text, limit)
        return FULL
    if text == "auto":
        return -max(MIN_BUDGET, min(budgets.auto, limit))
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise _out_of_range(place, text, limit)
    number = int(text)
    if not MIN_BUDGET <= number <= limit:
        raise _out_of_range(place, text, limit)
    return number


def default_budget(budgets: BudgetSettings, cap: int | None, context_length: int) -> int:
    """The budget of a session that never asked for one."""
    try:
        return read_budget("budget.default", str(budgets.default), budgets, cap, context_length)
    except ApiError:
        return abs(read_budget("budget.default", "auto", budgets, cap, context_length))


def say_budget(budget: int) -> str:
    """A budget as headers and replies show it."""
    return "full" if budget == FULL else "auto" if budget < 0 else str(budget)


def _out_of_range(place: str, text: str, limit: int) -> ApiError:
    return bad_request(
        f"{place} is {text[:32]!r}: give full, auto or KV tokens per layer and head from {MIN_BUDGET} to {limit}.",
        param=place,
        code="invalid_budget",
    )


def _policy(place: str, text: str) -> str:
    if not _POLICY.fullmatch(text):
        raise bad_request(f"{place} must name a policy, such as agentkv or full.", param=place)
    return text


def _flag(place: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise bad_request(f"{place} must be true or false.", param=place)
    return text.lower() in ("true", "1")


def _one_of(*words: str) -> Callable[[str, str], str]:
    def read(place: str, text: str) -> str:
        if text not in words:
            raise bad_request(f"{place} must be {' or '.join(words)}.", param=place)
        return text

    return read


def _count(place: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text) or int(text) < 1:
        raise bad_request(f"{place} must be a positive number of tokens.", param=place)
    return int(text)
