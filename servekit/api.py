"""The HTTP routes: one function per endpoint, between bytes and the engine.

A request is admitted, or refused with its proper status, before its answer begins; once a stream has started, an error
can only be an event in it. When a client goes away its sequences are aborted, whether they were streaming or not.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from servekit import __version__
from servekit.client_queue import TokenDelta
from servekit.engine import LLMEngine, Submission
from servekit.errors import InternalError, InvalidRequest, RequestTooLarge, ServekitError
from servekit.schemas import (
    BasicGenerateResponse,
    BatchGenerateResponse,
    GenerateRequest,
    GenerateResponse,
    StreamEvent,
    Token,
    Usage,
    decode_generate_request,
    encode,
)
from servekit.sequence import FinishReason

Result = TypeVar("Result")

# What nginx logs for a client that left before its answer; nobody is there to read it.
CLIENT_CLOSED_REQUEST = 499


def create_app(engine: LLMEngine) -> Starlette:
    """The whole HTTP face of one engine."""
    app = Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/generate_stream", generate_stream, methods=["POST"]),
            Route("/basic_generate", basic_generate, methods=["POST"]),
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", version),
            Route("/info", info),
            Route("/metrics", metrics),
            Route("/", index),
        ],
        exception_handlers={
            ServekitError: _on_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_client_gone,
            Exception: _on_bug,
        },
    )
    app.state.engine = engine
    return app


# -- generation -------------------------------------------------------------------------------------------------------


async def generate(request: Request) -> Response:
    """POST /generate: one prompt or a list of them, answered when all of it is there."""
    body, submission = await _submit(request)
    answers = await _unless_disconnected(request, submission, _collect(submission))
    if answers is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    usage = _usage(submission, sum(answer.num_tokens for answer in answers))
    if body.prompts is msgspec.UNSET and body.n == 1:
        (answer,) = answers
        return _json(GenerateResponse(_new_id(), answer.text, answer.ended_by, answer.stop_reason, usage))
    texts = [answer.text for answer in answers]
    return _json(BatchGenerateResponse(_new_id(), texts, [answer.ended_by for answer in answers], usage))


async def basic_generate(request: Request) -> Response:
    """POST /basic_generate: one prompt in, one text out, and nothing else."""
    _, submission = await _submit(request, single=True, tells_how_it_ended=False)
    answers = await _unless_disconnected(request, submission, _collect(submission))
    if answers is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return _json(BasicGenerateResponse(answers[0].text))


async def generate_stream(request: Request) -> Response:
    """POST /generate_stream: one server-sent event per token; the last one has the whole text."""
    engine = _engine(request)
    _, submission = await _submit(request, single=True)
    return EventSourceResponse(
        _events(submission),
        sep="\n",  # naive clients split on a bare blank line
        ping=engine.config.sse_keep_alive_interval,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
    )


async def _submit(
    request: Request, single: bool = False, tells_how_it_ended: bool = True
) -> tuple[GenerateRequest, Submission]:
    """Read, check and admit. Raises what the client is to be told."""
    engine = _engine(request)
    body = decode_generate_request(await _read_body(request, engine.config.max_body_bytes))
    if single and body.prompt is msgspec.UNSET:
        raise InvalidRequest("this route takes one 'prompt'; POST /generate takes 'prompts'", param="prompts")
    if single and body.n != 1:
        raise InvalidRequest(f"n = {body.n}: this route gives one answer; POST /generate gives several", param="n")
    if not tells_how_it_ended and (body.ttft_ms or body.deadline_ms):
        raise InvalidRequest(
            "this route's answer cannot say that a deadline passed; POST /generate can",
            param="ttft_ms" if body.ttft_ms else "deadline_ms",
        )
    return body, await engine.submit(body)


class _Answer:
    """What one prompt has got so far."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: TokenDelta) -> None:
        self.pieces.append(delta.text)
        self.num_tokens += delta.token_id is not None
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ended_by(self) -> FinishReason:
        assert self.finish_reason is not None, "the answer is not finished"
        return self.finish_reason


