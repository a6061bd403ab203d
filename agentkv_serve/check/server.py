"""`agentkv check gpu --server`: what must hold of the engine, on SGLang as it runs on this machine.

Two servers, one after the other: SGLang alone, and with the AgentKV cache. The same list runs on a CPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch

from agentkv_serve.check.follower import Follower
from agentkv_serve.check.independent import load_model
from agentkv_serve.check.report import Report, Row
from agentkv_serve.check.talk import Refused, Reply, Talk, alike
from agentkv_serve.children import Child, free_port
from agentkv_serve.engine import SGLANG_VERSION
from agentkv_serve.stack import AGENTKV

if TYPE_CHECKING:
    from agentkv_serve.phase_tagger import Automaton

BUDGET, PAGE, START_SECONDS = 128, 16, 600.0
FLAGS = (
    *("--dtype", "float32", "--page-size", str(PAGE), "--chunked-prefill-size", "256"),
    *("--max-total-tokens", "16384", "--skip-server-warmup"),
)
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
UNVERIFIED = "measured on the GPU; UNVERIFIED: so far this list has been run on CPUs only, tell us what you see"


def run(folder: Path, backend: str | None = None) -> Report:
    """Runs the list on a model folder and returns the table.

    Args:
        backend: SGLang's attention backend; None = what `agentkv engine` takes on this machine.
    """
    from transformers import AutoTokenizer

    from agentkv_serve.phase_tagger import build_automaton

    on_gpu = torch.cuda.is_available()
    report = Report(
        device=torch.cuda.get_device_name() if on_gpu else "CPU",
        mode=UNVERIFIED if on_gpu else "no GPU: the same list on a CPU",
        versions={"torch": torch.__version__, "sglang": SGLANG_VERSION},
    )
    automaton = build_automaton("plain", AutoTokenizer.from_pretrained(folder))
    model = load_model(folder, torch.device("cuda" if on_gpu else "cpu"))
    flags = (*FLAGS, *(("--attention-backend", backend) if backend else ()))
    began = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix="agentkv-check-"))
    try:
        with engine(folder, scratch, flags, stock=True) as client:
            said = conversation(Talk(client, scratch, automaton, None, seed=1))
        with engine(folder, scratch, flags, stock=False) as client:
            report.rows += Checks(client, scratch / "dumps", automaton, model, on_gpu).rows(said)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report.figures["seconds"] = round(time.perf_counter() - began, 1)
    return report


@contextlib.contextmanager
def engine(folder: Path, scratch: Path, flags: tuple[str, ...], *, stock: bool) -> Iterator[httpx.Client]:
    """A running server with a client for it. `stock`: SGLang without our cache, with the same flags.

    Raises:
        ChildDied: with the end of its log.
        TimeoutError: it did not answer in time.
    """
    from agentkv_serve.engine.launch import has_gpu, server_command

    port = free_port()
    command = [*AGENTKV, "engine", "--model-path", str(folder), "--port", str(port), *flags]
    environment = {**os.environ, **STRICT, "AGENTKV_DUMP": str(scratch / "dumps"), "OMP_NUM_THREADS": "1"}
    if stock:
        command = server_command(list(flags), folder, port, "127.0.0.1", cpu=not has_gpu())
        place = command.index("--radix-cache-backend")
        del command[place : place + 2]
        environment |= {"SGLANG_PLUGINS": "agentkv_cpu"} | ({} if has_gpu() else {"SGLANG_PLATFORM": "agentkv_cpu"})
    name = "stock" if stock else "agentkv"
    child = Child(f"SGLang ({name})", command, scratch / f"{name}.log", environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, trust_env=False) as client:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(client):
                child.check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{child.name} did not answer in {START_SECONDS:.0f} s:\n{child.tail()}")
                time.sleep(0.5)
            yield client
            child.check()
    finally:
        child.stop()


def _answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health", timeout=30).status_code == 200
    return False


def conversation(talk: Talk) -> list[Reply]:
    """Three turns of one agent."""
    return [talk.turn(size, room) for size, room in ((600, 40), (60, 60), (300, 20))]


class Checks:
    """The list. Each check is a session of its own and leaves nothing behind."""

    def __init__(self, client: httpx.Client, dumps: Path, automaton: Automaton, model: Any, on_gpu: bool) -> None:
        self.client, self.dumps, self.automaton, self.model = client, dumps, automaton, model
        # Triton's float32 products are TF32 on a GPU: equal scores to three digits only.
        self.gap, self.share, self.error = (0.05, 0.99, 1e-2) if on_gpu else (0.01, 0.998, 1e-3)

    def rows(self, stock: list[Reply]) -> list[Row]:
        """All checks in order; one that raises is a failed row with what it said."""
        checks: list[tuple[str, Callable[[], list[Row]]]] = [
            ("identity with SGLang", lambda: [self.identity(stock)]),
            ("compressed session", self.compressed),
            ("abort before a compaction", lambda: [self.rollback()]),
            ("abort after a compaction", lambda: [self.abort()]),
            ("second turn on a busy session", lambda: [self.busy()]),
            ("edited history", lambda: [self.branch()]),
            ("close, then the same id", lambda: [self.close()]),
            ("empty pool", lambda: [self.pool()]),
        ]
        rows = []
        for name, check in checks:
            try:
                rows += check()
            except (Refused, ValueError, LookupError, httpx.HTTPError) as error:
                rows.append(Row(name, "", f"{type(error).__name__}: {error}"[:200], "", False))
        return rows

    @contextlib.contextmanager
    def talk(self, seed: int, budget: int = BUDGET) -> Iterator[Talk]:
        talk = Talk(self.client, self.dumps, self.automaton, budget, seed)
        try:
            yield talk
        finally:
            talk.close()

    def identity(self, stock: list[Reply]) -> Row:
        """With a budget that is never reached the tokens are SGLang's."""
        with self.talk(1, budget=4096) as talk:
            said = conversation(talk)
        same = sum(alike(a.output_ids, b.output_ids) for a, b in zip(said, stock, strict=True))
        total = sum(len(reply.output_ids) for reply in stock)
        states = [reply.facts["state"] for reply in said]
        ok = same == total and states == ["new", "resumed", "resumed"]
        return Row("identity with SGLang", "B 4096, 3 turns", f"{same} of {total} tokens alike", "all", ok)

    def compressed(self) -> list[Row]:
        """Keep-sets, captured queries, held tokens and sampled tokens of a compressed session."""
        replies = []
        with self.talk(2) as talk:
            follower = Follower(self.model, talk)
            for size, room in ((600, 200), (60, 40), (300, 150)):
                replies.append(talk.turn(size, room))
                follower.follow(replies[-1])
        held = [reply.facts["held"] for reply in replies]
        shape = f"B {BUDGET}, {follower.compactions} compactions"
        return [
            Row(
                "keep-sets, independent run", shape, f"{follower.share:.4%} of the kept entries alike",
                f">= {self.share:.1%}", follower.compactions >= 6 and follower.share >= self.share,
            ),
            Row(
                "captured queries", shape, f"relative error {follower.error:.1e}", f"< {self.error:.0e}",
                follower.error < self.error,
            ),
            Row(
                "tokens after compactions", f"{follower.tokens} tokens", f"at most {follower.gap:.1e} below the best",
                f"< {self.gap}", follower.gap < self.gap,
            ),
            Row(
                "held tokens", "3 turns", " ".join(map(str, held)), f"{BUDGET} to {BUDGET + PAGE - 1}",
                all(BUDGET <= count < BUDGET + PAGE for count in held),
            ),
        ]  # fmt: skip

    def rollback(self) -> Row:
        """A turn aborted before it compressed anything leaves its session as it was."""
        with self.talk(3, budget=480) as talk:
            follower = Follower(self.model, talk)
            follower.follow(talk.turn(400, 30))
            with talk.running(20, 8) as rid:
                talk.abort(rid)
            reply = talk.turn(40, 20)
            follower.follow(reply)
        return self._state("abort before a compaction", follower, reply, "resumed", None)

    def abort(self) -> Row:
        """One aborted after it did is rebuilt."""
        with self.talk(4) as talk:
            follower = Follower(self.model, talk)
            follower.follow(talk.turn(400, 30))
            with talk.running(60, 200) as rid:
                talk.abort(rid)
            reply = talk.turn(40, 20)
            follower.follow(reply)
        return self._state("abort after a compaction", follower, reply, "rebuilt", "aborted")

    def busy(self) -> Row:
        """An equal or lower epoch cannot overtake a running turn, and does not disturb it."""
        with self.talk(5) as talk:
            follower = Follower(self.model, talk)
            follower.follow(talk.turn(300, 20))
            said = ""
            with talk.running(40, 5) as rid:
                talk.epoch -= 1
                with contextlib.suppress(Refused):
                    Talk(self.client, self.dumps, self.automaton, BUDGET, 5, talk.key, epoch=talk.epoch).turn(40, 5)
                    said = "a second turn was let in; "
                talk.abort(rid)
                talk.epoch += 1
            reply = talk.turn(40, 20)
            follower.follow(reply)
        row = self._state("second turn on a busy session", follower, reply, reply.facts["state"], None)
        return Row(row.check, row.shape, said + row.result, "refused", not said and row.ok)

    def branch(self) -> Row:
        """A changed token in the history: nothing of the old state may be used."""
        with self.talk(6) as talk:
            follower = Follower(self.model, talk)
            follower.follow(talk.turn(300, 20))
            talk.ids[100] = (talk.ids[100] + 1) % 256
            reply = talk.turn(40, 20)
            follower.follow(reply)
        return self._state("edited history", follower, reply, "rebuilt", "diverged")

    def close(self) -> Row:
        """A closed id starts clean."""
        with self.talk(7) as talk:
            talk.turn(300, 20)
            talk.close()
            again = Talk(self.client, self.dumps, self.automaton, BUDGET, 8, talk.key, epoch=talk.epoch)
            follower = Follower(self.model, again)
            reply = again.turn(200, 20)
            follower.follow(reply)
        return self._state("close, then the same id", follower, reply, "new", None)

    def pool(self) -> Row:
        """No session, no slot is left; SGLang's strict memory checks were on all the time."""
        status = self.client.post("/flush_cache").status_code
        return Row("empty pool", "strict memory checks", f"flush answers {status}", "200", status == 200)

    def _state(self, name: str, follower: Follower, reply: Reply, state: str, reason: str | None) -> Row:
        facts = reply.facts
        ok = facts["state"] == state and follower.gap < self.gap and (reason is None or facts["reason"] == reason)
        result = f"next turn {facts['state']}, tokens at most {follower.gap:.1e} below the best"
        return Row(name, f"{follower.tokens} tokens", result, f"{state}, < {self.gap}", ok)
