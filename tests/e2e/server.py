"""Real SGLang servers for the tests: stock (only the CPU platform of ours) and with the AgentKV cache.

A `Server` is a process group of its own on a free loopback port, with its output in a file; `Conversation` speaks to
it as the gateway does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from agentkv_serve.children import free_port
from agentkv_serve.phase_tagger import Label

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
START_SECONDS = 420
FACTS = "agentkv:"


class Server:
    """One engine process. `stop` ends it and everything that it started."""

    def __init__(self, command: Sequence[str], env: dict[str, str], folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        self.dumps = folder / f"dumps-{self.port}"
        ours = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "AGENTKV_DUMP": str(self.dumps)}
        environment = {**os.environ, **ours, **STRICT, **env}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        self.client = httpx.Client(base_url=self.url, timeout=180)

    def wait(self) -> Server:
        """Returns once the server answers; raises with the end of its log when it dies or takes too long."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server stopped with {self.process.returncode}:\n{self.tail()}")
            try:
                if self.client.get("/health", timeout=20).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        raise RuntimeError(f"the server did not start in {START_SECONDS} s:\n{self.tail()}")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):  # the scheduler and detokenizer may outlive the parent
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(path, json=body)

    def info(self) -> dict[str, Any]:
        """The scheduler's own view: SGLang's /server_info."""
        reply = self.client.get("/server_info")
        reply.raise_for_status()
        return dict(reply.json())

    def complete(self, input_ids: list[int], max_tokens: int, **more: Any) -> Reply:
        """One request on /v1/chat/completions as the gateway makes it, greedy. Raises on any status but 200."""
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "."}],
            "input_ids": input_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "rid": uuid.uuid4().hex,
            "return_output_ids_in_sglext": True,
            "return_cached_tokens_details": True,
            **more,
        }
        response = self.post("/v1/chat/completions", body)
        if response.status_code != 200:
            raise ServerError(response.status_code, response.text)
        return Reply.of(response.json())


class ServerError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


@dataclass(frozen=True)
class Reply:
    """What one turn gave."""

    output_ids: list[int]
    finish: str
    cached: int
    facts: dict[str, Any]  # {} where the request was none of a session's
    logprobs: list[dict[int, float]]  # of the sampled tokens' rivals, when asked for
    body: dict[str, Any]

    @classmethod
    def of(cls, body: dict[str, Any]) -> Reply:
        choice = body["choices"][0]
        extra = body.get("sglext") or {}
        usage = body["usage"].get("prompt_tokens_details") or {}
        return cls(
            output_ids=list(extra["output_ids"][0]),
            finish=choice["finish_reason"],
            cached=int(usage.get("cached_tokens") or 0),
            facts=facts_of(extra),
            logprobs=[entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content", [])],
            body=body,
        )


def facts_of(sglext: dict[str, Any]) -> dict[str, Any]:
    """The engine's facts out of a reply's `sglext`; {} where there are none."""
    word = str((sglext.get("cached_tokens_details") or {}).get("storage_backend") or "")
    return dict(json.loads(word.removeprefix(FACTS))) if word.startswith(FACTS) else {}


@dataclass
class Conversation:
    """A session as the gateway keeps it: the whole ledger of token ids, their labels, the epoch."""

    server: Server
    budget: int = 0
    family: str = "qwen3"
    policy: str = "agentkv"
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    salt: str | None = None
    ids: list[int] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    epoch: int = 0

    def extend(self, ids: Sequence[int], label: Label) -> None:
        """Appends prompt tokens of one label to the ledger."""
        self.ids += ids
        self.labels += [label] * len(ids)

    def custom_params(self, initial: str = "start", **more: Any) -> dict[str, str]:
        body = {
            "v": 1,
            "session": self.key,
            "epoch": self.epoch,
            "budget": self.budget,
            "policy": self.policy,
            "runs": flat_runs(self.labels),
            "decode": {"family": self.family, "initial": initial},
            **more,
        }
        return {"agentkv": json.dumps(body)}

    def send(
        self, max_tokens: int, initial: str = "start", sampled: Sequence[Label] | None = None, **more: Any
    ) -> Reply:
        """One turn; on success the reply's ids join the ledger, labelled `sampled` (default: visible text)."""
        if self.salt is not None:
            more["cache_salt"] = self.salt
        params = self.custom_params(initial, **more.pop("agentkv", {}))
        self.epoch += 1
        reply = self.server.complete(self.ids, max_tokens, custom_params=params, **more)
        self.ids = self.ids + reply.output_ids
        self.labels = self.labels + (list(sampled) if sampled else [Label.SAY] * len(reply.output_ids))
        return reply

    @contextlib.contextmanager
    def running(self, pieces: Sequence[tuple[Label, list[int]]], max_tokens: int = 1000) -> Iterator[Running]:
        """A turn that is under way and whose end nobody waits for; it is left out of the ledger.

        Leaving the block closes the connection.
        """
        before = len(self.ids)
        for label, ids in pieces:
            self.extend(ids, label)
        rid = uuid.uuid4().hex
        sampling = {
            "max_new_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "custom_params": self.custom_params(),
        }
        body = {"input_ids": self.ids, "sampling_params": sampling, "stream": True, "rid": rid}
        self.epoch += 1
        self.ids, self.labels = self.ids[:before], self.labels[:before]
        with self.server.client.stream("POST", "/generate", json=body) as response:
            yield Running(self.server, rid, response.iter_lines())

    def stream(self, max_tokens: int, initial: str = "start") -> list[tuple[str, Any]]:
        """One streamed turn as the gateway asks for it; the ledger stays as it was.

        Returns its frames in order: ("text", choice), ("facts", facts), ("ids", output ids), ("usage", usage).
        """
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "."}],
            "input_ids": self.ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "rid": uuid.uuid4().hex,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_output_ids_in_sglext": True,
            "return_cached_tokens_details": True,
            "custom_params": self.custom_params(initial),
            "cache_salt": self.salt,
        }
        self.epoch += 1
        frames: list[tuple[str, Any]] = []
        headers = {"x-sglext-ids-framed": "1"}
        with self.server.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                frame = json.loads(line.removeprefix("data: "))
                extra = frame.get("sglext") or {}
                if extra.get("output_ids"):
                    frames.append(("ids", extra["output_ids"][0]))
                elif extra:
                    frames.append(("facts", facts_of(extra)))
                elif frame.get("usage"):
                    frames.append(("usage", frame["usage"]))
                else:
                    frames.append(("text", frame["choices"][0]))
        return frames

    def close(self) -> httpx.Response:
        """Ends the session."""
        return self.server.post("/close_session", {"session_id": self.key})


