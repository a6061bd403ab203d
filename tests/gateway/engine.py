"""A double of the engine at the transport seam: SGLang's endpoints and frames, and the AgentKV session rules.

It generates nothing: a script says what the model answers. Token ids, frames, facts, aborts and refusals are made
the way the real server makes them.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

Body = dict[str, Any]


@dataclass
class Answer:
    """What the model says. `stop` False: it ran into the length limit."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    stop: bool = True
    opens: bool = True  # the thinking begins with its own marker, not in the prompt
    closes: bool = True  # the thinking comes to its end
    pause: float = 0.0  # before the first token
    gap: float = 0.0  # between frames
    pieces: int = 4  # frames of the content
    die_after: int | None = None  # close the connection after that many content frames
    refuse: tuple[int, str] | None = None  # (status, message)
    error_frame: tuple[int, str] | None = None

    @property
    def raw(self) -> str:
        """The text that the model samples, without the end of its turn."""
        think = ("<think>\n" if self.opens else "") + self.reasoning + ("\n</think>\n\n" if self.closes else "")
        think = think if self.reasoning else ""
        calls = "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            for name, arguments in self.calls
        )
        return think + self.content + ("\n" if self.content and calls else "") + calls


@dataclass
class Record:
    """A session's state in the engine."""

    ids: list[int]
    epoch: int
    held: int


