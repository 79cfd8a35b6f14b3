"""Write answers in TGI's wire format: POST /, and /generate and /generate_stream for bodies with `inputs`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, UnsetType

from servekit.api.responses.collect import Answer
from servekit.api.responses.long_json import ItemList
from servekit.api.responses.sse import SERVER_SENT_EVENTS, event
from servekit.api.schemas.tgi import (
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
from servekit.engine.client_queue import TokenDelta
from servekit.engine.request_state import RequestState
from servekit.engine.tokenizer import Tokenizer


class TgiResponseBuilder:
    """Write one request's answer. `in_list`: POST / puts the object into a list, as TGI does."""

    framing = SERVER_SENT_EVENTS
    end_of_stream = b""

    def __init__(self, body: TgiRequest, state: RequestState, tokenizer: Tokenizer, in_list: bool = False) -> None:
        self._parameters = body.given_parameters
        self._state = state
        self._tokenizer = tokenizer
        self._in_list = in_list
        self._prefix = body.inputs if self._parameters.return_full_text else ""
        self._streamed = Answer(0)
        self.needs_tokens = bool(self._parameters.details)

    def make_answer(self, index: int) -> Answer:
        return Answer(index, self.needs_tokens)

    def headers(self, prompts: list[list[Answer]]) -> dict[str, str]:
        return {
            "x-prompt-tokens": str(self._state.num_prompt_tokens),
            "x-generated-tokens": str(self._state.num_answer_tokens(prompts[0][0].num_tokens)),
        }

    def response(self, prompts: list[list[Answer]], items: ItemList) -> Any:
        (answers,) = prompts
        written = self._response(answers, items)
        return [written] if self._in_list else written

    def _response(self, answers: list[Answer], items: ItemList) -> TgiResponse:
        best, *others = answers
        text = self._prefix + best.text
        if not self._parameters.details:
            return TgiResponse(text)
        details = TgiDetails(*self._end(best), *self._lists(best, items))
        if others:
            details.best_of_sequences = items(
                TgiSequence(self._prefix + other.text, *self._end(other), *self._lists(other, items))
                for other in others
            )
        return TgiResponse(text, details)

    def events(self, deltas: list[TokenDelta]) -> bytes:
        """Return an event for the answer's newest deltas. If they have several tokens, it names the last one."""
        answer = self._streamed
        answer.add(deltas)
        text = "".join(delta.text for delta in deltas)
        last = next((delta for delta in reversed(deltas) if delta.token_id is not None), None)
        # A deadline ends an answer without a token. These clients need one in every event, so it gets an empty one.
        token = TgiToken(0, text, None, True) if last is None else self._token(last, text)
        written = TgiStreamEvent(answer.num_tokens, token)
        if last is not None:
            written.top_tokens = self._top_tokens(last)
        if answer.is_finished:
            written.generated_text = self._prefix + answer.text
            if self._parameters.details:
                reason, num_tokens, seed = self._end(answer)
                written.details = TgiStreamDetails(reason, num_tokens, self._state.num_prompt_tokens, seed)
        return event(written)

    def last_events(self) -> bytes:
        return b""

    def _end(self, answer: Answer) -> tuple[str, int, int | None]:
        """Return (finish reason, number of tokens, seed). The seed is None unless the client sent one."""
        seed = None if self._parameters.seed is None else self._state.seed(answer.index)
        num_tokens = self._state.num_answer_tokens(answer.num_tokens)
        return finish_reason(answer.finish_reason, answer.stop_reason), num_tokens, seed

    def _lists(
        self, answer: Answer, items: ItemList
    ) -> tuple[list[TgiPromptToken], list[TgiToken], list[list[TgiToken]] | UnsetType]:
        """Return the tokens of the prompt, those of the answer, and the likeliest ones at each position."""
        tokens = (self._token(delta, self._tokenizer.decode([delta.token_id or 0])) for delta in answer.tokens)
        all_top = (self._top_tokens(delta) or [] for delta in answer.tokens)
        top_tokens = items(all_top) if self._parameters.top_n_tokens else UNSET
        return items(self._prefill()), items(tokens), top_tokens

    def _token(self, delta: TokenDelta, text: str) -> TgiToken:
        assert delta.token_id is not None
        return TgiToken(delta.token_id, text, delta.logprobs.logprob if delta.logprobs else None, delta.special)

    def _top_tokens(self, delta: TokenDelta) -> list[TgiToken] | UnsetType:
        if not self._parameters.top_n_tokens or delta.logprobs is None:
            return UNSET
        return [
            TgiToken(token_id, self._tokenizer.decode([token_id]), logprob, self._tokenizer.is_special(token_id))
            for token_id, logprob in delta.logprobs.top
        ]

    def _prefill(self) -> Iterator[TgiPromptToken]:
        if not self._parameters.decoder_input_details:
            return
        token_ids = self._state.prompt_token_ids(0)
        logprobs = [None, *(known.logprob for known in self._state.prompt_logprobs(0))]
        # A prompt that was cut short by a deadline has fewer logprobs than tokens.
        for token_id, logprob in zip(token_ids, logprobs, strict=False):
            yield TgiPromptToken(token_id, self._tokenizer.decode([token_id]), logprob)
