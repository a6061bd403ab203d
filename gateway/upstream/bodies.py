"""Bodies that the gateway sends to SGLang: only known fields, and all control fields are the gateway's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentkv_serve.gateway.encoding import dumps

# Sampling and output fields that a client may set; everything else stays in the gateway.
CLIENT_FIELDS = frozenset(
    (
        *("frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens"),
        *("presence_penalty", "response_format", "seed", "stop", "temperature", "top_p", "user", "n"),
        *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
        # SGLang's own
        *("top_k", "min_p", "min_tokens", "regex", "ebnf", "repetition_penalty", "stop_token_ids", "stop_regex"),
        *("no_stop_trim", "ignore_eos", "skip_special_tokens", "chat_template_kwargs", "reasoning"),
        *("separate_reasoning", "stream_reasoning"),
    )
)
COMPLETION_FIELDS = CLIENT_FIELDS - {"tools", "tool_choice", "parallel_tool_calls"} | {
    *("best_of", "echo", "suffix", "json_schema")
}
# Fields that steer the engine itself. Dropping these silently would change what the client asked for.
REFUSED_FIELDS = frozenset(
    (
        *("input_ids", "session_params", "custom_params", "custom_logit_processor", "lora_path", "extra_key"),
        *("return_hidden_states", "return_routed_experts", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
        *("kv_hints", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"),
    )
)
# The prompt of a session turn is its token ids; SGLang still wants a message to be there.
PLACEHOLDER = [{"role": "user", "content": "."}]
FRAMED = {"x-sglext-ids-framed": "1"}


def session_body(
    sampling: Mapping[str, Any],
    *,
    model: str,
    ids: Sequence[int] | Any,
    stream: bool,
    rid: str,
    salt: str,
    control: Mapping[str, Any],
) -> bytes:
    """The body of a session turn. `control` goes in as a JSON string, since SGLang's type of `custom_params`
    only takes scalars and flat lists."""
    body = {
        **sampling,
        "model": model,
        "messages": PLACEHOLDER,
        "input_ids": ids,
        "return_output_ids_in_sglext": True,
        "return_cached_tokens_details": True,
        "custom_params": {"agentkv": dumps(control).decode()},
    }
    return _finish(body, stream, rid, salt)


def stateless_body(
    sampling: Mapping[str, Any],
    *,
    model: str,
    prompt: Mapping[str, Any],
    stream: bool,
    rid: str,
    salt: str,
) -> bytes:
    """The body of a request without a session. `prompt` holds the client's `messages` or `prompt`: SGLang renders
    and tokenises them itself."""
    body = {**sampling, **prompt, "model": model, "return_cached_tokens_details": True}
    return _finish(body, stream, rid, salt)


def _finish(body: dict[str, Any], stream: bool, rid: str, salt: str) -> bytes:
    body |= {"rid": rid, "cache_salt": salt, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return dumps(body)
