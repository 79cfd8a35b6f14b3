"""Count every HTTP request when it has ended, and tell its trace if traces are wanted: the outermost layer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servekit.api.http import CLIENT_CLOSED_REQUEST
from servekit.caller import ANYBODY, Caller
from servekit.departure import departure_of
from servekit.engine import LLMEngine
from servekit.request_trace import AnswerTrace, RequestTrace
from servekit.submission import Submission

# What others say is one method and one path to the metrics, or anybody could fill their memory.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"


class Measure:
    """Plain ASGI, with nothing in the way of the messages."""

    def __init__(
        self,
        app: ASGIApp,
        engine: LLMEngine,
        routes: Sequence[BaseRoute],
        record: Callable[[RequestTrace], None] | None = None,
    ) -> None:
        self._app = app
        self._engine = engine
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._templates = {route.path for route in self._routes if "{" not in route.path}
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})
        status = 0

        def note_status(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        started_s = self._engine.now()
        try:
            await self._app(scope, receive, note_status)
        finally:
            if not status:  # it came to no answer at all
                status = CLIENT_CLOSED_REQUEST if departure_of(scope).has_happened else 500
            self._note(scope, status, started_s)

    def _note(self, scope: Scope, status: int, started_s: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else OTHER
        route = self._template(scope["path"])
        self._engine.metrics.http_request(route, method, status)
        submission: Submission | None = scope["state"].get("submission")
        # Who asks how the server is, or for what is not here, makes no trace.
        if self._record is not None and (submission is not None or (method == "POST" and route != OTHER)):
            self._record(self._trace(scope, method, route, status, started_s, submission))

    def _template(self, path: str) -> str:
        """The route that a path is meant for, whether or not the request came as far as the router."""
        if path in self._templates:
            return path
        return next((route.path for route in self._routes if route.path_regex.match(path)), OTHER)

    def _trace(
        self, scope: Scope, method: str, route: str, status: int, started_s: float, submission: Submission | None
    ) -> RequestTrace:
        caller: Caller = scope["state"].get("caller", ANYBODY)
        return RequestTrace(
            method=method,
            route=route,
            status=status,
            headers=Headers(scope=scope),
            request_id=caller.request_id,
            started_s=started_s,
            ended_s=self._engine.now(),
            request=submission.request if submission else None,
            num_prompt_tokens=submission.num_prompt_tokens if submission else 0,
            num_cached_tokens=submission.num_cached_tokens if submission else 0,
            answers=_answers(submission) if submission else (),
        )


def _answers(submission: Submission) -> list[AnswerTrace]:
    return [
        AnswerTrace(
            arrival_s=generation.sequence.arrival_s,
            first_scheduled_s=generation.sequence.first_scheduled_s,
            first_token_s=generation.first_token_s,
            last_token_s=generation.last_token_s,
            num_tokens=generation.sequence.num_output_tokens,
            num_preemptions=generation.sequence.num_preemptions,
            finish_reason=generation.sequence.finish_reason,
        )
        for generation in submission.generations
    ]
