"""One agent's session on an engine, in each of the three ways that an engine can be spoken to."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from agentkv_serve.bench.serve.engine import Engine, Kind
from agentkv_serve.bench.serve.workload import Turn
from agentkv_serve.phase_tagger import Label

Way = Literal["prefix", "session", "agentkv"]
"""Whole prompts that find their prefix in the radix cache; stock streaming sessions; AgentKV sessions."""

FACTS = "agentkv:"


@dataclass(frozen=True)
class Setting:
    """One row of a benchmark. `budget` and `policy` are of AgentKV sessions.

    `admitted`: sessions that are begun and not ended at once; None = as many as come.
    """

    name: str
    way: Way
    policy: str = ""
    budget: int = 0
    admitted: int | None = None

    @property
    def kind(self) -> Kind:
        """The server that answers it."""
        return "agentkv" if self.way == "agentkv" else "stock"


class TurnFailed(Exception):
    """A turn was refused or broke off; the message is the server's."""


@dataclass
class Reply:
    """What one turn took and gave. Times are seconds of `time.perf_counter`, token counts are of the whole prompt."""

    session: int
    turn: int
    new: int  # prompt tokens that the turn added
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of every sampled token
    output: list[int] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def computed(self) -> int:
        """Prompt tokens that went through the model."""
        return int(self.facts["prefill"]) if self.facts else self.prompt - self.cached

    @property
    def needed(self) -> int:
        """Prompt tokens that have to be computed even if nothing was forgotten: the turn's new ones and, from the
        second turn on, the last sampled one, which has no keys and values yet."""
        return self.new + (1 if self.turn else 0)

    @property
    def compressed(self) -> bool:
        """Whether the session had lost keys and values when the turn ended."""
        return bool(self.facts.get("evicted"))

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]


class Session:
    """A session as the client keeps it: every token so far. `moved()` tells when a token of it came last."""

    def __init__(self, engine: Engine, http: aiohttp.ClientSession, setting: Setting, number: int, family: str) -> None:
        self._engine = engine
        self._http = http
        self._setting = setting
        self._number = number
        self._family = family
        self._id = uuid.uuid4().hex
        self._ids: list[int] = []
        self._runs: list[int] = []
        self._turns = 0

    async def run(self, turn: Turn, replies: list[Reply]) -> Reply:
        """Runs a turn to its end. The reply is in `replies` from the start on, so that others can see it progress.

        A turn that fails has its `error` set.
        """
        if not self._turns and self._setting.way == "session":
            await self._post("/open_session", session_id=self._id, streaming=True, capacity_of_str_len=1 << 30)
        for count, label in turn.runs:
            self._extend(count, label)
        self._ids += turn.ids
        body = self._body(turn)
        reply = Reply(self._number, self._turns, len(turn.ids))
        self._turns += 1
        reply.sent = reply.ended = time.perf_counter()
        replies.append(reply)
        try:
            await self._stream(body, reply)
        except (TurnFailed, aiohttp.ClientError) as error:
            reply.error = str(error) or type(error).__name__
        except BaseException:  # cancelled: the turn was given up
            reply.error = "given up"
            raise
        finally:
            reply.ended = time.perf_counter()
        self._ids += reply.output
        self._extend(len(reply.output), Label.SAY)
        return reply

    async def close(self) -> None:
        """Gives the session's memory back. Sessions that the server does not know are no error."""
        if self._setting.way != "prefix":
            with contextlib.suppress(aiohttp.ClientError, TurnFailed):
                await self._post("/close_session", session_id=self._id)

    def _extend(self, count: int, label: Label) -> None:
        if count:
            start = self._runs[-2] if self._runs else 0
            self._runs += [start, start + count, int(label)]

    def _body(self, turn: Turn) -> dict[str, Any]:
        sampling: dict[str, Any] = {"max_new_tokens": turn.output, "temperature": 0, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": self._ids, "sampling_params": sampling, "stream": True}
        if self._setting.way == "session":
            body |= {"input_ids": list(turn.ids), "session_params": {"id": self._id}}
        if self._setting.way == "agentkv":
            told = {
                "v": 1,
                "session": self._id,
                "epoch": self._turns,
                "budget": self._setting.budget,
                "policy": self._setting.policy,
                "runs": self._runs,
                "decode": {"family": self._family, "initial": "start"},
            }
            sampling["custom_params"] = {"agentkv": json.dumps(told)}
        return body

    async def _stream(self, body: dict[str, Any], reply: Reply) -> None:
        url = f"{self._engine.url}/generate"
        async with self._http.post(url, json=body, headers=self._engine.headers) as response:
            if response.status != 200:
                raise TurnFailed(await response.text())
            async for line in response.content:
                if line.startswith(b"data: {"):
                    read_frame(json.loads(line[6:]), reply)
        if not reply.output:
            raise TurnFailed("the stream ended without a token")

    async def _post(self, path: str, **body: Any) -> None:
        async with self._http.post(f"{self._engine.url}{path}", json=body, headers=self._engine.headers) as response:
            if response.status != 200:
                raise TurnFailed(await response.text())


def read_frame(frame: dict[str, Any], reply: Reply) -> None:
    """Takes in one frame of SGLang's `/generate` stream: all tokens so far, and what the engine says of the turn.

    Raises:
        TurnFailed: the frame ends the turn with an error.
    """
    if "error" in frame:
        raise TurnFailed(str(frame["error"]))
    meta = frame["meta_info"]
    finish = meta.get("finish_reason") or {}
    if finish.get("type") == "abort":
        raise TurnFailed(str(finish.get("message") or "aborted"))
    reply.arrivals += [time.perf_counter()] * (len(frame["output_ids"]) - len(reply.output))
    reply.output = list(frame["output_ids"])
    reply.prompt, reply.cached = int(meta["prompt_tokens"]), int(meta.get("cached_tokens") or 0)
    told = str((meta.get("cached_tokens_details") or {}).get("storage_backend") or "")
    if told.startswith(FACTS):
        reply.facts = json.loads(told.removeprefix(FACTS))


def connect() -> aiohttp.ClientSession:
    """An HTTP client without a time limit of its own and with room for any number of streams."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
    )
