"""Chat templates: the same Jinja dialect as Hugging Face's, and what to do when a template knows no tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

JsonObject = dict[str, Any]


class TemplateError(ValueError):
    """The chat template is not valid, or refuses these messages; the text is the template's own."""


class ChatTemplate:
    """A compiled chat template. `tokens`: `bos_token`, `eos_token` and other
    values that the template may use."""

    def __init__(self, source: str, tokens: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.tokens = dict(tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> str:
        """The prompt's text. `now` fixes the date that the template may print (default: the wall clock).

        The template may change the message objects that it is given. Raises `TemplateError`.
        """
        pieces = self.stream(messages, tools, add_generation_prompt=add_generation_prompt, arguments=arguments, now=now)
        return "".join(pieces)

    def stream(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> Iterator[str]:
        """As `render`, piece by piece, so that a long prompt need not be held twice."""
        values = {**self.tokens, **(arguments or {})}
        values |= {"messages": list(messages), "tools": None if tools is None else list(tools)}
        values |= {"add_generation_prompt": add_generation_prompt}
        values |= {"strftime_now": lambda form: (now or datetime.now()).strftime(form)}
        try:
            yield from self._template.generate(values)
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is printed as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> SandboxedEnvironment:
    # Not the immutable sandbox: some templates append to lists, and they only ever see our copies.
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def tools_reach_the_prompt(template: ChatTemplate) -> bool:
    """Whether the template prints tool schemas, the assistant's calls and their results."""
    parameters = {"type": "object", "properties": {}}
    schema = {
        "type": "function",
        "function": {"name": "probe_schema", "description": "probe", "parameters": parameters},
    }
    function = {"name": "probe_call", "arguments": {"probe_key": "v"}}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    messages: list[JsonObject] = [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "probe_result", "tool_call_id": "abcdefgh1", "name": "probe_call"},
    ]
    try:
        text = template.render(messages, [schema])
    except TemplateError:
        return False
    return all(probe in text for probe in ("probe_schema", "probe_call", "probe_key", "probe_result"))
