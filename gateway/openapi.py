"""The OpenAPI description, written by hand: the routes are plain ones, and this says what they really take."""

from __future__ import annotations

from typing import Any

from agentkv_serve import __version__
from agentkv_serve.gateway.settings import MIN_BUDGET

Json = dict[str, Any]

_ERRORS = {
    "400": "A field or header is wrong; the message names it.",
    "401": "The API key is missing or unknown.",
    "403": "The settings do not allow it.",
    "404": "No such model, session, response, worker or path.",
    "409": "Another turn of the session is running, or the thing exists already.",
    "413": "The body is too large.",
    "415": "The body is not plain application/json.",
    "429": "The key may hold no more sessions.",
    "502": "A worker failed.",
    "503": "No worker can serve now.",
}


def describe() -> Json:
    """The OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "AgentKV Serve gateway", "version": __version__},
        "paths": {**_generation(), **_models(), **_sessions(), **_admin(), **_probes()},
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "admin": {"type": "http", "scheme": "bearer"},
            },
            "schemas": _schemas(),
        },
    }


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _responses(*codes: str, ok: Json | None = None, status: str = "200", stream: bool = False) -> Json:
    content = _json(ok or {"type": "object"})
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    good: Json = {"description": "Done."}
    if status != "204":
        good["content"] = content
    errors = {code: {"description": _ERRORS[code], "content": _json(_ref("Error"))} for code in codes}
    return {status: good, **errors}


_CONTROLS: list[Json] = [
    {
        "name": "X-AgentKV-Session",
        "in": "header",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:/@+=-]{1,256}$"},
    },
    {"name": "X-AgentKV-Budget", "in": "header", "schema": {"type": "string", "pattern": "^(full|auto|[0-9]{1,18})$"}},
    {"name": "X-AgentKV-Policy", "in": "header", "schema": {"type": "string", "pattern": "^[a-z0-9_]{1,32}$"}},
    {"name": "X-AgentKV-Session-Final", "in": "header", "schema": {"enum": ["true", "false", "1", "0"]}},
    {
        "name": "X-AgentKV-Session-Token-Limit",
        "in": "header",
        "schema": {"type": "string", "pattern": "^[1-9][0-9]{0,14}$"},
    },
    {"name": "X-AgentKV-Session-Rebuild", "in": "header", "schema": {"enum": ["true", "false", "1", "0"]}},
    {"name": "X-AgentKV-Affinity", "in": "header", "schema": {"enum": ["soft", "hard"]}},
    {"name": "X-AgentKV-Retain", "in": "header", "schema": {"enum": ["all", "template"]}},
]


def _generation() -> Json:
    codes = ("400", "401", "404", "409", "413", "415", "429", "502", "503")

    def operation(name: str, summary: str, schema: str, *, controls: bool = True, stream: bool = True) -> Json:
        errors = {"402": {"description": "The session's token limit is spent.", "content": _json(_ref("Error"))}}
        return {
            "operationId": name,
            "summary": summary,
            "security": [{"key": []}],
            "parameters": _CONTROLS if controls else [],
            "requestBody": {"required": True, "content": _json(_ref(schema))},
            "responses": {**_responses(*codes, stream=stream), **(errors if controls else {})},
        }

    count = operation("countTokens", "Count the tokens of a prompt.", "Messages", controls=False, stream=False)
    embeddings = {
        "operationId": "embeddings",
        "summary": "Not served: the workers generate text only.",
        "security": [{"key": []}],
        "responses": {
            "401": _responses("401")["401"],
            "501": {"description": "Not supported.", "content": _json(_ref("Error"))},
        },
    }
    return {
        "/v1/chat/completions": {"post": operation("chat", "One chat turn.", "Chat")},
        "/v1/completions": {"post": operation("complete", "A text completion, without a session.", "Completion")},
        "/v1/messages": {"post": operation("messages", "One turn, in Anthropic's words.", "Messages")},
        "/v1/messages/count_tokens": {"post": count},
        "/v1/responses": {"post": operation("respond", "One turn of the Responses API.", "Response")},
        "/v1/responses/{response_id}": {
            "parameters": [_path("response_id")],
            "get": _plain("getResponse", "A kept response.", "401", "404"),
            "delete": _plain("deleteResponse", "Forget a kept response.", "401", "404"),
        },
        "/v1/embeddings": {"post": embeddings},
    }


def _plain(name: str, summary: str, *codes: str, key: str = "key", status: str = "200") -> Json:
    responses = _responses(*codes, status=status)
    return {"operationId": name, "summary": summary, "security": [{key: []}], "responses": responses}


def _path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _models() -> Json:
    return {
        "/v1/models": {"get": _plain("listModels", "The served models.", "401")},
        "/v1/models/{model}": {
            "parameters": [_path("model")],
            "get": _plain("getModel", "One served model.", "401", "404"),
        },
    }


def _sessions() -> Json:
    release = _plain("releaseSession", "End a session; may be said twice.", "401", "404", status="204")
    return {
        "/v1/agentkv/sessions": {"get": _plain("listSessions", "Your sessions.", "401")},
        "/v1/agentkv/sessions/{session_id}": {
            "parameters": [_path("session_id")],
            "get": _plain("getSession", "One of your sessions.", "401", "404"),
            "delete": _plain("endSession", "End one of your sessions.", "401", "404", status="204"),
        },
        "/v1/agentkv/sessions/{session_id}/release": {"parameters": [_path("session_id")], "post": release},
    }


def _admin() -> Json:
    worker = [_path("worker_id")]

    def plain(name: str, summary: str, *codes: str, status: str = "200") -> Json:
        return _plain(name, summary, "401", "404", *codes, key="admin", status=status)

    add = plain("addWorker", "Add a worker for all gateways.", "400", "409", "413", "415", "503", status="201")
    add["requestBody"] = {"required": True, "content": _json(_ref("Worker"))}
    return {
        "/admin/workers": {"get": plain("listWorkers", "The workers."), "post": add},
        "/admin/workers/{worker_id}": {
            "parameters": worker,
            "get": plain("getWorker", "One worker."),
            "delete": plain("removeWorker", "Remove a worker.", "503", status="204"),
        },
        "/admin/workers/{worker_id}/drain": {
            "parameters": worker,
            "post": plain("drainWorker", "Give it no new sessions.", "503"),
        },
        "/admin/workers/{worker_id}/undrain": {
            "parameters": worker,
            "post": plain("undrainWorker", "Give it new sessions again.", "503"),
        },
        "/admin/workers/{worker_id}/sessions": {
            "parameters": worker,
            "get": plain("workerSessions", "The sessions that it holds."),
        },
        "/admin/fleet": {"get": plain("fleet", "Workers and the sessions that they hold.")},
        "/admin/events": {"get": plain("events", "The fleet, and one session, whenever they change (SSE).")},
        "/admin/sessions/{key}": {
            "parameters": [_path("key")],
            "get": plain("sessionView", "What the cache holds of a session.", "400"),
        },
        "/admin/sessions/{key}/texts": {
            "parameters": [_path("key")],
            "get": plain("sessionTexts", "The text of its tokens, where the settings allow it.", "400", "403"),
        },
        "/admin/config": {"get": plain("configuration", "The settings in force, without secrets.")},
    }


def _page(name: str, summary: str) -> Json:
    content = {kind: {"schema": {"type": "string"}} for kind in ("text/html", "text/css", "text/javascript")}
    found = {"description": "Done.", "content": content}
    return {"operationId": name, "summary": summary, "responses": {**_responses("404"), "200": found}}


def _probes() -> Json:
    text = {"200": {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    return {
        "/internal/workers/register": {
            "post": {
                "operationId": "register",
                "summary": "A worker says that it is there, signed with the join token.",
                "parameters": [{"name": "X-AgentKV-Signature", "in": "header", "schema": {"type": "string"}}],
                "responses": _responses("400", "401", "404", "413", "503"),
            }
        },
        "/ui": {"get": _page("page", "The page.")},
        "/ui/{file}": {"parameters": [_path("file")], "get": _page("pageFile", "A file of the page.")},
        "/healthz": {"get": {"operationId": "healthz", "summary": "The process is up.", "responses": _responses()}},
        "/readyz": {
            "get": {
                "operationId": "readyz",
                "summary": "A worker can take a turn.",
                "responses": {
                    **_responses(),
                    "503": {"description": "No worker, or stopping.", "content": _json({"type": "object"})},
                },
            }
        },
        "/metrics": {"get": {"operationId": "metrics", "summary": "Metrics.", "responses": text}},
    }


def _schemas() -> Json:
    model = {"type": "string", "minLength": 1}
    positive = {"type": "integer", "minimum": 1}
    controls: Json = {
        "type": "object",
        "description": "The control headers, for clients that cannot set headers.",
        "additionalProperties": False,
        "properties": {
            "session_id": {"type": "string"},
            "budget": {"anyOf": [{"type": "integer", "minimum": MIN_BUDGET}, {"enum": ["full", "auto"]}]},
            "policy": {"type": "string"},
            "final": {"type": "boolean"},
            "token_limit": positive,
            "rebuild": {"type": "boolean"},
            "affinity": {"enum": ["soft", "hard"]},
            "retain": {"enum": ["all", "template"]},
        },
    }
    message: Json = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _ref("Part")}, {"type": "null"}]},
            "tool_calls": {"type": "array", "items": _ref("ToolCall")},
            "tool_call_id": {"type": "string"},
            "reasoning_content": {"type": "string"},
        },
    }
    function: Json = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
    }
    call: Json = {
        "type": "object",
        "required": ["function"],
        "properties": {"id": {"type": "string"}, "function": function},
    }
    tool: Json = {"type": "object", "required": ["type", "function"], "properties": {"type": {"const": "function"}}}
    tool["properties"]["function"] = function
    common: Json = {"model": model, "stream": {"type": "boolean"}, "agentkv": controls}
    messages = {"type": "array", "minItems": 1, "items": _ref("Message")}
    anthropic: Json = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string"}},
    }

    def body(required: list[str], **properties: Any) -> Json:
        return {"type": "object", "required": ["model", *required], "properties": {**common, **properties}}

    error = {"type": "object", "required": ["message"], "properties": {"message": {"type": "string"}}}
    return {
        "Error": {"type": "object", "required": ["error"], "properties": {"error": error}},
        "Part": {
            "type": "object",
            "required": ["type", "text"],
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        },
        "Message": message,
        "ToolCall": call,
        "Chat": body(["messages"], messages=messages, tools={"type": "array", "items": tool}, max_tokens=positive),
        "Completion": body(["prompt"], prompt={"type": "string"}, max_tokens=positive),
        "Messages": body(
            ["messages", "max_tokens"],
            messages={"type": "array", "minItems": 1, "items": anthropic},
            max_tokens=positive,
        ),
        "Response": body(
            ["input"], input={"type": "string"}, instructions={"type": "string"}, max_output_tokens=positive
        ),
        "Worker": {
            "type": "object",
            "required": ["url"],
            "additionalProperties": False,
            "properties": {
                "url": {"type": "string", "pattern": "^https?://[a-z0-9.-]+:[0-9]{2,5}$"},
                "id": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
                "key": {"type": ["string", "null"]},
            },
        },
    }
