"""Bound the memory that all request bodies hold together, and with them the answers of predictions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.api.endpoint import caller_of
from servekit.engine.caller import ANONYMOUS
from servekit.engine.interface import ModelUse
from servekit.engine.request_state import RequestState
from servekit.errors import InvalidRequest, QueueFull, RequestTooLarge
from servekit.shared_budget import SharedBudget

# The first bytes of each body are not counted. When large bodies fill the budget, small requests still pass; what the
# uncounted bytes add up to is bounded by max_connections.
UNCOUNTED_BODY_BYTES = 2**14
BODY_RETRY_AFTER_S = 5


class BodyBudget:
    """Bound the bytes that all request bodies hold in memory. An ASGI layer: it releases a body when its request ends.

    Releasing it earlier would undercount. While sequences wait and run, handlers hold the body or objects made from it.
    The scheduler's own bounds count tokens, which do not cover whitespace, user names and truncated prompts. What a
    request's result may take is released here, too: until then, the answer is in memory. So is its model, which may be
    unloaded from then on.

    The answer of a prediction is counted like a body: the vectors of a thousand texts take more than the texts.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self.budget = SharedBudget(max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state.update(body_budget=self, num_body_bytes=0)
        try:
            await self._app(scope, receive, send)
        finally:
            self.budget.release(state.get("caller", ANONYMOUS).tenant, state["num_body_bytes"])
            request_state: RequestState | None = state.get("request_state")
            if request_state is not None:
                request_state.release_result()
            model_use: ModelUse | None = state.get("model_use")
            if model_use is not None:
                model_use.release()

    def reserve(self, request: Request, length: int) -> None:
        """Count the request's body, which now has `length` bytes. Raises as `check` does, and then counts no more."""
        more = self.check(request, length)
        if more > 0:
            self.budget.take(caller_of(request).tenant, more)
            request.state.num_body_bytes += more

    def hold_answer(self, request: Request, num_bytes: int) -> None:
        """Count what the request's answer takes, until the request ends. That of a small answer is not counted.

        Raises InvalidRequest for more than the tenant may ever hold, and QueueFull for more than it may hold now.
        """
        budget, tenant, more = self.budget, caller_of(request).tenant, num_bytes - UNCOUNTED_BODY_BYTES
        if more <= 0:
            return
        if request.state.num_body_bytes + more > budget.max_share(tenant):
            raise InvalidRequest(
                f"the answer to the request takes {num_bytes} bytes of memory; body and answer of one tenant's request "
                f"may take {budget.max_share(tenant)} (as max_total_body_bytes = {budget.limit} is shared); send fewer "
                "inputs in one request"
            )
        if not budget.has_room(tenant, more):
            raise QueueFull(
                f"the answer to the request takes {num_bytes} bytes of memory, and request bodies and answers hold "
                f"{budget.total}{budget.describe_share(tenant)}; the limit is {budget.limit} (max_total_body_bytes). "
                f"Try again in {BODY_RETRY_AFTER_S} s.",
                retry_after_s=BODY_RETRY_AFTER_S,
            )
        budget.take(tenant, more)
        request.state.num_body_bytes += more

    def check(self, request: Request, length: int) -> int:
        """Return how many bytes `reserve` would count.

        Raises RequestTooLarge for more than the tenant may ever hold, and QueueFull for more than it may hold now.
        """
        budget, tenant = self.budget, caller_of(request).tenant
        most = UNCOUNTED_BODY_BYTES + budget.max_share(tenant)
        if length > most:
            raise RequestTooLarge(
                f"the request body has {length} bytes or more; the bodies of one tenant may have {most} bytes (as "
                f"max_total_body_bytes = {budget.limit} is shared); send fewer or shorter prompts"
            )
        more: int = length - UNCOUNTED_BODY_BYTES - request.state.num_body_bytes
        if more > 0 and not budget.has_room(tenant, more):
            raise QueueFull(
                f"request bodies hold {budget.total} bytes of memory{budget.describe_share(tenant)}; the limit is "
                f"{budget.limit} (max_total_body_bytes). Try again in {BODY_RETRY_AFTER_S} s.",
                retry_after_s=BODY_RETRY_AFTER_S,
            )
        return more
