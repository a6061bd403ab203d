"""What gateway and engine say to each other about a turn: the JSON string in `custom_params["agentkv"]` and the facts.

SGLang types `custom_params` as scalars and flat lists only, hence one string. Facts go back in the reply's
`sglext.cached_tokens_details.storage_backend`, the one free text field that SGLang carries to the last frame of
streamed and plain replies alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from agentkv_serve.phase_tagger import Label

VERSION = 1
FACTS_PREFIX = "agentkv:"
State = Literal["new", "resumed", "rebuilt"]
INITIAL_STATES = ("start", "think", "say", "act")


class WireError(ValueError):
    """A turn that the engine refuses. `code` is stable; the message says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{FACTS_PREFIX}{code}: {message}")
        self.code = code


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One turn as the gateway describes it."""

    session: str
    epoch: int
    budget: int  # KV tokens per layer and KV head; 0 keeps everything; with `auto` the most that it may be
    policy: str  # empty: the worker's default
    labels: npt.NDArray[np.int8]  # [n] fine label of every prompt token
    family: str
    initial: str  # state of the decode automaton before the first sampled token
    rebuild: bool = False  # the client asks for a fresh prefill
    force_window: bool = False  # benchmarks: the window path even while nothing is compressed
    auto: bool = False  # the budget is chosen anew at each compression
    force_ids: tuple[int, ...] = ()  # evaluation: the tokens that this turn yields instead of sampled ones


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine really did in a turn. Token counts are per layer and KV head."""

    state: State
    reason: str | None
    logical: int  # tokens of the session so far, the last sampled one included
    held: int  # tokens whose keys and values are held now
    evicted: int
    prefill: int  # prompt tokens computed in this turn
    phases: dict[str, float]  # kept entries of each phase / (layers * KV heads); sums to `held`
    budget: int = 0  # in force at the turn's end: under `auto` the one last chosen; 0 = everything is kept

    def encode(self) -> str:
        """The text that travels in the reply."""
        body = {
            "v": VERSION,
            "state": self.state,
            "reason": self.reason,
            "logical": self.logical,
            "held": self.held,
            "evicted": self.evicted,
            "prefill": self.prefill,
            "phases": self.phases,
            "budget": self.budget,
        }
        return FACTS_PREFIX + orjson.dumps(body).decode()


def parse_turn(custom_params: Any, prompt_len: int) -> TurnSpec | None:
    """Reads the turn out of a request's `custom_params`; None if the request is none of ours.

    Raises:
        WireError: `bad_request`, with the field and what it must be.
    """
    if not isinstance(custom_params, dict) or "agentkv" not in custom_params:
        return None
    try:
        body = orjson.loads(custom_params["agentkv"])
    except (orjson.JSONDecodeError, TypeError) as error:
        raise WireError("bad_request", f"custom_params.agentkv must be a JSON string ({error})") from None
    if not isinstance(body, dict) or body.get("v") != VERSION:
        raise WireError("bad_request", f"custom_params.agentkv must be an object with v = {VERSION}")
    if prompt_len < 1:
        raise WireError("bad_request", "the prompt has no tokens")
    session = body.get("session")
    if not isinstance(session, str) or not session:
        raise WireError("bad_request", "session must be a non-empty string")
    decode = body.get("decode", {})
    if not isinstance(decode, dict):
        raise WireError("bad_request", "decode must be an object {family, initial}")
    initial = decode.get("initial", "start")
    if initial not in INITIAL_STATES:
        raise WireError("bad_request", f"decode.initial must be one of {', '.join(INITIAL_STATES)}")
    policy = body.get("policy", "")
    if not isinstance(policy, str):
        raise WireError("bad_request", "policy must be a name")
    auto = body.get("budget") == "auto"
    if auto and not body.get("cap"):
        raise WireError("bad_request", "budget auto needs a cap of at least 1")
    return TurnSpec(
        session=session,
        epoch=_count(body, "epoch"),
        budget=_count(body, "cap" if auto else "budget"),
        policy=policy,
        labels=_labels(body.get("runs"), prompt_len),
        family=str(decode.get("family", "plain")),
        initial=initial,
        rebuild=body.get("rebuild") is True,
        force_window=body.get("force_window") is True,
        auto=auto,
        force_ids=_ids(body.get("force_ids", [])),
    )


def _count(body: dict[str, Any], field: str) -> int:
    value = body.get(field, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise WireError("bad_request", f"{field} must be a whole number of at least 0")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise WireError("bad_request", "force_ids must be a list of token ids")
    return tuple(value)


def _labels(runs: Any, prompt_len: int) -> npt.NDArray[np.int8]:
    """[n] labels from flat runs (start, end, label, …) that must cover [0, n) without gap or overlap."""
    rule = f"runs must be flat triples start, end, label that cover [0, {prompt_len}) in order"
    if not isinstance(runs, list) or len(runs) % 3 or not all(type(value) is int for value in runs):
        raise WireError("bad_request", rule)
    if any(value >> 62 for value in runs):  # negative ones too: no position, and none that fits an array
        raise WireError("bad_request", rule)
    table = np.asarray(runs, dtype=np.int64).reshape(-1, 3)
    starts, ends, labels = table[:, 0], table[:, 1], table[:, 2]
    edges = np.concatenate(([0], ends))
    covers = np.array_equal(starts, edges[:-1]) and edges[-1] == prompt_len and bool((ends > starts).all())
    if not covers or not bool(((labels >= 0) & (labels < len(Label))).all()):
        raise WireError("bad_request", rule)
    return np.repeat(labels.astype(np.int8), ends - starts)
