"""The page in a real browser, on a real gateway and a real engine with the small model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentkv_serve.model import default_model
from agentkv_serve.stack import Stack, StackSettings, running
from tests.operate.tools import ROOT
from tests.ui.browser import LAPTOP, PHONE, Tab, chromium, number
from tests.ui.conftest import KEY, OPERATOR

pytestmark = [pytest.mark.long, pytest.mark.engine]
BUDGET, TURNS = 256, 6
SHOTS = ROOT / "build" / "screenshots"
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file of the project.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
ARGUMENTS = '{"path": "notes/day.txt"}'


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One engine and one gateway that has an admin key and shows content."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTKV_GATEWAY_ADMIN_KEY", KEY)
        patch.setenv("AGENTKV_GATEWAY_UI__SHOW_CONTENT", "true")
        patch.setenv("OMP_NUM_THREADS", "1")
        with running(StackSettings(default_model(), budget=str(BUDGET))) as started:
            yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def tab(browser: Any, stack: Stack) -> Iterator[Tab]:
    opened = Tab(browser, stack.base_url)
    yield opened
    opened.close()


class Agent:
    """A transcript of a session under budget: questions, tool calls that we put in, results."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "You are brief. " * 20}]
        self.told: list[dict[str, Any]] = []

    def turn(self) -> dict[str, Any]:
        """One turn; returns `usage.agentkv`."""
        n = len(self.told)
        if n % 2:
            call = {"id": f"c{n}", "type": "function", "function": {"name": "read_file", "arguments": ARGUMENTS}}
            self.messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            result = "; ".join(f"line {i}: the sky was {'blue' if i % 2 else 'grey'}" for i in range(20))
            self.messages.append({"role": "tool", "tool_call_id": f"c{n}", "content": result})
        else:
            self.messages.append({"role": "user", "content": f"Question {n}: what colour was the sky today?"})
        body = {"model": default_model().name, "messages": self.messages, "tools": [TOOL], "max_tokens": 48}
        body |= {"temperature": 0, "ignore_eos": False}
        headers = {"x-agentkv-session": "page-test"}
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=300).json()
        self.messages.append(reply["choices"][0]["message"])
        self.told.append(reply["usage"]["agentkv"])
        return self.told[-1]


@pytest.fixture(scope="module")
def agent(stack: Stack) -> Agent:
    """An agent after all turns but the last."""
    made = Agent(stack.base_url)
    for _ in range(TURNS - 1):
        made.turn()
    return made


@pytest.fixture(scope="module")
def session(stack: Stack, agent: Agent) -> str:
    """The shown key of the agent's session."""
    (one,) = httpx.get(f"{stack.base_url}/admin/fleet", headers=OPERATOR).json()["sessions"]
    return str(one["key"])


def test_a_wrong_key_is_said_and_asked_for_again(tab: Tab) -> None:
    tab.open("not the key")
    tab.page.get_by_text("needs `Authorization: Bearer ADMIN_KEY`").wait_for()
    assert tab.page.get_by_label("Key", exact=True).is_visible()
    assert all("401" in fault for fault in tab.faults)  # the browser itself logs the refusal


def test_the_page_agrees_with_the_engine_turn_by_turn(tab: Tab, stack: Stack, agent: Agent, session: str) -> None:
    page = tab.page
    tab.open(KEY)
    page.get_by_role("link", name=session).click()
    page.locator("#turns tbody tr").nth(TURNS - 2).wait_for()
    last = agent.turn()  # the page is open: it hears of it
    page.locator("#turns tbody tr").nth(TURNS - 1).wait_for(timeout=20_000)

    rows = tab.table("turns")
    assert len(rows) == TURNS
    for row, told in zip(rows, agent.told, strict=True):
        assert row["State"].split(":")[0] == told["state"]
        shown = [number(row[name]) for name in ("Tokens", "Held", "Evicted", "Prefilled")]
        names = ("logical_tokens", "kv_tokens", "evicted_tokens", "prefill_tokens")
        assert shown == [told[name] for name in names]
        assert number(row["Budget"]) == BUDGET
        assert [number(row[p]) for p in told["phases"]] == [round(v) for v in told["phases"].values()]
    assert last["evicted_tokens"] > 0 and {t["state"] for t in agent.told[1:]} <= {"resumed", "rebuilt"}

    page.wait_for_function("n => document.querySelector('#facts dd:nth-of-type(1)') && n", arg=1)
    facts = tab.facts()
    assert number(facts["Held per layer and head"]) == last["kv_tokens"]
    assert number(facts["Evicted"]) == last["evicted_tokens"]
    assert number(facts["Tokens"]) == last["logical_tokens"]

    compactions = tab.table("compactions")
    assert sum(number(row["Compactions"]) for row in rows) == len(compactions) > 0
    assert all(number(c["Kept"]) <= BUDGET < number(c["Held before"]) for c in compactions)

    phases = {row["Phase"]: row for row in tab.table("phases")}
    for phase, held in last["phases"].items():
        assert abs(number(phases[phase]["Held"]) - held) <= 1
    assert sum(number(row["Tokens"]) for row in phases.values()) == last["logical_tokens"]
    assert number(phases["tool"]["Tokens"]) > 0 and number(phases["act"]["Tokens"]) > 0
    assert tab.faults == []


