"""What a simulation starts from: measured times of one worker, and the agents' ways."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "parameters"


class ParameterError(ValueError):
    """A parameter file that cannot be used; the message names the field."""


@dataclass(frozen=True)
class Service:
    """One worker's times, fitted to measurements. Seconds and tokens; KV tokens count per layer and KV head.

    A prefill of n tokens takes `prefill_base + prefill_token * n`, and decoding stands still meanwhile, as in SGLang.
    A decode step of a batch of b turns that hold h KV tokens together takes `step_base + step_row * b + step_kv * h`.
    """

    prefill_base: float
    prefill_token: float
    step_base: float
    step_row: float
    step_kv: float
    pool_tokens: int
    max_running: int
    slack_tokens: int = 128  # tokens over the budget between two compressions

    def prefill(self, tokens: int) -> float:
        """Seconds of a prefill."""
        return self.prefill_base + self.prefill_token * tokens

    def step(self, batch: int, held: float) -> float:
        """Seconds of a decode step."""
        return self.step_base + self.step_row * batch + self.step_kv * held


@dataclass(frozen=True)
class Workload:
    """How agents behave. Medians and 95th percentiles are of log-normal distributions; times are in seconds."""

    first_tokens: tuple[float, float]  # system prompt, tools and the first message
    new_tokens: tuple[float, float]  # a turn's tool results or question
    output_tokens: tuple[float, float]
    pause: tuple[float, float]  # from a reply to the agent's next turn: the tool's time
    turns: float  # mean number of turns of a session (geometric)


@dataclass(frozen=True)
class Parameters:
    """`source` says where the numbers come from: machine, model, commands, date."""

    source: dict[str, str]
    service: Service
    workload: Workload

    def dump(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=2) + "\n"


def load(path: Path) -> Parameters:
    """The parameters in a JSON file.

    Raises:
        ParameterError: the file is not there or not whole, with the field's name.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path}: {error}") from error
    try:
        workload: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["workload"].items()}
        made = Parameters(dict(data["source"]), Service(**data["service"]), Workload(**workload))
    except (KeyError, TypeError, AttributeError) as error:
        raise ParameterError(f"{path}: {error}") from error
    _check(path, asdict(made.service) | asdict(made.workload))
    return made


def _check(path: Path, values: dict[str, Any]) -> None:
    for name, value in values.items():
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int | float) or number < 0:
                raise ParameterError(f"{path}: {name} must be a number of at least 0, not {number!r}")
        if isinstance(value, tuple) and not 0 < value[0] <= value[1]:
            raise ParameterError(f"{path}: {name} is a median and a 95th percentile, so 0 < first <= second")
    for name in ("step_base", "pool_tokens", "max_running", "turns"):
        if values[name] <= 0:
            raise ParameterError(f"{path}: {name} must be more than 0")
