"""Write answers in the native wire format: /generate, /generate_stream and /basic_generate."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from servekit.api.responses.collect import Answer, explanation_of, new_id, usage_of
from servekit.api.responses.long_json import ItemList
from servekit.api.responses.sse import SERVER_SENT_EVENTS, event
from servekit.api.schemas.native import (
    BasicGenerateResponse,
    BatchGenerateResponse,
    GenerateResponse,
    RequestMetrics,
    StreamEvent,
    Token,
    TopToken,
)
from servekit.engine.client_queue import TokenDelta
from servekit.engine.request_state import RequestState
from servekit.engine.tokenizer import Tokenizer
from servekit.protocol.messages import TokenLogprobs


class NativeResponseBuilder:
    """Write one request's answer. `is_batch`: the answer is a list of texts, even if it has one."""

    framing = SERVER_SENT_EVENTS
    end_of_stream = b""

    def __init__(
        self, state: RequestState, tokenizer: Tokenizer, is_batch: bool = False, numbers_events: bool = False
    ) -> None:
        self._state = state
        self._tokenizer = tokenizer
        self._is_batch = is_batch
        self._numbers_events = numbers_events  # gives each event an id, for a browser's EventSource
        self._streamed = Answer(0)
        self.needs_tokens = state.request.logprobs is not None
        self._shows_logprobs = self.needs_tokens or state.request.prompt_logprobs is not None

    def make_answer(self, index: int) -> Answer:
        return Answer(index, self.needs_tokens)

    def headers(self, _: list[list[Answer]]) -> dict[str, str]:
        return {}

    def response(self, prompts: list[list[Answer]], items: ItemList) -> GenerateResponse | BatchGenerateResponse:
        request = self._state.request
        answers = [answer for answers in prompts for answer in answers[: request.n]]
        usage = usage_of(self._state, sum(answer.num_tokens for answers in prompts for answer in answers))
        # One list for each answer, and one for each prompt; each is made when it is encoded.
        tokens = (items(map(self._generated_token, answer.tokens)) for answer in answers)
        prompt_tokens = (items(self._prompt_tokens(index)) for index in range(len(prompts)))
        if self._is_batch:
            return BatchGenerateResponse(
                new_id("gen"),
                items(answer.text for answer in answers),
                [answer.finish_reason for answer in answers],
                [answer.stop_reason for answer in answers],
                usage,
                UNSET if request.logprobs is None else items(tokens),
                UNSET if request.prompt_logprobs is None else items(prompt_tokens),
                explanation_of(self._state),
            )
        (answer,) = answers
        return GenerateResponse(
            new_id("gen"),
            answer.text,
            answer.finish_reason,
            answer.stop_reason,
            usage,
            self._metrics(answer.index),
            UNSET if request.logprobs is None else next(tokens),
            UNSET if request.prompt_logprobs is None else next(prompt_tokens),
            explanation_of(self._state),
        )

    def events(self, deltas: list[TokenDelta]) -> bytes:
        is_first = not self._streamed.num_tokens
        self._streamed.add(deltas)
        head = b"id: %d\n" % self._streamed.num_tokens if self._numbers_events else b""
        return head + event(self._stream_event(self._streamed, deltas, is_first))

    def last_events(self) -> bytes:
        return b""

    def _stream_event(self, answer: Answer, deltas: list[TokenDelta], is_first: bool) -> StreamEvent:
        """Return an event for an answer's newest deltas. If they have several tokens, it names the last one."""
        last, text = deltas[-1], deltas[0].text
        if len(deltas) > 1:
            last = next((delta for delta in reversed(deltas) if delta.token_id is not None), last)
            text = "".join([delta.text for delta in deltas])
        written = StreamEvent(answer.num_tokens, None if last.token_id is None else self._generated_token(last, text))
        if is_first and self._state.request.prompt_logprobs is not None:
            written.prompt_tokens = list(self._prompt_tokens(0))
        if answer.is_finished:
            written.generated_text = answer.text
            written.id = new_id("gen")
            written.finish_reason = answer.finish_reason
            written.stop_reason = answer.stop_reason
            written.usage = usage_of(self._state, answer.num_tokens)
            written.metrics = self._metrics(answer.index)
            written.explanation = explanation_of(self._state)
        return written

    def _metrics(self, index: int) -> RequestMetrics | UnsetType:
        """Return the times of the sequence at `index`, or UNSET if it ended before its first token."""
        output = self._state.outputs[index]
        sequence, first_s, last_s = output.sequence, output.first_token_s, output.last_token_s
        if sequence.first_scheduled_s is None or first_s is None or last_s is None:
            return UNSET

        def ms_since_arrival(at_s: float) -> float:
            return round(1e3 * (at_s - sequence.arrival_s), 3)

        return RequestMetrics(
            ms_since_arrival(sequence.first_scheduled_s), ms_since_arrival(first_s), ms_since_arrival(last_s)
        )

    def _generated_token(self, delta: TokenDelta, text: str | None = None) -> Token:
        """Return a token of the answer, with its own text or with the text that it completed."""
        assert delta.token_id is not None
        own = self._tokenizer.decode([delta.token_id]) if text is None else text
        return self._token(delta.token_id, own, delta.logprobs)

    def _prompt_tokens(self, index: int) -> Iterator[Token]:
        """Yield the tokens of the prompt at `index`. The first one has no logprob: no token precedes it."""
        logprobs: list[TokenLogprobs | None] = [None, *self._state.prompt_logprobs(index)]
        token_ids = self._state.prompt_token_ids(index)
        if len(logprobs) < len(token_ids):
            return  # not requested, or a deadline came before the prompt was computed
        for token_id, known in zip(token_ids, logprobs, strict=True):
            yield self._token(token_id, self._tokenizer.decode([token_id]), known)

    def _token(self, token_id: int, text: str, logprobs: TokenLogprobs | None) -> Token:
        decode, special = self._tokenizer.decode, self._tokenizer.is_special(token_id)
        if logprobs is None or not self._shows_logprobs:
            return Token(token_id, text, special)
        top: list[TopToken] | UnsetType = UNSET
        if logprobs.top:
            top = [TopToken(top_id, decode([top_id]), logprob) for top_id, logprob in logprobs.top]
        return Token(token_id, text, special, logprobs.logprob, top)


class BasicResponseBuilder(NativeResponseBuilder):
    """Write the text alone."""

    def response(self, prompts: list[list[Answer]], items: ItemList) -> BasicGenerateResponse:  # type: ignore[override]
        ((answer,),) = prompts
        return BasicGenerateResponse(answer.text)