async def _collect(submission: Submission) -> list[_Answer]:
    """Every answer, in the order of the prompts."""
    answers = [_Answer() for _ in range(submission.num_answers)]
    num_unfinished = len(answers)
    while num_unfinished:
        for delta in await submission.queue.get():
            answers[delta.index].add(delta)
            num_unfinished -= delta.finish_reason is not None
    return answers


async def _events(submission: Submission) -> AsyncIterator[bytes]:
    """The stream's events as bytes; several at once where the client was slower than the model."""
    answer = _Answer()
    try:
        while answer.finish_reason is None:
            events = []
            for delta in await submission.queue.get():
                answer.add(delta)
                events.append(_event(_stream_event(delta, answer, submission)))
            yield b"".join(events)
    except ServekitError as error:
        yield _event(_error_body(error))
    finally:
        submission.abort()


def _stream_event(delta: TokenDelta, answer: _Answer, submission: Submission) -> StreamEvent:
    token = None if delta.token_id is None else Token(delta.token_id, delta.text, delta.special)
    event = StreamEvent(answer.num_tokens, token)
    if delta.finish_reason is not None:
        event.generated_text = answer.text
        event.id = _new_id()
        event.finish_reason = delta.finish_reason
        event.stop_reason = delta.stop_reason
        event.usage = _usage(submission, answer.num_tokens)
    return event


def _event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _usage(submission: Submission, completion_tokens: int) -> Usage:
    prompt_tokens = submission.num_prompt_tokens
    total_tokens = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total_tokens, submission.num_cached_tokens)


def _new_id() -> str:
    return "gen-" + secrets.token_hex(12)


async def _unless_disconnected(
    request: Request, submission: Submission, work: Coroutine[Any, Any, Result]
) -> Result | None:
    """The work's result, or None if the client went away first. Either way nothing of the request stays behind.

    Starlette cancels streams on disconnect, but not handlers that are still computing their answer.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()
        submission.abort()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises RequestTooLarge as soon as it is over the limit, declared or not."""
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    if declared.isdecimal() and int(declared) <= limit:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                break
        else:
            return bytes(body)
    raise RequestTooLarge(f"the body is over {limit} bytes (max_body_bytes); send fewer or shorter prompts")


# -- about the server -------------------------------------------------------------------------------------------------


async def health(request: Request) -> Response:
    """GET /health: alive, or 503 once the engine has failed. Loading counts as alive."""
    return Response(status_code=200 if _engine(request).failure is None else 503)


async def ready(request: Request) -> Response:
    """GET /ready: 200 when requests are served, 503 with the reason otherwise."""
    engine = _engine(request)
    status = "ready" if engine.is_ready else "failed" if engine.failure else "loading"
    return _json({"status": status}, 200 if engine.is_ready else 503)


async def version(_: Request) -> Response:
    """GET /version."""
    return _json({"version": __version__})


async def info(request: Request) -> Response:
    """GET /info: the model, the worker and every setting."""
    engine = _engine(request)
    manager = engine.manager
    return _json(
        {
            "name": "servekit",
            "version": __version__,
            "model_name": engine.config.model_name,
            "max_total_tokens": manager.max_total_tokens,
            "worker": engine.worker,
            "settings": engine.config,
        }
    )


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus' text format."""
    return Response(_engine(request).metrics.render(), media_type="text/plain; version=0.0.4")


async def index(_: Request) -> Response:
    """GET /: who answers here."""
    return _json({"name": "servekit", "version": __version__})


# -- errors -----------------------------------------------------------------------------------------------------------


def _error_body(error: ServekitError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.answer_code}}


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServekitError)
    _engine(request).metrics.refused(error.answer_code)
    response = _json(_error_body(error), error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, no such method."""
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    response = _json(body, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_client_gone(_: Request, error: Exception) -> Response:
    """The client left before its request was whole."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(_: Request, error: Exception) -> Response:
    return _json(_error_body(InternalError(f"an internal error: {type(error).__name__}")), 500)


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


def _engine(request: Request) -> LLMEngine:
    engine: LLMEngine = request.app.state.engine
    return engine
