"""Our own chat template with tools, for models whose template cannot show them. It is append-only.

Turns are written with the family's own control tokens. Calls and results stand between the tags that the engine's
Hermes-style parser reads. Nothing depends on later messages, so a rendering is always a prefix of the next.
"""

from __future__ import annotations

from .families.family import Family

TOOLS_TEMPLATE = """
{%- macro turn(role, text) -%}
{{ turn_open }}{{ turn_roles.get(role, role) }}{{ turn_head }}{{ text }}{{ turn_close }}
{%- endmacro -%}
{%- set ns = namespace(first=0) -%}
{{ turn_begin }}
{%- set given = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if messages and messages[0].role == 'system' -%}{%- set ns.first = 1 -%}{%- endif -%}
{%- if tools -%}
{%- set listing -%}
{{ given }}{{ '\\n\\n' if given else '' -}}
# Tools

You can call functions. Each line between <tools> and </tools> describes one of them as JSON:
<tools>
{% for tool in tools -%}
{{ (tool.function if tool.function is defined else tool) | tojson }}
{% endfor -%}
</tools>

To call a function, write its name and arguments as one JSON object between <tool_call> and </tool_call>. \
Use one such block for each call:
<tool_call>
{"name": "the function", "arguments": {"an argument": "its value"}}
</tool_call>

The results come back between <tool_response> and </tool_response>. Answer in plain text when no function is needed.
{%- endset -%}
{{ turn('system', listing) }}
{%- elif given -%}
{{ turn('system', given) }}
{%- endif -%}
{%- for message in messages[ns.first:] -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}
{{ turn_open }}{{ turn_roles.get('tool', 'user') }}{{ turn_head }}
{%- else -%}
{{ '\\n' }}
{%- endif -%}
{{ '<tool_response>\\n' }}{{ message.content }}{{ '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}
{{ turn_close }}
{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{ turn_open }}{{ turn_roles.get('assistant', 'assistant') }}{{ turn_head }}
{%- if message.reasoning_content -%}
{{ '<think>\\n' }}{{ message.reasoning_content }}{{ '\\n</think>\\n\\n' }}
{%- endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if not loop.first or message.content }}{{ '<tool_call>\\n{"name": ' }}{{ call.function.name | tojson -}}
{{ ', "arguments": ' }}{{ call.function.arguments if call.function.arguments is string else \
call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ turn_close }}
{%- else -%}
{{ turn(message.role, message.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ turn_open }}{{ turn_roles.get('assistant', 'assistant') }}{{ turn_head }}
{%- endif -%}
"""


def template_arguments(family: Family, bos: str = "") -> dict[str, object]:
    """Values that make `TOOLS_TEMPLATE` write the family's turns; `bos` opens the prompt."""
    if not family.turn_end:
        return {"turn_begin": bos, "turn_open": "<|", "turn_head": "|>\n", "turn_close": "\n", "turn_roles": {}}
    newline = "\n" if family.header[1] == "\n" else ""
    return {
        "turn_begin": bos,
        "turn_open": family.header[0],
        "turn_head": family.header[1],
        "turn_close": family.turn_end[0] + newline,
        "turn_roles": family.roles,
    }
