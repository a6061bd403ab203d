"""What the documents say is true: every shell block is run or, where it needs what is not here, checked."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import typer.main

from agentkv_serve.children import free_port
from agentkv_serve.cli import COMMANDS, LazyGroup
from tests.operate.compose import DOCKER, compose
from tests.operate.documents import DOCUMENTS, NEEDS, Block, blocks, shell_blocks
from tests.operate.tools import ROOT

SHELL_BLOCKS = shell_blocks()
TAGGED = [block for block in SHELL_BLOCKS if block.needs]
RUN = [block for block in SHELL_BLOCKS if not block.needs]
ITSELF = "make test\n"  # the suite that this test is a part of
SERVES = re.compile(r"agentkv up|make demo")
"""Blocks that start engines."""
ASKS = re.compile(r"127\.0\.0\.1:8000")
"""Blocks that talk to the server of another block."""
names = {"ids": lambda block: block.name}


def test_fences_have_a_language_and_known_needs() -> None:
    assert len(SHELL_BLOCKS) > 8
    looks = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?(?:agentkv|curl|docker|helm|kubectl|make|pip|python3?) ", re.M)
    assert [b.name for b in blocks() if not b.language and looks.search(b.text)] == []
    assert {b.needs for b in blocks()} <= {None, *NEEDS}
    for document in DOCUMENTS:
        text = document.read_text()
        assert text.count("\n```") % 2 == 0 and text.count("<!-- needs:") == sum(
            b.needs is not None for b in blocks() if b.document == document
        ), document


def test_the_blocks_that_cannot_be_run_here_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("\nNOT RUN, checked for syntax and flags:")
        for block in TAGGED:
            print(f"  needs {block.needs}: {block.name}: {block.text.splitlines()[0]} …")
    assert all(block.needs in NEEDS for block in TAGGED)


@pytest.mark.parametrize("block", SHELL_BLOCKS, **names)
def test_the_shell_can_parse_it(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `agentkv WORDS` runs, with the words that are left."""
    found: Any = LazyGroup(name="agentkv")
    rest = words
    while rest and hasattr(found, "get_command"):
        inner = found.get_command(typer.Context(found), rest[0])
        if inner is None:
            break
        found, rest = inner, rest[1:]
    return found, rest


def flags_of(command: Any) -> set[str]:
    return {"--help", *(flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts))}


def agentkv_lines() -> list[tuple[str, list[str]]]:
    """Every `agentkv` command in any code of any document, fenced or inline."""
    found = [(b.name, words) for b in SHELL_BLOCKS for words in b.commands()]
    for document in DOCUMENTS:
        for inline in re.findall(r"`((?:\.venv/bin/)?agentkv [^`\n]+)`", document.read_text()):
            found.append((document.name, re.sub(r"[…]|\.\.\.", "", inline).split()))
        # Indented commands: benchmarks of hours, whose runs are told in the same document.
        for line in re.findall(r"^    (?:[A-Z_]+=\S+ )*(agentkv .*(?:\\\n.*)*)", document.read_text(), re.M):
            found.append((document.name, re.sub(r"\s[#>|].*", "", line.replace("\\\n", " ")).split()))
    return [(name, words[1:]) for name, words in found if words[0].rpartition("/")[2] == "agentkv"]


@pytest.mark.parametrize(
    "name, words", agentkv_lines(), ids=lambda value: value if isinstance(value, str) else " ".join(value[:2])
)
def test_every_agentkv_command_and_flag_exists(name: str, words: list[str]) -> None:
    words = [word.rstrip(",") for word in words]
    if words[0].startswith("--"):
        return
    assert words[0] in COMMANDS, f"{name}: agentkv {words[0]}"
    command, rest = command_of(words)
    given = {word.partition("=")[0] for word in rest if word.startswith("--")}
    if not command.context_settings.get("ignore_unknown_options"):
        assert given <= flags_of(command), (name, given - flags_of(command))
    ours = {flag for flag in given if flag.startswith("--agentkv-")}
    assert ours <= flags_of(command), name


@pytest.mark.parametrize("block", [b for b in TAGGED if b.needs == "docker"], **names)
def test_docker_blocks_name_services_profiles_and_files_that_exist(block: Block) -> None:
    services = compose()["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", ())}
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (DOCKER / "Dockerfile").read_text(), re.M))
    for words in block.commands():
        pairs = list(itertools.pairwise(words))
        assert all(value in profiles for flag, value in pairs if flag == "--profile")
        assert all(value.split("=")[0] in services for flag, value in pairs if flag == "--scale")
        assert all(value in targets for flag, value in pairs if flag == "--target")
        if words[0] in ("python3", "cp"):
            assert (DOCKER / words[1]).exists() or (ROOT / words[1]).exists(), words


@pytest.mark.parametrize("block", [b for b in TAGGED if b.needs == "kubernetes"], **names)
def test_kubernetes_blocks_set_values_that_exist(block: Block) -> None:
    import yaml

    for words in block.commands():
        if words[0] != "helm":
            continue
        chart = next(word for word in words if word.startswith("docker/"))
        values = yaml.safe_load((ROOT / chart / "values.yaml").read_text())
        for flag, value in itertools.pairwise(words):
            if flag == "--set":
                at = values
                for part in value.split("=")[0].split("."):
                    assert part in at, value
                    at = at[part]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_error_code_of_the_gateway_is_explained() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "gateway").rglob("*.py"))
    codes = set(re.findall(r"ApiError\(\s*\d{3},\s*\"([a-z_]+)\"", sources))
    codes |= set(re.findall(r"code=\"([a-z_]+)\"", sources))
    codes |= set(re.findall(r"(?:bad_request\([^()]*?code=)\"([a-z_]+)\"", sources))
    said = (ROOT / "docs" / "operations.md").read_text()
    assert len(codes) > 20 and sorted(code for code in codes if f"`{code}`" not in said) == []
    table = said[said.index("## Errors of the gateway") : said.index("## Errors of the engine")]
    explained = {c for row in re.findall(r"^\| (`.*?) \|", table, re.M) for c in re.findall(r"`([a-z_]+)`", row)}
    assert sorted(code for code in explained if f'"{code}"' not in sources) == []


