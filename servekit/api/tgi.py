"""TGI's door: `inputs` and `parameters`, on POST / (where its clients knock), /generate and /generate_stream."""

from __future__ import annotations

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from servekit.api.answers import Answer
from servekit.api.event_stream import EventStream, event
from servekit.api.http import (
    Endpoint,
    answers_to,
    engine_of,
    length,
    read_body,
    respond_at_length,
    speaks_tgi,
    submit,
)
from servekit.client_queue import TokenDelta
from servekit.errors import InvalidRequest
from servekit.schemas.decoding import decode
from servekit.schemas.tgi import (
    TgiDetails,
    TgiPromptToken,
    TgiRequest,
    TgiResponse,
    TgiSequence,
    TgiStreamDetails,
    TgiStreamEvent,
    TgiToken,
    finish_reason,
)
from servekit.submission import Submission
from servekit.tokenizer import Tokenizer


async def root(request: Request) -> Response:
    """TGI's root, which its clients are given as their URL: with `stream` events, otherwise a list of one answer."""
    return await answer(request, await read_body(request), in_a_list=True)


async def answer(request: Request, body: bytes, streams: bool = False, in_a_list: bool = False) -> Response:
    """Whatever route it came to."""
    speaks_tgi(request)
    engine = engine_of(request)
    asked = decode(body, TgiRequest)
    streams = streams or bool(asked.stream)
    wanted = asked.read(streams)
    if streams and wanted.best_of > 1:
        raise InvalidRequest(
            f"best_of = {wanted.best_of}: which of them is best is known only at the end; leave out stream",
            param="parameters.best_of",
        )
    submission = await submit(request, wanted)
    tell = _Teller(asked, submission, engine.tokenizer)
    if streams:
        return EventStream(request, submission, tell.event)
    (answers,) = await answers_to(request, submission, keeps_tokens=bool(asked.asked.details))
    response = await respond_at_length(
        lambda: [tell.response(answers)] if in_a_list else tell.response(answers), length(submission, [answers])
    )
    response.headers["x-prompt-tokens"] = str(submission.num_prompt_tokens)
    response.headers["x-generated-tokens"] = str(answers[0].num_tokens)
    return response


class _Teller:
    """TGI's words for one request's answer."""

    def __init__(self, asked: TgiRequest, submission: Submission, tokenizer: Tokenizer) -> None:
        self._asked = asked.asked
        self._submission = submission
        self._tokenizer = tokenizer
        self._before = asked.inputs if self._asked.return_full_text else ""
        self._streamed = Answer(0)

    def response(self, answers: list[Answer]) -> TgiResponse:
        best, *others = answers
        text = self._before + best.text
        if not self._asked.details:
            return TgiResponse(text)
        details = TgiDetails(*self._end(best), self._prefill(), self._tokens(best), self._all_top_tokens(best))
        if others:
            details.best_of_sequences = [
                TgiSequence(
                    self._before + other.text,
                    *self._end(other),
                    self._prefill(),
                    self._tokens(other),
                    self._all_top_tokens(other),
                )
                for other in others
            ]
        return TgiResponse(text, details)

    def event(self, deltas: list[TokenDelta]) -> bytes:
        """An event about the newest deltas of the answer; of several tokens it names the last."""
        answer = self._streamed
        answer.add(deltas)
        text = "".join(delta.text for delta in deltas)
        last = next((delta for delta in reversed(deltas) if delta.token_id is not None), None)
        # A deadline ends an answer without a token, but these clients want one in every event.
        token = TgiToken(0, text, None, True) if last is None else self._token(last, text)
        told = TgiStreamEvent(answer.num_tokens, token)
        if last is not None:
            told.top_tokens = self._top_tokens(last)
        if answer.is_finished:
            told.generated_text = self._before + answer.text
            if self._asked.details:
                reason, num_tokens, seed = self._end(answer)
                told.details = TgiStreamDetails(reason, num_tokens, self._submission.num_prompt_tokens, seed)
        return event(told)

    def _end(self, answer: Answer) -> tuple[str, int, int | None]:
        """(finish reason, tokens, seed); the seed only where the client gave one."""
        seed = None if self._asked.seed is None else self._submission.seed(answer.index)
        return finish_reason(answer.finish_reason, answer.stop_reason), answer.num_tokens, seed

    def _tokens(self, answer: Answer) -> list[TgiToken]:
        return [self._token(delta, self._tokenizer.decode([delta.token_id or 0])) for delta in answer.tokens]

    def _token(self, delta: TokenDelta, text: str) -> TgiToken:
        assert delta.token_id is not None
        return TgiToken(delta.token_id, text, delta.logprobs.logprob if delta.logprobs else None, delta.special)

    def _all_top_tokens(self, answer: Answer) -> list[list[TgiToken]] | UnsetType:
        return [self._top_tokens(delta) or [] for delta in answer.tokens] if self._asked.top_n_tokens else UNSET

    def _top_tokens(self, delta: TokenDelta) -> list[TgiToken] | UnsetType:
        if not self._asked.top_n_tokens or delta.logprobs is None:
            return UNSET
        return [
            TgiToken(token_id, self._tokenizer.decode([token_id]), logprob, self._tokenizer.is_special(token_id))
            for token_id, logprob in delta.logprobs.top
        ]

    def _prefill(self) -> list[TgiPromptToken]:
        if not self._asked.decoder_input_details:
            return []
        token_ids = self._submission.prompt_token_ids(0)
        logprobs = [None, *(known.logprob for known in self._submission.prompt_logprobs(0))]
        # Of a prompt that a deadline cut short there are fewer logprobs than tokens.
        return [
            TgiPromptToken(token_id, self._tokenizer.decode([token_id]), logprob)
            for token_id, logprob in zip(token_ids, logprobs, strict=False)
        ]


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        *("POST", "/", root),
        takes=(TgiRequest,),
        gives=(list[TgiResponse],),
        streams=(TgiStreamEvent,),
        example={"inputs": "What color is the sky?", "parameters": {"max_new_tokens": 20, "details": True}},
    )
]
