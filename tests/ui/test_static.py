"""The page's files: served only where there is an admin API, closed to everything from outside."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateway.conftest import Stack, Start

UI = Path(__file__).parents[2] / "gateway" / "ui"
FILES = sorted(file.name for file in UI.iterdir())


def test_without_an_admin_key_there_is_no_page(start: Start) -> None:
    stack = start()
    for path in ("/ui", "/ui/app.js"):
        reply = stack.http.get(path)
        assert reply.status_code == 404 and "admin_key" in reply.json()["error"]["message"]


def test_all_files_are_served_with_their_type_and_a_strict_policy(watched: Callable[..., Stack]) -> None:
    stack = watched()
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for name in FILES:
        reply = stack.http.get(f"/ui/{name}")
        assert reply.status_code == 200 and reply.content == (UI / name).read_bytes()
        assert reply.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert stack.http.get("/ui").content == (UI / "index.html").read_bytes()


@pytest.mark.parametrize("name", ["settings.py", "..%2fsettings.py", "%2e%2e", "app.js%00", "nothing.js"])
def test_nothing_else_can_be_read(watched: Callable[..., Stack], name: str) -> None:
    assert watched().http.get(f"/ui/{name}").status_code == 404


@pytest.mark.parametrize("name", FILES)
def test_the_page_has_no_inline_code_and_nothing_from_outside(name: str) -> None:
    text = (UI / name).read_text()
    outside = [url for url in re.findall(r"https?://[^\s\"')]+", text) if url != "http://www.w3.org/2000/svg"]
    assert outside == []
    if name.endswith(".html"):
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", text)
    if name.endswith(".js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"(?:from \"\./|\"ui/)([a-z]+\.[a-z]+)\"", "".join((UI / n).read_text() for n in FILES)))
    assert named <= set(FILES) and set(FILES) - named == {"index.html"}
