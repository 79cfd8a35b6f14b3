"""Count every HTTP request when it has ended, and record its trace. The outermost layer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servekit.api.disconnect import disconnect_of
from servekit.api.endpoint import counters_of
from servekit.api.explanations import Explanations
from servekit.api.responses.http import CLIENT_CLOSED_REQUEST
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.interface import Models
from servekit.engine.request_state import RequestState
from servekit.observability.request_trace import AnswerTrace, RequestTrace
from servekit.requests.time_causes import RequestTimes

# Other methods, and paths without a route, each share one label value. Otherwise clients could create any number of
# time series.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"


class RequestMetrics:
    """Count requests by route, method and status, and record a trace of those that were for the model.

    `record` receives the trace; None records nothing.
    """

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        routes: Sequence[BaseRoute],
        explanations: Explanations,
        record: Callable[[RequestTrace], None] | None = None,
    ) -> None:
        self._app = app
        self._models = models
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._templates = {route.path for route in self._routes if "{" not in route.path}
        self._explanations = explanations
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})
        status = 0

        def send_noting_status(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        started_s = self._models.now()
        scope["state"]["times"] = RequestTimes(self._models.now, started_s)
        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            if not status:  # there was no answer
                status = CLIENT_CLOSED_REQUEST if disconnect_of(scope).has_happened else 500
            self._note(scope, status, started_s)

    def _note(self, scope: Scope, status: int, started_s: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else OTHER
        route = self._template(scope["path"])
        counters_of(scope, self._models).request_ended(route, method, status)
        state: RequestState | None = scope["state"].get("request_state")
        if state is not None:
            self._explanations.end(state, self._models.now())
        # Health probes, scrapes and requests without a route make no trace.
        if self._record is not None and (state is not None or (method == "POST" and route != OTHER)):
            self._record(self._trace(scope, method, route, status, started_s, state))

    def _template(self, path: str) -> str:
        """Return the route that a path matches, also for requests that were refused before they reached the router."""
        if path in self._templates:
            return path
        return next((route.path for route in self._routes if route.path_regex.match(path)), OTHER)

    def _trace(
        self, scope: Scope, method: str, route: str, status: int, started_s: float, state: RequestState | None
    ) -> RequestTrace:
        caller: Caller = scope["state"].get("caller", ANONYMOUS)
        return RequestTrace(
            method=method,
            route=route,
            status=status,
            headers=Headers(scope=scope),
            request_id=caller.request_id,
            started_s=started_s,
            ended_s=self._models.now(),
            request=state.request if state else None,
            num_prompt_tokens=state.num_prompt_tokens if state else 0,
            num_cached_tokens=state.num_cached_tokens if state else 0,
            num_drafted_tokens=state.num_drafted_tokens if state else 0,
            num_accepted_tokens=state.num_accepted_tokens if state else 0,
            answers=_answers(state) if state else (),
        )


def _answers(state: RequestState) -> list[AnswerTrace]:
    return [
        AnswerTrace(
            arrival_s=output.sequence.arrival_s,
            first_scheduled_s=output.sequence.first_scheduled_s,
            first_token_s=output.first_token_s,
            last_token_s=output.last_token_s,
            num_tokens=output.num_tokens,
            num_preemptions=output.sequence.num_preemptions,
            finish_reason=output.sequence.finish_reason,
        )
        for output in state.outputs
    ]
