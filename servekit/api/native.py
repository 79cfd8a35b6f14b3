"""The native door: /generate, /generate_stream and /basic_generate. Asked with `inputs`, they answer as TGI does."""

from __future__ import annotations

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from servekit.api import tgi
from servekit.api.answers import Answer, new_id
from servekit.api.event_stream import EventStream, event
from servekit.api.http import (
    Endpoint,
    answers_to,
    engine_of,
    length,
    read_body,
    respond,
    respond_at_length,
    submit,
)
from servekit.client_queue import TokenDelta
from servekit.errors import InvalidRequest
from servekit.messages import TokenLogprobs
from servekit.schemas.decoding import decode, decode_query, is_for_tgi
from servekit.schemas.fields import Usage
from servekit.schemas.native import (
    BasicGenerateResponse,
    BatchGenerateResponse,
    GenerateRequest,
    GenerateResponse,
    RequestMetrics,
    StreamEvent,
    Token,
    TopToken,
)
from servekit.schemas.tgi import TgiRequest, TgiResponse, TgiStreamEvent
from servekit.submission import Submission
from servekit.tokenizer import Tokenizer


async def generate(request: Request) -> Response:
    """One prompt or a list of them, answered when all of it is there; with `stream`, as events."""
    body = await read_body(request)
    if is_for_tgi(body):
        return await tgi.answer(request, body)
    asked = decode(body, GenerateRequest)
    return await _stream(request, asked) if asked.stream else await _answer(request, asked)


async def generate_stream(request: Request) -> Response:
    """One prompt, answered with a server-sent event for each token; the last one has the whole text."""
    body = await read_body(request)
    if is_for_tgi(body):
        return await tgi.answer(request, body, streams=True)
    return await _stream(request, decode(body, GenerateRequest))


async def generate_stream_for_browsers(request: Request) -> Response:
    """The same for a browser's EventSource, which can only GET: fields in the query string, lists by repetition.

    An EventSource that was served to the end comes back with the last event's id; 204 tells it to stop.
    """
    if "last-event-id" in request.headers:
        return Response(status_code=204)
    query = {name: request.query_params.getlist(name) for name in request.query_params}
    return await _stream(request, decode_query(query, GenerateRequest), has_ids=True)


async def basic_generate(request: Request) -> Response:
    """One prompt in, one text out, and nothing else."""
    asked = _one_text(decode(await read_body(request), GenerateRequest))
    for param in ("ttft_ms", "deadline_ms", "logprobs", "prompt_logprobs"):
        if getattr(asked, param) is not None:
            raise InvalidRequest(f"this route's answer has no room for {param}; POST /generate has", param=param)
    submission = await submit(request, asked.read())
    ((answer,),) = await answers_to(request, submission)
    return respond(BasicGenerateResponse(answer.text))


def _one_text(asked: GenerateRequest) -> GenerateRequest:
    if asked.prompts is not None:
        raise InvalidRequest("this route takes one 'prompt'; POST /generate takes 'prompts'", param="prompts")
    if not asked.gives_one_text:
        raise InvalidRequest(f"n = {asked.n}: this route gives one answer; POST /generate gives several", param="n")
    return asked


async def _answer(request: Request, asked: GenerateRequest) -> Response:
    engine = engine_of(request)
    submission = await submit(request, asked.read())
    prompts = await answers_to(request, submission, keeps_tokens=submission.request.logprobs is not None)
    tell = Teller(submission, engine.tokenizer)
    return await respond_at_length(lambda: tell.response(prompts, asked.gives_one_text), length(submission, prompts))


async def _stream(request: Request, asked: GenerateRequest, has_ids: bool = False) -> Response:
    engine = engine_of(request)
    wanted = _one_text(asked).read()
    if wanted.best_of > 1:
        raise InvalidRequest(
            f"best_of = {wanted.best_of}: which of them is best is known only at the end; POST /generate can wait",
            param="best_of",
        )
    submission = await submit(request, wanted)
    answer, tell = Answer(0), Teller(submission, engine.tokenizer)

    def write(deltas: list[TokenDelta]) -> bytes:
        is_first = not answer.num_tokens
        answer.add(deltas)
        head = b"id: %d\n" % answer.num_tokens if has_ids else b""
        return head + event(tell.stream_event(answer, deltas, is_first))

    return EventStream(request, submission, write)


