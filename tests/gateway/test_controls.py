"""Budgets and other controls of a request."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.settings import BudgetSettings
from agentkv_serve.gateway.turns.controls import FULL, default_budget, read_budget, read_controls, say_budget


@pytest.mark.parametrize(
    ("text", "cap", "general_cap", "context", "expected"),
    [
        ("128", None, None, 4096, 128),
        ("4096", None, None, 4096, 4096),
        ("full", None, None, 4096, FULL),
        ("full", 4096, None, 4096, FULL),
        ("auto", None, None, 8192, -4096),
        ("auto", 512, None, 8192, -512),
        ("auto", None, 256, 8192, -256),
        ("auto", None, None, 2048, -2048),
        ("full", None, None, 0, FULL),
    ],
)
def test_budgets(text: str, cap: int | None, general_cap: int | None, context: int, expected: int) -> None:
    assert read_budget("b", text, BudgetSettings(cap=general_cap), cap, context) == expected


@pytest.mark.parametrize(
    ("text", "cap", "context"),
    [
        ("127", None, 4096),
        ("4097", None, 4096),
        ("1025", 1024, 4096),
        ("full", 1024, 4096),
        ("-1", None, 4096),
        ("1e3", None, 4096),
        ("٥١٢", None, 4096),
        ("", None, 4096),
        ("512.0", None, 4096),
        ("AUTO", None, 4096),
    ],
)
def test_wrong_budgets(text: str, cap: int | None, context: int) -> None:
    with pytest.raises(ApiError) as caught:
        read_budget("x-agentkv-budget", text, BudgetSettings(), cap, context)
    assert caught.value.status == 400 and caught.value.code == "invalid_budget"
    assert "128" in caught.value.message and str(cap or context) in caught.value.message


@pytest.mark.parametrize(("default", "expected"), [("full", 512), (2000, 512), (256, 256), ("auto", -512)])
def test_a_default_above_a_tenants_cap_becomes_the_cap(default: int | str, expected: int) -> None:
    assert default_budget(BudgetSettings(default=default), 512, 4096) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("budget", "said"), [(FULL, "full"), (-4096, "auto"), (512, "512")])
def test_a_budget_is_said_as_it_was_asked_for(budget: int, said: str) -> None:
    assert say_budget(budget) == said


def test_a_header_wins_over_the_body() -> None:
    headers = Headers({"x-agentkv-budget": "200", "x-agentkv-session-final": "false"})
    body = {"agentkv": {"budget": 300, "final": True, "policy": "full", "token_limit": 9}}
    controls = read_controls(headers, body, BudgetSettings(), None, 4096)
    assert (controls.budget, controls.final, controls.policy, controls.token_limit) == (200, False, "full", 9)


def test_two_values_of_one_header_are_refused() -> None:
    headers = Headers(raw=[(b"x-agentkv-budget", b"200"), (b"x-agentkv-budget", b"300")])
    with pytest.raises(ApiError, match="Several values"):
        read_controls(headers, {}, BudgetSettings(), None, 4096)