def test_every_error_code_of_the_engine_is_explained() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "engine").rglob("*.py"))
    codes = set(re.findall(r"WireError\(\s*\"([a-z_]+)\"", sources)) | set(re.findall(r"agentkv:([a-z_]+):", sources))
    said = (ROOT / "docs" / "operations.md").read_text()
    table = said[said.index("## Errors of the engine") : said.index("## What else is said")]
    assert codes - {"kv_map"} <= set(re.findall(r"^\| `([a-z_]+)`", table, re.M))


def test_the_texts_that_are_explained_are_said_somewhere() -> None:
    sources = "".join(
        file.read_text()
        for folder in ("engine", "gateway", "agentkv_serve", "docker")
        for file in (ROOT / folder).rglob("*.py")
    )
    plain = re.sub(r"\s+", " ", re.sub(r"[\"']\s*\n\s*f?[\"']", "", sources))
    said = (ROOT / "docs" / "operations.md").read_text()
    table = said[said.index("## What else is said") : said.index("## Security checklist")]
    quoted = [text for row in re.findall(r"^\| (`.*?`) \|", table, re.M) for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 12
    for text in quoted:
        for part in (p.strip() for p in text.split("…")):
            assert part in plain, part


def test_every_alert_is_explained() -> None:
    alerts = set(re.findall(r"alert: (\w+)", (DOCKER / "prometheus" / "alerts.yml").read_text()))
    said = (ROOT / "docs" / "operations.md").read_text()
    table = said[said.index("| alert |") : said.index("## Draining")]
    assert alerts == set(re.findall(r"`([A-Z]\w+)`", table))


SIZES = re.findall(
    r"^\| ([\w.-]+) \((\d+) layers, (\d+) and (\d+) heads of (\d+)\) \| (.*) \|$",
    (ROOT / "docs" / "operations.md").read_text(),
    re.M,
)


@pytest.mark.parametrize("row", SIZES, ids=lambda row: row[0])
def test_the_sizing_table_is_computed(row: tuple[str, ...]) -> None:
    layers, heads, kv_heads, size = (int(number) for number in row[1:5])
    token, rings, pool = 4 * layers * kv_heads * size, 64 * layers * heads * size, 40 << 30

    def text(count: int) -> str:
        for unit, scale, digits in (("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1)):
            if count >= 1 << scale:
                return f"{count / (1 << scale):.{digits}f} {unit}"
        return str(count)

    fit = [pool // ((4096 + 128) * token + rings), pool // (32768 * token)]
    shown = [text(n) for n in (token, 1024 * token, 4096 * token, 32768 * token, rings)]
    assert row[5].split(" | ") == [*shown, *(str(n) for n in fit)]


def test_the_sizing_table_has_rows() -> None:
    assert len(SIZES) >= 5


# ---- running them ---------------------------------------------------------------------------------------------


def shell(text: str, port: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """A block in a shell at the repository's root; port 8000 may be taken on this machine."""
    text = text.replace(":8000", f":{port}").replace("--port 8000", f"--port {port}")
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "AGENTKV_CACHE": str(ROOT / "build" / "cache"), **environment},
        timeout=900,
        check=False,
    )


PLAIN = [b for b in RUN if b.text != ITSELF and not SERVES.search(b.text) and not ASKS.search(b.text)]


@pytest.mark.parametrize("block", PLAIN, **names)
@pytest.mark.long
def test_a_block_that_needs_nothing_runs(block: Block) -> None:
    done = shell(block.text, 8000)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("block", [b for b in RUN if b.text == ITSELF or "make demo" in b.text], **names)
def test_make_knows_its_target(block: Block) -> None:
    done = subprocess.run(
        ["make", "-n", *block.text.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def served(text: str, port: int) -> Iterator[None]:
    """The block that serves, until it answers; stopped as a reader would, by Ctrl-C."""
    text = text.replace("--port 8000", f"--port {port}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AGENTKV_CACHE": str(ROOT / "build" / "cache")}
    environment |= {"AGENTKV_ADMIN_KEY": "look", "AGENTKV_GATEWAY_ADMIN_KEY": "look"}
    process = subprocess.Popen(["bash", "-c", text], cwd=ROOT, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < end
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                    break
            time.sleep(0.5)
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(90)


@pytest.mark.long
@pytest.mark.engine
def test_the_blocks_that_ask_a_server_get_their_answers() -> None:
    """The quickstart's own command starts the server; then every block that asks it is run, in order."""
    port = free_port()
    (starts, *_) = [b for b in RUN if "agentkv up --port 8000" in b.text and "quickstart" in b.name]
    asking = [b for b in RUN if ASKS.search(b.text) and not SERVES.search(b.text)]
    assert len(asking) >= 3
    with served(starts.text, port):
        for block in asking:
            done = shell(block.text, port)
            assert done.returncode == 0 and done.stdout.strip(), f"{block.name}: {done.stderr[-1000:]}"
            assert '"error"' not in done.stdout, f"{block.name}: {done.stdout[-1000:]}"


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_make_demo_shows_what_the_readme_promises() -> None:
    done = shell("make demo", 8000, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "budget 512" in done.stdout and "resumed" in done.stdout
