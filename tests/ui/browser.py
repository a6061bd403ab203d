"""Headless Chromium on the page, and the record of everything that went wrong in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.operate.tools import debian, importable, python_tool

PLAYWRIGHT, AXE = "playwright==1.65.2", "axe-playwright-python==0.1.8"
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser."""
    program = debian("chromium", "chromium")
    importable(PLAYWRIGHT)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """One tab of a browser. `faults` collects console errors, exceptions and requests that leave the gateway."""

    def __init__(self, browser: Any, url: str, *, size: dict[str, int] = LAPTOP, dark: bool = False) -> None:
        self.url = url
        self.faults: list[str] = []
        scheme = "dark" if dark else "light"
        self._context = browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=2)
        self.page = page = self._context.new_page()
        page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        page.on("request", lambda request: self._note(not request.url.startswith((url, "blob:")), request.url))

    def _note(self, wrong: bool, text: str) -> None:
        if wrong:
            self.faults.append(text)

    def open(self, key: str) -> None:
        """Open the page with an admin key."""
        self.page.goto(f"{self.url}/ui")
        self.page.get_by_label("Key", exact=True).fill(key)
        self.page.get_by_role("button", name="Open").click()

    def axe(self) -> list[str]:
        """What axe-core finds wrong with the page as it is now."""
        source = (python_tool(AXE) / "axe_playwright_python" / "axe.min.js").read_text()
        self.page.evaluate(source)
        found = self.page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{violation['id']}: {node['target']} {node['failureSummary']}"
            for violation in found["violations"]
            for node in violation["nodes"]
        ]

    def table(self, name: str) -> list[dict[str, str]]:
        """The rows of a table by its id: column title -> text."""
        return list(
            self.page.eval_on_selector(
                f"#{name}",
                """table => {
                  const titles = [...table.tHead.rows[0].cells].map(cell => cell.textContent);
                  return [...table.tBodies[0].rows].map(row =>
                    Object.fromEntries([...row.cells].map((cell, i) => [titles[i], cell.textContent])));
                }""",
            )
        )

    def facts(self) -> dict[str, str]:
        """The session's facts: name -> text."""
        pairs = "list => Object.fromEntries([...list.children].map(d => [...d.children].map(e => e.textContent)))"
        return dict(self.page.eval_on_selector("#facts", pairs))

    def save(self, button: str, folder: Path) -> Path:
        """Press a button that downloads a file."""
        with self.page.expect_download() as waiting:
            self.page.get_by_role("button", name=button).click()
        target = folder / waiting.value.suggested_filename
        waiting.value.save_as(target)
        return target

    def close(self) -> None:
        """Close the tab."""
        self._context.close()


def number(text: str) -> int:
    """A count as the page shows it."""
    return int(text.replace(",", ""))
