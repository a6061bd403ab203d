"""SGLang flags that the AgentKV cache needs, and those that would corrupt it: refused by name, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class RefusedFlagError(ValueError):
    """A server flag that cannot work with the AgentKV cache."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One flag: refused when the server's argument `name` has a value for which `when` holds."""

    name: str  # attribute of SGLang's ServerArgs; the flag is --name with dashes
    reason: str
    when: Callable[[Any], bool] = bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


def _not_none(value: Any) -> bool:
    return value not in (None, "none", "null")


def _quantised(value: Any) -> bool:
    return value not in (None, "auto", "bfloat16", "bf16", "float16", "float32")


_READS_WHOLE_ROWS = "it reads a KV row from position 0, and a compressed row begins with a hole"
_RECENT_TAIL = "compressed rows keep the newest tokens in place for one token a step only"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("speculative_algorithm", _RECENT_TAIL, _not_none),
    Refusal("enable_hierarchical_cache", _READS_WHOLE_ROWS),
    Refusal("enable_lmcache", _READS_WHOLE_ROWS),
    Refusal("enable_flexkv", _READS_WHOLE_ROWS),
    Refusal("enable_unified_cache_external_linker", _READS_WHOLE_ROWS),
    Refusal("enable_hisparse", _READS_WHOLE_ROWS),
    Refusal("disaggregation_mode", _READS_WHOLE_ROWS, _not_none),
    Refusal("disaggregation_decode_enable_offload_kvcache", _READS_WHOLE_ROWS),
    Refusal("dcp_size", "a session's KV must lie on one rank per head", _more_than_one),
    Refusal("attn_cp_size", "a session's KV must lie on one rank per head", _more_than_one),
    Refusal("enable_kv_cache_sharding", "it takes no other radix cache and no sessions"),
    Refusal("enable_unified_memory", "its pool moves slots that a compressed row points to"),
    Refusal("pp_size", "layers on other ranks would free other slots", _more_than_one),
    Refusal(
        "dp_size",
        "a session lives in one scheduler: start several engines behind the gateway",
        _more_than_one,
    ),
    Refusal("enable_dp_attention", "a session lives in one scheduler: start several engines behind the gateway"),
    Refusal("kv_cache_dtype", "scores would read quantised keys", _quantised),
    Refusal("enable_deterministic_inference", "its extend kernel takes the window's length from the row's start"),
    Refusal("enable_mixed_chunk", "prefill and decode tokens in one batch are not captured apart"),
    Refusal("strip_thinking_cache", "it frees the output tail and takes it to be intact"),
    Refusal("enable_lora", "sessions are not kept apart by adapter"),
    Refusal("enable_session_radix_cache", "AgentKV sessions are streaming sessions; the two exclude each other"),
    Refusal("disable_radix_cache", "shared prefixes live in the tree; it costs nothing to keep it"),
)

REQUIRED: dict[str, str | None] = {
    "--radix-cache-backend": "agentkv",
    "--enable-streaming-session": None,
    "--enable-cache-report": None,
}
"""Flags that the launcher adds. None = a switch."""


def refuse(server_args: Any) -> None:
    """Checks the arguments of a starting server.

    Raises:
        RefusedFlagError: all refused flags by name, each with its reason.
    """
    found = [
        f"{refusal.flag} {getattr(server_args, refusal.name)!r}: {refusal.reason}"
        for refusal in REFUSALS
        if hasattr(server_args, refusal.name) and refusal.when(getattr(server_args, refusal.name))
    ]
    if not server_args.enable_streaming_session:
        found.append("--enable-streaming-session is needed: sessions live in it")
    if found:
        raise RefusedFlagError("the AgentKV cache cannot run with these flags:\n  " + "\n  ".join(found))
