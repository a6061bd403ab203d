"""The code blocks of README and docs, with what they need."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.operate.tools import ROOT

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHELL = ("sh", "bash", "shell", "console")
NEEDS = ("docker", "gpu", "kubernetes", "hours")
"""What a block may need that is not here; `hours`: it computes for as long, on data of the reader's own."""
_BLOCK = re.compile(
    r"(?:<!-- needs: (?P<needs>[a-z]+) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    document: Path
    line: int
    language: str
    needs: str | None
    text: str

    @property
    def name(self) -> str:
        """File and line."""
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The words of each simple command of a shell block; `VARIABLE=value` words in front are left out."""
        lexer = shlex.shlex(self.text.replace("\\\n", " "), posix=True, punctuation_chars="\n;&|")
        lexer.whitespace, lexer.whitespace_split = " \t\r", True
        found: list[list[str]] = [[]]
        for word in lexer:
            if set(word) <= set("\n;&|"):
                found.append([])
            elif found[-1] or not re.match(r"[A-Z_]+=|export$", word):
                found[-1].append(word)
        found = [words for words in found if words]
        return found


def blocks() -> list[Block]:
    """All fenced blocks of all documents."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for match in _BLOCK.finditer(text):
            line = text[: match.start("text")].count("\n")
            found.append(Block(document, line, match["language"], match["needs"], match["text"]))
    return found


def shell_blocks() -> list[Block]:
    """Those that a reader would paste into a shell."""
    return [block for block in blocks() if block.language in SHELL]
