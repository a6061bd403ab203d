"""The worker's API key: by environment, since a command line is everybody's to read, and never in a log."""

from __future__ import annotations

import os
from typing import Any

ENVIRONMENT = "AGENTKV_ENGINE_API_KEY"
"""Where `agentkv engine` takes the key from, and hands it to SGLang's server in."""
FLAG = "--api-key"


def to_environment(arguments: list[str]) -> list[str]:
    """The arguments without `--api-key VALUE`; its value goes to the environment of this process and its children.

    Raises:
        ValueError: the flag has no value; the server would be open to everybody.
    """
    rest: list[str] = []
    incoming = iter(arguments)
    for argument in incoming:
        if argument == FLAG:
            key = next(incoming, "")
        elif argument.startswith(f"{FLAG}="):
            key = argument.split("=", 1)[1]
        else:
            rest.append(argument)
            continue
        if not key:
            raise ValueError(f"{FLAG} has no value: give the key, or leave the flag out to serve without one")
        os.environ[ENVIRONMENT] = key
    return rest


class Secret(str):
    """A text that does not show itself where SGLang logs its arguments."""

    def __repr__(self) -> str:
        return "'***'"


def take(arguments: Any) -> None:
    """Puts the key into SGLang's parsed arguments, and out of the environment."""
    key = os.environ.pop(ENVIRONMENT, "") or arguments.api_key
    if key:
        arguments.api_key = Secret(key)
