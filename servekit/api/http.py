"""What every route shares: reading bodies, answering, refusing, and noticing that a client has gone.

A request is admitted, or refused with its proper status, before its answer begins; once a stream has started, an error
can only be an event in it. When a client goes away its sequences are aborted, whether they were streaming or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.api.answers import Answer, collect
from servekit.caller import ANYBODY, Caller
from servekit.departure import departure_of
from servekit.engine import LLMEngine
from servekit.errors import (
    QueueFull,
    RequestCrashesWorker,
    RequestTimeout,
    RequestTooLarge,
    ServekitError,
    UnsupportedEncoding,
)
from servekit.generation_request import GenerationRequest
from servekit.schemas.decoding import encode
from servekit.schemas.tgi import ERROR_TYPES, name_of
from servekit.submission import Submission

Result = TypeVar("Result")

MANY_TOKENS = 256  # with the likeliest beside each of them, some milliseconds

# Of each body so much is not counted: who fills the budget keeps nobody out who has only a little to say, and what that
# comes to is bounded by max_connections.
UNCOUNTED_BODY_BYTES = 2**14
BODY_RETRY_AFTER_S = 5

# What nginx logs for a client that left before its answer; nobody is there to read it.
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True)
class Endpoint:
    """One route, for the router and for /openapi.json alike. The handler's docstring is its description."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    takes: tuple[Any, ...] = ()  # bodies, or with GET the fields of the query string
    gives: tuple[Any, ...] = ()
    streams: tuple[Any, ...] = ()  # what stands in its server-sent events
    example: dict[str, Any] = field(default_factory=dict)
    not_in_query: tuple[str, ...] = ()  # fields that the route refuses


def engine_of(request: Request) -> LLMEngine:
    engine: LLMEngine = request.app.state.engine
    return engine


async def submit(request: Request, wanted: GenerationRequest, arrival_s: float | None = None) -> Submission:
    """Admit it in its caller's name. Raises RequestError, WorkerError, or ClientDisconnect if nobody waits now."""
    engine, caller = engine_of(request), caller_of(request)
    if engine.config.scheduling_policy == "priority" and wanted.priority < caller.min_priority:
        wanted = replace(wanted, priority=caller.min_priority)
    submission = await unless_disconnected(request, engine.submit(wanted, caller, arrival_s))
    request.state.submission = submission  # for its key's account, and its line in the log
    return submission


def caller_of(request: Request) -> Caller:
    caller: Caller = getattr(request.state, "caller", ANYBODY)
    return caller


def respond(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def respond_at_length(make: Callable[[], Any], num_tokens: int) -> Response:
    """The same for what may take its time to put together: then the event loop is free for the others meanwhile."""
    if num_tokens < MANY_TOKENS:
        return respond(make())
    return await asyncio.to_thread(lambda: respond(make()))


def length(submission: Submission, prompts: list[list[Answer]]) -> int:
    """Tokens of which something is told: those of the answers, and of the prompts if they are explained."""
    num_explained = 0 if submission.request.prompt_logprobs is None else submission.num_prompt_tokens
    return num_explained + sum(answer.num_tokens for answers in prompts for answer in answers)


# -- bodies ------------------------------------------------------------------------------------------------------------


class BodyBudget:
    """How much of all bodies is in memory, and the layer that gives it back when a request ends, however it does.

    Not before: while its sequences wait and run, handlers have the body, or what was made of it, and the scheduler's
    own bounds count tokens, which say nothing of spaces, names of users, and texts that are cut.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {}).update(body_budget=self, num_body_bytes=0)
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_bytes -= scope["state"]["num_body_bytes"]

    def hold(self, request: Request, length: int) -> None:
        """The request's body has come to this length. Raises QueueFull, and then has no more of it than before."""
        more = length - UNCOUNTED_BODY_BYTES - request.state.num_body_bytes
        if more <= 0:
            return
        if self.num_bytes + more > self._max_bytes:
            raise QueueFull(
                f"bodies with {self.num_bytes} bytes are being worked on; more than {self._max_bytes} are not held "
                "(max_total_body_bytes). Please try again later.",
                retry_after_s=BODY_RETRY_AFTER_S,
            )
        self.num_bytes += more
        request.state.num_body_bytes += more


async def read_body(request: Request) -> bytes:
    """The whole body. Raises RequestTooLarge as soon as it is over the limit, declared or not, QueueFull if there is no
    room for it, UnsupportedEncoding for a compressed one, and RequestTimeout for one that takes too long."""
    config = engine_of(request).config
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedEncoding(
            f"the body has content-encoding {encoding[:40]!r}; send it uncompressed", param="content-encoding"
        )
    try:
        async with asyncio.timeout(config.body_timeout):
            return await _read_up_to(config.max_body_bytes, request)
    except TimeoutError:
        message = f"the body did not come within {config.body_timeout:g} s (body_timeout); send it at once"
        raise RequestTimeout(message) from None


async def _read_up_to(limit: int, request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    budget: BodyBudget = request.state.body_budget
    body = bytearray()
    if declared.isdecimal() and int(declared) <= limit:
        async for chunk in request.stream():
            budget.hold(request, len(body) + len(chunk))
            body += chunk
            if len(body) > limit:
                break
        else:
            return bytes(body)
    raise RequestTooLarge(f"the body is over {limit} bytes (max_body_bytes); send fewer or shorter prompts")


# -- clients that leave ------------------------------------------------------------------------------------------------


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. Raises ClientDisconnect if the client goes away first; then the work is cancelled, and what it
    held is given back before we go on."""
    departure, working = departure_of(request.scope), asyncio.create_task(work)
    departure.watch(working.cancel)
    try:
        return await working
    except asyncio.CancelledError:
        if departure.has_happened:
            raise ClientDisconnect from None
        raise
    finally:
        departure.watch(None)


async def answers_to(request: Request, submission: Submission, keeps_tokens: bool = False) -> list[list[Answer]]:
    """Every answer, when all are there. However this ends, the work for them ends too. Raises ClientDisconnect."""
    departure = departure_of(request.scope)
    departure.watch(lambda: submission.queue.fail(ClientDisconnect()))
    try:
        return await collect(submission, keeps_tokens)
    finally:
        departure.watch(None)
        submission.abort()


# -- refusals ----------------------------------------------------------------------------------------------------------


def error_body(error: ServekitError, for_tgi: bool = False) -> dict[str, Any]:
    """OpenAI's error object, and beside it TGI's word for whoever asked in TGI's way."""
    param = name_of(error.param) if for_tgi else error.param
    told = {"message": error.message, "type": error.type, "param": param, "code": error.answer_code}
    return {"error": told} | ({"error_type": ERROR_TYPES.get(error.type, "generation")} if for_tgi else {})


def speaks_tgi(request: Request) -> None:
    """Errors of this request are to be understood by TGI's clients too."""
    request.state.for_tgi = True


def tell_error(request: Request, error: ServekitError) -> dict[str, Any]:
    """The error's object, in the words of the request's door; its code goes into the log, too."""
    note_code(request, error.answer_code)
    return error_body(error, getattr(request.state, "for_tgi", False))


def note_code(request: Request, code: str) -> None:
    """The request's line in the log is to have this error code."""
    request.state.error_code = code


def refuse(request: Request, error: ServekitError) -> Response:
    response = respond(tell_error(request, error), error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RequestTimeout):
        response.headers["Connection"] = "close"  # the rest of the body will not come, either
    if isinstance(error, RequestCrashesWorker):
        response.headers["X-Should-Retry"] = "false"  # or OpenAI's clients ask twice more
    return response