@dataclass
class Running:
    """A streamed turn."""

    server: Server
    rid: str
    lines: Iterator[str]
    last: dict[str, Any] = field(default_factory=dict)

    def read(self, tokens: int | None = None) -> dict[str, Any]:
        """Reads on until `tokens` were sampled, or to the end: the last frame."""
        for line in self.lines:
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            self.last = json.loads(line.removeprefix("data: "))
            if tokens is not None and self.last["meta_info"]["completion_tokens"] >= tokens:
                break
        return self.last

    def abort(self) -> dict[str, Any]:
        """Aborts the turn and waits for its end: the last frame."""
        self.server.post("/abort_request", {"rid": self.rid})
        return self.read()


def flat_runs(labels: Sequence[Label]) -> list[int]:
    """[start, end, label, …] of equal neighbours."""
    flat: list[int] = []
    for position, label in enumerate(labels):
        if flat and flat[-1] == label:
            flat[-2] = position + 1
        else:
            flat += [position, position + 1, int(label)]
    return flat


def stock_command(model: Path, *flags: str, overlap: bool = False) -> list[str]:
    """SGLang alone. Overlap scheduling is off, as the product has it on a CPU, unless asked for."""
    common = (
        "--device cpu --attention-backend torch_native --sampling-backend pytorch "
        "--skip-server-warmup --sleep-on-idle --enable-cache-report --trust-remote-code --mem-fraction-static 0.8"
    )
    return [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model),
        *common.split(),
        *([] if overlap else ["--disable-overlap-schedule"]),
        *flags,
    ]


STOCK_ENV = {"SGLANG_PLATFORM": "agentkv_cpu", "SGLANG_PLUGINS": "agentkv_cpu"}


def agentkv_command(model: Path, *flags: str) -> list[str]:
    """SGLang with the AgentKV cache, as the product starts it."""
    agentkv = Path(sys.executable).parent / "agentkv"
    return [str(agentkv), "engine", "--model-path", str(model), "--trust-remote-code", *flags]
