"""The family of last resort: nothing is known about the template; calls are recognised in Hermes form."""

from __future__ import annotations

from .family import THINK, TOOL_CALL, TOOL_RESPONSE, Family

PLAIN = Family(
    name="plain",
    title="Unknown template",
    think=(THINK,),
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
)