def test_the_strip_tells_each_token_by_keyboard(tab: Tab, stack: Stack, session: str) -> None:
    page = tab.page
    tab.open(KEY)
    page.get_by_role("link", name=session).click()
    strip = page.get_by_role("slider")
    page.get_by_text("Token 1 of").wait_for()
    view = httpx.get(f"{stack.base_url}/admin/sessions/{session}", headers=OPERATOR).json()
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.id") == "strip":
            break
    page.keyboard.press("End")
    assert strip.get_attribute("aria-valuenow") == str(view["tokens"])
    assert "no keys and values" in (strip.get_attribute("aria-valuetext") or "")
    page.keyboard.press("ArrowLeft")
    levels = view["engine"]["levels"]
    assert f"held by {levels} of {levels} layers and heads (100%)" in page.locator("#detail").inner_text()
    page.keyboard.press("Home")
    page.wait_for_function("() => document.querySelector('#text mark')")
    assert page.locator("#text").inner_text().startswith("<|im_start|>system\nYou are brief.")
    page.get_by_label("Layer").select_option("3")
    page.get_by_text("heads of layer 3").wait_for()
    page.get_by_label("Tokens per cell").select_option("4")
    strip.focus()
    page.keyboard.press("ArrowRight")
    assert strip.get_attribute("aria-valuenow") == "5"
    assert tab.faults == []


def test_the_strip_shows_what_is_kept_and_what_is_gone(tab: Tab, stack: Stack, session: str) -> None:
    tab.open(KEY)
    tab.page.get_by_role("link", name=session).click()
    tab.page.get_by_text("Token 1 of").wait_for()
    # The middle of every cell of one token each: its colour is the track's where no head holds the token.
    drawn = tab.page.evaluate(
        """() => {
          const canvas = document.querySelector('#strip canvas'), pen = canvas.getContext('2d');
          const scale = devicePixelRatio, columns = Math.floor(canvas.width / scale / 10);
          const rows = canvas.height / scale / 18;
          const at = (c, r) => [...pen.getImageData((c * 10 + 5) * scale, (r * 18 + 5) * scale, 1, 1).data].join();
          return Array.from({length: columns * rows}, (_, i) => at(i % columns, Math.floor(i / columns)));
        }"""
    )
    view = httpx.get(f"{stack.base_url}/admin/sessions/{session}", headers=OPERATOR).json()
    assert view["tokens"] <= len(drawn), "the strip is expected to have one token per cell here"
    import base64

    data = base64.b64decode(view["engine"]["kept"])
    kept = [int.from_bytes(data[i : i + 2], "little") for i in range(0, len(data), 2)]
    track = drawn[kept.index(0, 1)]
    inner = range(1, len(kept))  # the cursor stands on the first cell
    assert [i for i in inner if (drawn[i] == track) != (kept[i] == 0)] == []
    assert 0 < sum(k == 0 for k in kept) < len(kept)


def test_png_and_json_can_be_saved(tab: Tab, stack: Stack, session: str, tmp_path: Path) -> None:
    tab.open(KEY)
    tab.page.get_by_role("link", name=session).click()
    tab.page.get_by_text("Token 1 of").wait_for()
    picture = tab.save("Save PNG", tmp_path).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    saved = json.loads(tab.save("Save JSON", tmp_path).read_text())
    now = httpx.get(f"{stack.base_url}/admin/sessions/{session}", headers=OPERATOR).json()
    assert {**saved, "used": 0} == {**now, "used": 0}
    assert tab.faults == []


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everybody_can_use_it(browser: Any, stack: Stack, session: str, size: dict[str, int], dark: bool) -> None:
    tab = Tab(browser, stack.base_url, size=size, dark=dark)
    name = f"{'phone' if size is PHONE else 'laptop'}-{'dark' if dark else 'light'}"
    SHOTS.mkdir(parents=True, exist_ok=True)
    tab.page.goto(f"{stack.base_url}/ui")
    assert tab.axe() == []
    tab.open(KEY)
    tab.page.get_by_role("link", name=session).wait_for()
    assert tab.axe() == []
    tab.page.screenshot(path=SHOTS / f"fleet-{name}.png")
    tab.page.get_by_role("link", name=session).click()
    tab.page.get_by_text("Token 1 of").wait_for()
    assert tab.axe() == []
    wide = tab.page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, "the page itself must not scroll sideways"
    tab.page.screenshot(path=SHOTS / f"session-{name}.png", full_page=True)
    assert tab.faults == []
    tab.close()


def test_forgetting_the_key_closes_the_page(tab: Tab, session: str) -> None:
    tab.open(KEY)
    tab.page.get_by_role("link", name=session).wait_for()
    tab.page.get_by_role("button", name="Forget key").click()
    tab.page.get_by_label("Key", exact=True).wait_for()
    assert tab.page.evaluate("() => sessionStorage.length") == 0
    assert not re.search(session, tab.page.locator("main").inner_text())
