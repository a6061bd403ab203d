"""The servers of a test run: each kind is started once, on demand."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duel import Duel, automaton_for
from oracle import Replay, Settings, load_model
from server import STOCK_ENV, Conversation, Server, agentkv_command, stock_command
from transformers import AutoTokenizer

PAGED = (
    *("--page-size", "16", "--chunked-prefill-size", "256"),
    *("--max-total-tokens", "16384", "--decode-log-interval", "1", "--enable-metrics"),
)
"""Flags of the tiny server that most tests share."""


class Fleet:
    """Starts servers without waiting for them (`server.wait()`); `stop` ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: dict[tuple[str, ...], Server] = {}

    def stock(self, model: Path, *flags: str, dtype: str = "float32", overlap: bool = False, **env: str) -> Server:
        """SGLang without the plug-in."""
        return self._get(stock_command(model, "--dtype", dtype, *flags, overlap=overlap), {**STOCK_ENV, **env})

    def agentkv(self, model: Path, *flags: str, dtype: str = "float32", **env: str) -> Server:
        """SGLang with the plug-in; its compactions are written to `server.dumps`."""
        return self._get(agentkv_command(model, "--dtype", dtype, *flags), env)

    def _get(self, command: list[str], env: dict[str, str]) -> Server:
        key = (*command, *(f"{name}={value}" for name, value in sorted(env.items())))
        server = self.servers.get(key)
        if server is None or server.process.poll() is not None:
            server = self.servers[key] = Server(command, env, self.folder)
        return server

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()
        self.servers.clear()


@dataclass
class Arena:
    """A running server and the model that it serves, for the replay."""

    server: Server
    model: Any
    automaton: Any
    page: int
    chunk: int

    @classmethod
    def of(cls, server: Server, folder: Path, *, page: int = 16, chunk: int = 256, family: str = "qwen3") -> Arena:
        """Waits for the server."""
        automaton = automaton_for(family, AutoTokenizer.from_pretrained(folder))
        return cls(server.wait(), load_model(folder), automaton, page, chunk)

    def duel(self, budget: int, salt: str | None = None, stop: frozenset[int] = frozenset()) -> Duel:
        """A new session on the server and its replay; by default nobody shares its prefixes."""
        conversation = Conversation(self.server, budget, self.automaton.family, salt=salt or uuid.uuid4().hex)
        return Duel(conversation, Replay(self.model, Settings(budget, self.page, self.chunk)), self.automaton, stop)
