"""Talking to an engine as the gateway does: whole ledgers of token ids with their labels."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from torch import Tensor

from agentkv_serve.phase_tagger import Automaton, Label, fold

CYCLE = (Label.INPUT, Label.THINK, Label.ACT, Label.TOOL, Label.SAY)
FACTS = "agentkv:"


@dataclass(frozen=True)
class Dump:
    """What the engine wrote at a compaction."""

    length: int
    kept: Tensor  # [L, Hkv, K] int64 positions
    queries: Tensor  # [L, phases, q, Hq, D]
    valid: Tensor  # [phases, q] bool


@dataclass(frozen=True)
class Reply:
    """What one turn gave."""

    output_ids: list[int]
    facts: dict[str, Any]
    dumps: list[Dump]


class Refused(Exception):
    """The engine answered with an error."""


@dataclass
class Talk:
    """One session of random agent turns, or (budget None) whole prompts without a session."""

    client: httpx.Client
    dumps: Path
    automaton: Automaton
    budget: int | None
    seed: int
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    epoch: int = 0

    def append(self, size: int) -> None:
        """Random prompt tokens in five labelled blocks; the same seed gives the same conversation."""
        generator = random.Random(f"{self.seed} {len(self.ids)}")
        for block in range(5):
            count = size // 5 + (block < size % 5)
            self.ids += [generator.randrange(256) for _ in range(count)]
            self.labels += [int(CYCLE[(block + self.epoch) % 5])] * count

    def turn(self, size: int, room: int) -> Reply:
        """Appends `size` prompt tokens and has the model say `room` tokens, greedily.

        Raises:
            Refused: with the engine's words.
        """
        self.append(size)
        seen = len(self._files())
        body = {
            "model": "m", "messages": [{"role": "user", "content": "."}], "input_ids": self.ids,
            "max_tokens": room, "temperature": 0, "ignore_eos": True, "rid": uuid.uuid4().hex,
            "cache_salt": self.key, "return_output_ids_in_sglext": True, "return_cached_tokens_details": True,
            "custom_params": self._params(),
        }  # fmt: skip
        self.epoch += 1
        response = self.client.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise Refused(f"{response.status_code}: {response.text}")
        extra = response.json()["sglext"]
        output = list(extra["output_ids"][0])
        labels, _ = self.automaton.run(self.automaton.initial["start"], output)
        self.ids, self.labels = self.ids + output, self.labels + [int(label) for label in labels]
        word = str((extra.get("cached_tokens_details") or {}).get("storage_backend") or "")
        facts = dict(json.loads(word.removeprefix(FACTS))) if word.startswith(FACTS) else {}
        return Reply(output, facts, [_read(path) for path in self._files()[seen:]])

    @contextmanager
    def running(self, size: int, tokens: int) -> Iterator[str]:
        """A long turn of which `tokens` were sampled already; yields its request id. It is left out of the ledger.

        Raises:
            Refused: it ended, or never began.
        """
        before = len(self.ids)
        self.append(size)
        rid = uuid.uuid4().hex
        sampling = {"max_new_tokens": 2000, "temperature": 0, "ignore_eos": True, "custom_params": self._params()}
        body = {"input_ids": list(self.ids), "sampling_params": sampling, "stream": True, "rid": rid}
        self.epoch += 1
        del self.ids[before:], self.labels[before:]
        with self.client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()  # httpx lets a body be iterated once
            for line in lines:
                if not line.startswith("data: {"):
                    continue
                frame = json.loads(line.removeprefix("data: "))
                if "meta_info" not in frame:
                    raise Refused(f"a streamed turn failed: {line}")
                if frame["meta_info"]["completion_tokens"] >= tokens:
                    break
            else:
                raise Refused(f"a streamed turn ended before it had {tokens} tokens (HTTP {response.status_code})")
            yield rid
            for _ in lines:  # to its end
                pass

    def abort(self, rid: str) -> None:
        self.client.post("/abort_request", json={"rid": rid}).raise_for_status()

    def close(self) -> None:
        self.client.post("/close_session", json={"session_id": self.key})

    def phases(self) -> list[int]:
        return [int(fold(Label(label))) for label in self.labels]

    def _params(self) -> dict[str, str]:
        if self.budget is None:
            return {}
        runs: list[int] = []
        for position, label in enumerate(self.labels):
            if runs and runs[-1] == label:
                runs[-2] = position + 1
            else:
                runs += [position, position + 1, label]
        turn = {
            "v": 1, "session": self.key, "epoch": self.epoch, "budget": self.budget, "policy": "agentkv",
            "runs": runs, "decode": {"family": self.automaton.family, "initial": "start"},
        }  # fmt: skip
        return {"agentkv": json.dumps(turn)}

    def _files(self) -> list[Path]:
        return sorted(self.dumps.glob(f"[0-9]*-{self.key[:16]}.npz"))


def _read(path: Path) -> Dump:
    with np.load(path) as data:
        kept, queries, valid = (torch.from_numpy(data[name]) for name in ("kept", "queries", "valid"))
        return Dump(int(data["length"]), kept.long(), queries, valid)


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