class Teller:
    """Words for one request's tokens."""

    def __init__(self, submission: Submission, tokenizer: Tokenizer) -> None:
        self._submission = submission
        self._tokenizer = tokenizer

    def usage(self, completion_tokens: int) -> Usage:
        prompt_tokens = self._submission.num_prompt_tokens
        total_tokens = prompt_tokens + completion_tokens
        return Usage(prompt_tokens, completion_tokens, total_tokens, self._submission.num_cached_tokens)

    def metrics(self, index: int) -> RequestMetrics | UnsetType:
        """Of the sequence at `index`, if it came to a token."""
        generation = self._submission.generations[index]
        sequence, first_s, last_s = generation.sequence, generation.first_token_s, generation.last_token_s
        if sequence.first_scheduled_s is None or first_s is None or last_s is None:
            return UNSET
        times_s = (sequence.first_scheduled_s, first_s, last_s)
        return RequestMetrics(*(round(1e3 * (at_s - sequence.arrival_s), 3) for at_s in times_s))

    def response(self, prompts: list[list[Answer]], gives_one_text: bool) -> GenerateResponse | BatchGenerateResponse:
        """All of it at once."""
        request, new = self._submission.request, new_id("gen")
        usage = self.usage(sum(answer.num_tokens for answers in prompts for answer in answers))
        answers = [answer for answers in prompts for answer in answers[: request.n]]
        tokens = [self.tokens(answer) for answer in answers] if request.logprobs is not None else UNSET
        told = request.prompt_logprobs is not None
        prompt_tokens = [self.prompt_tokens(index) for index in range(len(prompts))] if told else UNSET
        if not gives_one_text:
            return BatchGenerateResponse(
                new,
                [answer.text for answer in answers],
                [answer.finish_reason for answer in answers],
                [answer.stop_reason for answer in answers],
                usage,
                tokens,
                prompt_tokens,
            )
        (answer,) = answers
        return GenerateResponse(
            new,
            answer.text,
            answer.finish_reason,
            answer.stop_reason,
            usage,
            self.metrics(answer.index),
            UNSET if tokens is UNSET else tokens[0],
            UNSET if prompt_tokens is UNSET else prompt_tokens[0],
        )

    def tokens(self, answer: Answer) -> list[Token]:
        return [self.token(delta) for delta in answer.tokens]

    def token(self, delta: TokenDelta, text: str | None = None) -> Token:
        """A token of the answer; its own text, or the one it made certain."""
        assert delta.token_id is not None
        own = self._tokenizer.decode([delta.token_id]) if text is None else text
        return self._token(delta.token_id, own, delta.logprobs)

    def prompt_tokens(self, index: int) -> list[Token]:
        """The tokens of the prompt at `index`; before the first nothing stands that could foretell it."""
        logprobs: list[TokenLogprobs | None] = [None, *self._submission.prompt_logprobs(index)]
        token_ids = self._submission.prompt_token_ids(index)
        if len(logprobs) < len(token_ids):
            return []  # nobody asked, or a deadline came before the prompt was computed
        return [
            self._token(token_id, self._tokenizer.decode([token_id]), known)
            for token_id, known in zip(token_ids, logprobs, strict=True)
        ]

    def _token(self, token_id: int, text: str, logprobs: TokenLogprobs | None) -> Token:
        decode, special = self._tokenizer.decode, self._tokenizer.is_special(token_id)
        if logprobs is None or not self._tells_logprobs:
            return Token(token_id, text, special)
        top: list[TopToken] | UnsetType = UNSET
        if logprobs.top:
            top = [TopToken(likely, decode([likely]), logprob) for likely, logprob in logprobs.top]
        return Token(token_id, text, special, logprobs.logprob, top)

    @property
    def _tells_logprobs(self) -> bool:
        request = self._submission.request
        return request.logprobs is not None or request.prompt_logprobs is not None

    def stream_event(self, answer: Answer, deltas: list[TokenDelta], is_first: bool) -> StreamEvent:
        """An event about the newest deltas of an answer; of several tokens it names the last."""
        text = "".join(delta.text for delta in deltas)
        last = next((delta for delta in reversed(deltas) if delta.token_id is not None), None)
        told = StreamEvent(answer.num_tokens, None if last is None else self.token(last, text))
        if is_first and self._submission.request.prompt_logprobs is not None:
            told.prompt_tokens = self.prompt_tokens(0)
        if answer.is_finished:
            told.generated_text = answer.text
            told.id = new_id("gen")
            told.finish_reason = answer.finish_reason
            told.stop_reason = answer.stop_reason
            told.usage = self.usage(answer.num_tokens)
            told.metrics = self.metrics(answer.index)
        return told


_ASKING = {"prompt": "What color is the sky?", "max_tokens": 20}
ENDPOINTS: list[Endpoint] = [
    Endpoint(
        *("POST", "/generate", generate),
        takes=(GenerateRequest, TgiRequest),
        gives=(GenerateResponse, BatchGenerateResponse, TgiResponse),
        streams=(StreamEvent, TgiStreamEvent),
        example=_ASKING,
    ),
    Endpoint(
        *("POST", "/generate_stream", generate_stream),
        takes=(GenerateRequest, TgiRequest),
        streams=(StreamEvent, TgiStreamEvent),
        example=_ASKING,
    ),
    Endpoint(
        *("GET", "/generate_stream", generate_stream_for_browsers),
        takes=(GenerateRequest,),
        not_in_query=("prompts", "n", "best_of", "stream"),
        streams=(StreamEvent,),
        example=_ASKING,
    ),
    Endpoint(
        *("POST", "/basic_generate", basic_generate),
        takes=(GenerateRequest,),
        gives=(BasicGenerateResponse,),
        example=_ASKING,
    ),
]
