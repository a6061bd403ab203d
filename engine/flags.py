"""SGLang flags that the AgentKV cache needs, and those that would corrupt it: refused by name, with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
    also: str = ""  # SGLang's other name for the flag

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def refuses(self, arguments: Sequence[str]) -> bool:
        """Whether a command line gives the flag a refused value, as far as that can be told before SGLang reads it."""
        for index, argument in enumerate(arguments):
            name, joined, value = argument.partition("=")
            if name not in (self.flag, self.also):
                continue
            following = arguments[index + 1] if index + 1 < len(arguments) else "--"
            if not joined and following.startswith("--"):
                return self.when is bool  # a switch; a flag without its value is SGLang's to complain of
            with contextlib.suppress(ValueError):  # likewise a value of the wrong type
                return self.when(value if joined else following)
        return False


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


def _not_none(value: Any) -> bool:
    return value not in (None, "none", "null")


def _quantised(value: Any) -> bool:
    return value not in (None, "auto", "bfloat16", "bf16", "float16", "float32")


_READS_WHOLE_ROWS = "it reads a KV row from position 0, and a compressed row begins with a hole"
_RECENT_TAIL = "compressed rows keep the newest tokens in place for one token a step only"
_ONE_RANK = "a session's KV must lie on one rank per head"
_ONE_SCHEDULER = "a session lives in one scheduler: start several engines behind the gateway"
_ONE_FORWARD = "queries are captured for one forward at a time"
_OWN_ATTENTION = "it computes attention outside of the attention backend, which reads windows and captures queries"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("speculative_algorithm", _RECENT_TAIL, _not_none),
    Refusal("dllm_algorithm", _RECENT_TAIL, _not_none),
    Refusal("enable_hierarchical_cache", _READS_WHOLE_ROWS, also="--enable-hicache"),
    Refusal("hicache_storage_backend", _READS_WHOLE_ROWS, _not_none),
    Refusal("enable_lmcache", _READS_WHOLE_ROWS),
    Refusal("enable_flexkv", _READS_WHOLE_ROWS),
    Refusal("enable_unified_cache_external_linker", _READS_WHOLE_ROWS),
    Refusal("enable_hisparse", _READS_WHOLE_ROWS),
    Refusal("disaggregation_mode", _READS_WHOLE_ROWS, _not_none),
    Refusal("enable_pd_role_switch", _READS_WHOLE_ROWS),
    Refusal("disaggregation_decode_enable_offload_kvcache", _READS_WHOLE_ROWS),
    Refusal("kv_canary", "it checks that a row holds the keys of all its tokens", _not_none),
    Refusal("dcp_size", _ONE_RANK, _more_than_one, "--decode-context-parallel-size"),
    Refusal("attn_cp_size", _ONE_RANK, _more_than_one, "--attention-context-parallel-size"),
    Refusal("enable_prefill_cp", _ONE_RANK),
    Refusal("enable_kv_cache_sharding", "it takes no other radix cache and no sessions"),
    Refusal("enable_unified_memory", "its pool moves slots that a compressed row points to"),
    Refusal("enable_page_major_kv_layout", "keys of one layer must lie in one buffer"),
    Refusal("prefill_only_disable_kv_cache", "without a KV cache there is nothing to keep"),
    Refusal("pp_size", "layers on other ranks would free other slots", _more_than_one, "--pipeline-parallel-size"),
    Refusal("dp_size", _ONE_SCHEDULER, _more_than_one, "--data-parallel-size"),
    Refusal("attn_dp_size", _ONE_SCHEDULER, _more_than_one, "--attention-data-parallel-size"),
    Refusal("enable_dp_attention", _ONE_SCHEDULER),
    Refusal("kv_cache_dtype", "scores would read quantised keys", _quantised),
    Refusal("enable_deterministic_inference", "its extend kernel takes the window's length from the row's start"),
    Refusal("enable_mixed_chunk", "prefill and decode tokens in one batch are not captured apart"),
    Refusal("enable_two_batch_overlap", _ONE_FORWARD),
    Refusal("enable_pdmux", _ONE_FORWARD),
    Refusal("enable_torch_compile", "query capture inside a compiled model is untested"),
    Refusal("enable_nvidia_megakernel", _OWN_ATTENTION),
    Refusal("enable_amd_monokernel", _OWN_ATTENTION),
    Refusal("strip_thinking_cache", "it frees the output tail and takes it to be intact"),
    Refusal("enable_lora", "sessions are not kept apart by adapter"),
    Refusal("lora_paths", "sessions are not kept apart by adapter"),
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


def refuse_prefill_graph(device_type: str) -> None:
    """Checks that prompts run without CUDA graphs.

    Raises:
        RefusedFlagError: they would be recorded.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    if device_type == "cuda" and not check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED):
        raise RefusedFlagError(
            "--disable-prefill-cuda-graph is needed: which prompt queries are kept is decided for each forward, and a "
            "graph would go on keeping those of the prompt that it was recorded with"
        )