class FakeEngine:
    """The app and everything that it saw."""

    def __init__(self, tokenizer: Tokenizer, *, model: str = "tiny", context_length: int = 4096) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.context_length = context_length
        self.started = time.time()
        self.script: Callable[[Body], Answer] = lambda body: Answer("Hello from the model.")
        self.requests: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.aborted: list[str] = []
        self.ended: list[str] = []
        self.closed: list[str] = []
        self.sessions: dict[str, Record] = {}
        self.epochs: dict[str, int] = {}
        self.running: dict[str, asyncio.Event] = {}
        self.tolerant = False  # refuses what it cannot read, as SGLang's validation does
        self.deaf = False  # ignores aborts
        self.loading = False
        self.key: str | None = None
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/server_info", self._info),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/abort_request", self._abort, methods=["POST"]),
                Route("/close_session", self._close, methods=["POST"]),
            ]
        )

    # ---- control ------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Answer as at first, with nothing seen."""
        self.script = lambda body: Answer("Hello from the model.")
        self.tolerant = False
        for seen in (self.requests, self.headers, self.aborted, self.ended, self.closed):
            seen.clear()

    def restart(self) -> None:
        """Lose all state, as a restarted process would."""
        self.started = time.time() + 1
        self.sessions.clear()
        self.epochs.clear()

    def text(self, body: Body) -> str:
        """The prompt of a request as text."""
        return self.tokenizer.decode(body["input_ids"], skip_special_tokens=False)

    @staticmethod
    def control(body: Body) -> Body | None:
        """The AgentKV part of a request."""
        params = body.get("custom_params") or {}
        return json.loads(params["agentkv"]) if "agentkv" in params else None

    # ---- endpoints ----------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self.loading else 200)

    async def _models(self, request: Request) -> Response:
        card = {"id": self.model, "object": "model", "max_model_len": self.context_length}
        return JSONResponse({"object": "list", "data": [card]})

    async def _info(self, request: Request) -> Response:
        return JSONResponse({"startup_time": self.started, "version": "0.5.23"})

    async def _abort(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self.running and not self.deaf:
            self.running[rid].set()
        return Response(status_code=200)

    async def _close(self, request: Request) -> Response:
        key = (await request.json())["session_id"]
        self.closed.append(key)
        known = self.sessions.pop(key, None)
        return Response(status_code=200) if known else JSONResponse({"error": "no such session"}, 400)

    async def _chat(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.tolerant and not isinstance(body.get("n", 1), int):
            return self._refusal(400, "n must be an integer")
        answer = self.script(body)
        if answer.refuse:
            return self._refusal(*answer.refuse)
        fault = self._admit(body)
        if fault:
            return self._refusal(400, fault)
        stopped = self.running[body["rid"]] = asyncio.Event()
        if body.get("stream"):
            stream = self._stream(body, answer, stopped)
            # SGLang answers with a status only when the first token is there.
            first = await anext(stream)

            async def whole() -> Any:
                yield first
                async for piece in stream:
                    yield piece

            return StreamingResponse(whole(), media_type="text/event-stream")
        try:
            aborted = await self._wait(stopped, answer.pause + answer.gap * answer.pieces)
            return JSONResponse(self._reply(body, answer, aborted))
        finally:
            self._end(body)

    async def _completion(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        count = len(prompts) * (body.get("n") or 1)
        base = {"id": body["rid"], "object": "text_completion", "created": 1, "model": self.model}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": None}
        choices = [{"index": i, "text": "ok", "logprobs": None, "finish_reason": "stop"} for i in range(count)]
        sglext = {"cached_tokens_details": {"device": 3, "host": 0}}
        if not body.get("stream"):
            return JSONResponse({**base, "choices": choices, "usage": usage, "sglext": sglext})
        frames = [{**base, "choices": choices}, {**base, "choices": [], "sglext": sglext}]
        frames.append({**base, "choices": [], "usage": usage})
        data = [json.dumps(f, separators=(",", ":")) for f in frames] + ["[DONE]"]
        return Response("".join(f"data: {d}\n\n" for d in data), media_type="text/event-stream")

    # ---- rules --------------------------------------------------------------------------------------------

    def _admit(self, body: Body) -> str:
        control = self.control(body)
        if control is None:
            return ""
        runs, length = control["runs"], len(body["input_ids"])
        edges = [0, *runs[1::3]]
        if runs[0::3] != edges[:-1] or edges[-1] != length:
            return "agentkv:bad_request: the runs do not cover the prompt"
        if control["epoch"] < self.epochs.get(control["session"], -1):
            return f"agentkv:stale_epoch: epoch {control['epoch']} is behind"
        self.epochs[control["session"]] = control["epoch"]
        return ""

    def _commit(self, body: Body, output: list[int]) -> Body | None:
        control = self.control(body)
        if control is None:
            return None
        key, ids = control["session"], body["input_ids"]
        record = self.sessions.get(key)
        resumed = record is not None and ids[: len(record.ids)] == record.ids and not control.get("rebuild")
        if resumed:
            assert record is not None
            state, reason, prefill, before = "resumed", None, len(ids) - len(record.ids), record.held
        else:
            fresh = record is None and control["epoch"] == 0
            state = "new" if fresh else "rebuilt"
            reason = None if fresh else "restarted" if record is None else "diverged"
            prefill, before = len(ids), 0
        logical = len(ids) + len(output)
        held = before + prefill + len(output)
        budget = control["cap"] if control["budget"] == "auto" else control["budget"]
        if budget:
            held = min(held, budget)
        self.sessions[key] = Record(ids + output, control["epoch"], held)
        phases = {"think": 0.0, "act": 0.0, "tool": 0.0, "others": float(held)}
        return {
            "v": 1,
            "state": state,
            "reason": reason,
            "logical": logical,
            "held": held,
            "evicted": logical - held,
            "prefill": prefill,
            "phases": phases,
            "budget": budget,
        }

    def _output(self, answer: Answer) -> list[int]:
        raw = answer.raw + ("<|im_end|>" if answer.stop else "")
        return self.tokenizer.encode(raw, add_special_tokens=False).ids

    def _details(self, body: Body, output: list[int]) -> Body:
        facts = self._commit(body, output)
        details: Body = {"device": 0, "host": 0}
        if facts:
            details["device"] = len(body["input_ids"]) - facts["prefill"]
            details |= {"storage": 0, "storage_backend": "agentkv:" + json.dumps(facts)}
        return details

    @staticmethod
    async def _wait(stopped: asyncio.Event, seconds: float) -> bool:
        try:
            await asyncio.wait_for(stopped.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _end(self, body: Body) -> None:
        self.running.pop(body["rid"], None)
        self.ended.append(body["rid"])

    def _refusal(self, status: int, message: str) -> Response:
        error = {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": status}
        return JSONResponse(error, status)

    # ---- replies ------------------------------------------------------------------------------------------

    def _calls(self, answer: Answer) -> list[Body]:
        return [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "index": index,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(answer.calls)
        ]

    def _usage(self, body: Body, output: list[int]) -> Body:
        prompt = len(body.get("input_ids") or [0])
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + len(output),
            "completion_tokens": len(output),
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
        }

    def _finish(self, answer: Answer) -> str:
        return ("tool_calls" if answer.calls else "stop") if answer.stop else "length"

    def _reply(self, body: Body, answer: Answer, aborted: bool) -> Body:
        output = [] if aborted else self._output(answer)
        message = {
            "role": "assistant",
            "content": "" if aborted else answer.content or None,
            "reasoning_content": answer.reasoning or None,
            "tool_calls": self._calls(answer) or None,
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": "abort" if aborted else self._finish(answer),
            "matched_stop": None,
        }
        reply: Body = {
            "id": body["rid"],
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice] * (body.get("n") or 1),
            "usage": self._usage(body, output),
            "metadata": {"weight_version": "default"},
        }
        if not aborted:
            sglext: Body = {"cached_tokens_details": self._details(body, output)}
            if body.get("return_output_ids_in_sglext"):
                sglext["output_ids"] = [output]
            reply["sglext"] = sglext
        return reply

    async def _stream(self, body: Body, answer: Answer, stopped: asyncio.Event) -> Any:
        base = {"id": body["rid"], "object": "chat.completion.chunk", "created": int(time.time()), "model": self.model}

        def content(delta: Body, finish: str | None = None) -> bytes:
            delta = {"reasoning_content": None, **delta}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}
            return frame({**base, "choices": [choice]})

        def frame(value: Body, event: str = "") -> bytes:
            head = f"event: {event}\n" if event else ""
            data = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            return f"{head}data: {data}\n\n".encode()

        try:
            aborted = await self._wait(stopped, answer.pause)
            yield content({"role": "assistant", "content": ""})
            for sent, delta in enumerate([] if aborted else self._deltas(answer)):
                aborted = await self._wait(stopped, answer.gap) if answer.gap else stopped.is_set()
                if aborted:
                    break
                if answer.die_after is not None and sent >= answer.die_after:
                    raise ConnectionResetError("the worker dies")
                yield content(delta)
            if answer.error_frame:
                status, message = answer.error_frame
                yield frame(
                    {"error": {"object": "error", "message": message, "type": "X", "param": None, "code": status}}
                )
                yield b"data: [DONE]\n\n"
                return
            yield content({}, "abort" if aborted else self._finish(answer))
            if not aborted:
                output = self._output(answer)
                details = {"cached_tokens_details": self._details(body, output)}
                yield frame({**base, "choices": [], "sglext": details})
                if body.get("return_output_ids_in_sglext"):
                    yield frame({**base, "choices": [], "sglext": {"output_ids": [output]}}, "sglext_ids")
                if (body.get("stream_options") or {}).get("include_usage"):
                    yield frame({**base, "choices": [], "usage": self._usage(body, output)})
            yield b"data: [DONE]\n\n"
        finally:
            self._end(body)

    def _deltas(self, answer: Answer) -> list[Body]:
        deltas: list[Body] = []
        if answer.reasoning:
            deltas.append({"reasoning_content": answer.reasoning})
        step = max(1, -(-len(answer.content) // answer.pieces))
        deltas += [{"content": answer.content[i : i + step]} for i in range(0, len(answer.content), step)]
        for call in self._calls(answer):
            arguments = call["function"]["arguments"]
            half = len(arguments) // 2
            first = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
            deltas.append({"tool_calls": [first]})
            for part in (arguments[:half], arguments[half:]):
                later = {
                    "id": None,
                    "index": call["index"],
                    "type": "function",
                    "function": {"name": None, "arguments": part},
                }
                deltas.append({"tool_calls": [later]})
        return deltas
