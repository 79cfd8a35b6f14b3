"""Submit a generation request to the engine, and answer it: as one JSON body, or as a stream of events.

If the client disconnects, the request's sequences are aborted, whether it was streaming or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from servekit.api.disconnect import disconnect_of
from servekit.api.endpoint import caller_of, engine_of
from servekit.api.explanations import Explanations
from servekit.api.key_accounts import RequestAccount
from servekit.api.responses.collect import Answer, collect
from servekit.api.responses.http import respond_at_length
from servekit.api.responses.long_json import ItemList
from servekit.api.responses.sse import EventFormat, EventStream
from servekit.engine.request_state import RequestState
from servekit.requests.generation import GenerationRequest
from servekit.requests.time_causes import RequestTimes, TimeCause

Result = TypeVar("Result")

CHARACTERS_PER_TOKEN = 4  # an estimate, for English; at the end the exact number of a prompt's tokens is charged


class ResponseBuilder(EventFormat, Protocol):
    """Write one request's answer in the wire format of one API."""

    def make_answer(self, index: int) -> Answer:
        """Return what collects the answer of the sequence at this index."""

    def response(self, prompts: list[list[Answer]], items: ItemList) -> Any:
        """Return the body for all answers, given as `collect` returns them; `items` makes its long lists."""

    def headers(self, prompts: list[list[Answer]]) -> dict[str, str]:
        """Return additional headers of that answer."""


async def submit(
    request: Request,
    wanted: GenerationRequest,
    render: Callable[[], Coroutine[Any, Any, GenerationRequest]] | None = None,
) -> RequestState:
    """Admit the request with its caller's tenant and priority.

    `render` returns the request with the text of the prompt; without it, `wanted` has it. It is called when it has its
    places in the queue and is within the limits of its key. So a request that cannot be admitted is refused before
    anything is computed for it. Raises RequestError, WorkerError, or ClientDisconnect if the client leaves meanwhile.
    """
    engine, caller = engine_of(request), caller_of(request)
    if engine.config.scheduling_policy == "priority" and wanted.priority < caller.min_priority:
        wanted = replace(wanted, priority=caller.min_priority)
    account: RequestAccount | None = getattr(request.state, "account", None)
    if account is not None:
        await _reserve(account, wanted)
    places = await engine.take_places(wanted, caller)
    times: RequestTimes | None = getattr(request.state, "times", None)
    wanted = replace(wanted, times=times)
    wanted.mark(TimeCause.ADMISSION)
    try:
        if render is not None:
            rendered = await unless_disconnected(request, render())
            wanted = replace(rendered, priority=wanted.priority, times=times)
            wanted.mark(TimeCause.TEMPLATE)
            if account is not None:
                await _reserve(account, wanted)
        state = await unless_disconnected(request, engine.submit(wanted, caller, places))
    finally:
        places.release()
    request.state.request_state = state  # for the log and the metrics
    explanations: Explanations = request.app.state.explanations
    explanations.begin(state)
    if account is not None:
        account.charge(state)
    return state


async def _reserve(account: RequestAccount, wanted: GenerationRequest) -> None:
    """Count what the request asks for against the limits of its key. Raises InvalidRequest or RateLimited."""
    num_prompt_tokens = sum(
        len(prompt.content) // (CHARACTERS_PER_TOKEN if isinstance(prompt.content, str) else 1)
        for prompt in wanted.prompts
    )
    await account.reserve(wanted.num_sequences, wanted.max_tokens, num_prompt_tokens)


async def answer(request: Request, state: RequestState, builder: ResponseBuilder, stream: bool) -> Response:
    """Answer an admitted request. Its sequences end with the answer, however that ends. Raises ClientDisconnect."""
    if stream:
        return EventStream(request, state, builder)
    disconnect = disconnect_of(request.scope)
    disconnect.set_callback(lambda: state.queue.fail(ClientDisconnect()))
    try:
        prompts = await collect(state, builder.make_answer)
    finally:
        disconnect.set_callback(None)
        state.abort()
    response = await respond_at_length(
        lambda items: builder.response(prompts, items), _num_described_tokens(state, prompts)
    )
    response.headers.update(builder.headers(prompts))
    return response


def _num_described_tokens(state: RequestState, prompts: list[list[Answer]]) -> int:
    """Return how many tokens the answer describes; those of the prompts only if their logprobs are wanted."""
    num_prompt_tokens = 0 if state.request.prompt_logprobs is None else state.num_prompt_tokens
    return num_prompt_tokens + sum(answer.num_tokens for answers in prompts for answer in answers)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the work's result. Raises ClientDisconnect if the client disconnects first.

    Then the work is cancelled, and this waits until it has released what it held.
    """
    disconnect, working = disconnect_of(request.scope), asyncio.create_task(work)
    disconnect.set_callback(working.cancel)
    try:
        return await working
    except asyncio.CancelledError:
        if disconnect.has_happened:
            raise ClientDisconnect from None
        raise
    finally:
        disconnect.set_callback(None)
