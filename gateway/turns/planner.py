"""What a request is to its session: which one, where it goes on, and which tokens are new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers

from agentkv_serve.gateway.auth import Tenant
from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.routing.registry import Registry
from agentkv_serve.gateway.sessions import meaning
from agentkv_serve.gateway.sessions.identity import Keys, Named, issue_id, named_session
from agentkv_serve.gateway.sessions.ledger import NO_MATCH, Ledger, Match
from agentkv_serve.gateway.sessions.rendering import Prompt, PromptError, Renderer
from agentkv_serve.gateway.sessions.session import Head, Session
from agentkv_serve.gateway.sessions.store import (
    CALL_MARK,
    Lease,
    Mark,
    SessionBusy,
    SessionStore,
    TooManySessions,
)
from agentkv_serve.gateway.settings import Settings
from agentkv_serve.gateway.turns.controls import default_budget, read_controls
from agentkv_serve.gateway.turns.plan import Kind, Plan, unique_calls
from agentkv_serve.gateway.turns.request import ChatRequest
from agentkv_serve.phase_tagger import Label

# Reasons to run without a session that a client cannot help: a session header is then no contradiction.
_QUIETLY_ALONE = ("media", "raw_prompt")
SESSION_BUSY = "session_busy"
_RENDER_IN_THREAD = 16_384  # characters of new messages from which rendering leaves the event loop


class Planner:
    """Resolves requests to sessions and leases them."""

    def __init__(
        self,
        settings: Settings,
        store: SessionStore,
        registry: Registry,
        renderer: Renderer,
        keys: Keys,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._store = store
        self._registry = registry
        self._renderer = renderer
        self._keys = keys
        self._clock = clock

    async def plan(self, request: ChatRequest, tenant: Tenant, headers: Headers) -> Plan:
        """Plan a turn. On return a session's lease is held by the plan; on any error none is.

        Raises ApiError: 400 for bad ids and controls, 402 for a spent token limit, 404 for an unknown model, 409
        when another turn of the session runs too long, 429 when the tenant has too many sessions.
        """
        context_length = self._context_length(request.model)
        cap = tenant.limits.budget_cap
        controls = read_controls(headers, request.body, self._settings.budget, cap, context_length)
        named = named_session(headers, request.body, self._settings.sessions.headers)
        plan = Plan(request, tenant, Kind.STATELESS, "none", "", context_length, controls)
        if request.alone:
            if named and named.source == "header" and request.alone not in _QUIETLY_ALONE:
                raise bad_request(
                    f"{request.alone} cannot be used in a session: drop the session header or {request.alone}.",
                    param=request.alone,
                    code=f"{request.alone}_not_supported_in_session",
                )
            plan.why_stateless = request.alone
            return plan
        if not named and not self._settings.sessions.implicit:
            plan.why_stateless = "no_session_id"
            return plan

        links, digests = meaning.chain_and_head(request.messages, request.tools, request.template_kwargs)
        plan.links, plan.head = tuple(links), (head := Head(*digests))
        if named:
            await self._claim_named(plan, named, head)
        else:
            await self._claim_by_content(plan)
        if plan.lease is None:
            return plan
        try:
            await self._prepare(plan, plan.lease, head, cap)
        except BaseException:
            await self._store.release(plan.lease, dispatched=False)
            raise
        return plan

    def _context_length(self, model: str) -> int:
        models = self._registry.models()
        if model not in models:
            known = ", ".join(sorted(models)) or "none yet: no worker is up"
            raise ApiError(
                404 if models else 503,
                "model_not_found" if models else "no_worker_available",
                f"The model {model[:128]!r} is not served here. Served: {known}.",
                param="model",
                headers={} if models else {"retry-after": "2"},
            )
        return models[model]

    async def _claim_named(self, plan: Plan, named: Named, head: Head) -> None:
        plan.session_id, plan.source = named.id, named.source
        key = await self._key(plan, named)
        try:
            lease = await self._claim(plan, key, 0)
        except ApiError as error:
            if error.code != SESSION_BUSY:
                raise
            session, _ = await self._store.peek(key)
            if session and self._is_side(session, plan, head):
                plan.why_stateless = "side"
                return
            lease = await self._claim(plan, key, self._settings.sessions.busy_wait)
        plan.match = lease.session.ledger.match(plan.links, plan.request.messages)
        plan.kind = _kind(lease.session.ledger, plan.match)
        if plan.kind is Kind.REPLACED and not (lease.session.head and lease.session.head.shares_with(head)):
            await self._store.release(lease, dispatched=False)
            plan.kind, plan.why_stateless = Kind.STATELESS, "side"
            return
        plan.lease = lease

    async def _key(self, plan: Plan, named: Named) -> str:
        first, *older = self._keys.sessions(plan.tenant.name, named.id, plan.request.model)
        for key in older:
            # A session from before the secret was changed lives on under its old key.
            if (await self._store.peek(first))[0] is None and (await self._store.peek(key))[0] is not None:
                return key
        return first

    def _is_side(self, session: Session, plan: Plan, head: Head) -> bool:
        if session.ledger.head is None:
            # Nothing is committed yet: the running first turn is only known by its agent.
            return session.head is not None and not session.head.shares_with(head)
        return session.ledger.match(plan.links, plan.request.messages) is NO_MATCH

    async def _claim_by_content(self, plan: Plan) -> None:
        found = await self._find(plan)
        donor = found[0] if found else None
        if found and found[1]:
            lease = await self._try(found[0], plan.tenant)
            if lease:
                donor = session = lease.session
                plan.match = session.ledger.match(plan.links, plan.request.messages)
                plan.kind = _kind(session.ledger, plan.match)
                # Only the newest state of a session goes on by content: an older point may be another agent's.
                if plan.kind is Kind.APPEND or (plan.kind is Kind.REPLACED and self._issued(plan, session)):
                    plan.lease, plan.session_id, plan.source = lease, session.id, "content"
                    return
                await self._store.release(lease, dispatched=False)
        plan.session_id, plan.source = issue_id(), "issued"
        key = self._keys.session(plan.tenant.name, plan.session_id, plan.request.model)
        plan.lease = await self._claim(plan, key, 0)
        plan.kind, plan.match = Kind.NEW, NO_MATCH
        if donor:
            # The same conversation lives on in a second session, with the exact tokens of the first.
            plan.match = donor.ledger.match(plan.links, plan.request.messages)
            ledger = Ledger({turn.link: turn for turn in plan.match.turns}, plan.match.link)
            plan.lease.session.ledger = ledger

    async def _try(self, session: Session, tenant: Tenant) -> Lease | None:
        try:
            return await self._store.claim(session, 0, self._max_sessions(tenant))
        except (SessionBusy, TooManySessions):
            return None

    async def _find(self, plan: Plan) -> tuple[Session, bool] | None:
        """The session that the request's history belongs to: by the tool-call ids that we issued, else by the
        longest known history. False beside it: several sessions are equal up to here. Each belongs to somebody,
        so none may be taken, but any of them can lend its tokens."""
        messages = plan.request.messages
        scope = Session("", plan.tenant.name, plan.request.model, "", 0, 0).scope
        calls: list[Mark] = []
        for message in reversed(messages):
            calls += [CALL_MARK + i.encode() for i in unique_calls(message)]
            if calls:
                break
        links: list[Mark] = [
            plan.links[i] for i in range(len(messages) - 1, 0, -1) if messages[i - 1]["role"] == "assistant"
        ]
        for marks in (calls, links):
            hit = await self._store.find(scope, marks)
            if not hit:
                continue
            mark, keys = hit
            sessions = [s for s in [(await self._store.peek(key))[0] for key in keys] if s]
            if marks is links:
                heads = [s for s in sessions if s.ledger.head == mark]
                sessions = heads or sessions
            if len(sessions) == 1:
                return sessions[0], True
            if marks is links and sessions:
                return sessions[0], False
        return None

    def _issued(self, plan: Plan, session: Session) -> bool:
        head = session.ledger.turns.get(session.ledger.head) if session.ledger.head else None
        if head is None or not head.call_ids:
            return False
        return any(set(unique_calls(m)) & set(head.call_ids) for m in plan.request.messages)

    async def _claim(self, plan: Plan, key: str, wait: float) -> Lease:
        now = self._clock()
        fresh = Session(key, plan.tenant.name, plan.request.model, plan.session_id, now, now, head=plan.head)
        try:
            return await self._store.claim(fresh, wait, self._max_sessions(plan.tenant))
        except SessionBusy:
            raise ApiError(
                409,
                SESSION_BUSY,
                f"Another turn of session {plan.session_id!r} is still running; wait for it, or use another id.",
                headers={"x-should-retry": "false", "retry-after": "1"},
            ) from None
        except TooManySessions:
            raise ApiError(
                429,
                "too_many_sessions",
                "All sessions that this key may hold are busy; end some with X-AgentKV-Session-Final: true.",
                headers={"retry-after": "5"},
            ) from None

    def _max_sessions(self, tenant: Tenant) -> int:
        return tenant.limits.max_sessions or self._settings.sessions.max_per_tenant

    async def _prepare(self, plan: Plan, lease: Lease, head: Head, cap: int | None) -> None:
        session, controls = lease.session, plan.controls
        session.head = head
        for name in ("budget", "policy", "token_limit", "retain"):
            value = getattr(controls, name)
            if value is not None:
                setattr(session, name, value)
        plan.budget = (
            session.budget
            if session.budget is not None
            else default_budget(self._settings.budget, cap, plan.context_length)
        )
        plan.policy = session.policy or self._settings.policy
        if (session.retain or self._settings.sessions.retain) == "template" and _ends_a_chain(plan):
            plan.match, plan.kind = NO_MATCH, Kind.BRANCH
        plan.prompt = await self._render(plan)
        self._check_length(plan)
        _reserve(plan, session)

    async def _render(self, plan: Plan) -> Prompt:
        request, turns = plan.request, plan.match.turns
        fresh = request.messages[plan.match.covered :]
        size = sum(len(m.get("content") or "") for m in fresh)

        choice = request.sampling.get("tool_choice")
        constrained = choice == "required" or isinstance(choice, dict)

        def render() -> Prompt:
            messages, tools, kwargs = request.messages, request.tools, request.template_kwargs
            if not turns:
                return self._renderer.whole(messages, tools, kwargs, constrained=constrained)
            return self._renderer.appended(
                messages, plan.match.covered, tools, kwargs, last=turns[-1], constrained=constrained
            )

        try:
            return await asyncio.to_thread(render) if size > _RENDER_IN_THREAD or not turns else render()
        except PromptError as error:
            raise bad_request(str(error), param="messages", code="prompt_not_renderable") from error

    def _check_length(self, plan: Plan) -> None:
        limit, tokens = plan.context_length, plan.prompt_tokens
        wanted = plan.request.max_tokens or 1
        if limit and tokens + wanted > limit:
            raise bad_request(
                f"This model's context length is {limit} tokens; the prompt has {tokens} and the request asks for "
                f"{wanted} more.",
                param="messages",
                code="context_length_exceeded",
            )


def _kind(ledger: Ledger, match: Match) -> Kind:
    if ledger.head is None:
        return Kind.NEW
    if match is NO_MATCH or not match.turns:
        return Kind.REPLACED
    return Kind.APPEND if match.link == ledger.head else Kind.BRANCH


def _ends_a_chain(plan: Plan) -> bool:
    """A new user message after turns that thought: templates then print the earlier turns without their thinking."""
    fresh = plan.request.messages[plan.match.covered :]
    thought = any(label == Label.THINK for turn in plan.match.turns for label in turn.runs[2::3])
    return thought and any(message["role"] == "user" for message in fresh)


def _reserve(plan: Plan, session: Session) -> None:
    """Refuse a turn that would spend more than the session's token limit, and bound what it may generate."""
    limit = session.token_limit
    if limit is None:
        return
    left = limit - session.spent - plan.prompt_tokens
    if left < 1:
        raise ApiError(
            402,
            "session_budget_exhausted",
            f"Session {session.id!r} has used {session.spent} of its {limit} tokens and this prompt has "
            f"{plan.prompt_tokens}; raise X-AgentKV-Session-Token-Limit to go on.",
            headers={"x-should-retry": "false"},
        )
    if plan.request.max_tokens is None or plan.request.max_tokens > left:
        plan.request.sampling.pop("max_completion_tokens", None)
        plan.request.sampling["max_tokens"] = left
