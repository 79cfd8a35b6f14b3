"""Collect the tokens of a request's sequences into answers, for any API's wire format."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable

from msgspec import UNSET, UnsetType

from servekit.api.explanations import explain_so_far
from servekit.api.schemas.common_fields import Usage
from servekit.engine.client_queue import TokenDelta
from servekit.engine.request_state import RequestState
from servekit.scheduler.explanation import Explanation
from servekit.scheduler.sequence import FinishReason


class Answer:
    """One sequence's text so far. Its tokens are kept only on request: they take ten times the memory of the text."""

    __slots__ = ("_last", "_logprob", "_texts", "index", "keeps_tokens", "token_ids", "tokens")

    def __init__(self, index: int, keeps_tokens: bool = False) -> None:
        self.index = index  # of its sequence in the request
        self.keeps_tokens = keeps_tokens
        self.tokens: list[TokenDelta] = []
        self.token_ids = array("i")  # the end at a deadline has none
        self._texts: list[str] = []
        self._logprob = 0.0  # sum over all tokens
        self._last: TokenDelta | None = None

    def add(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            self._last = delta
            if delta.text:
                self._texts.append(delta.text)
            if delta.token_id is None:
                continue
            self.token_ids.append(delta.token_id)
            if delta.logprobs is not None:
                self._logprob += delta.logprobs.logprob
            if self.keeps_tokens:
                self.tokens.append(delta)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self._last is not None and self._last.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason:
        assert self._last is not None and self._last.finish_reason is not None, "the answer is not finished"
        return self._last.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        assert self._last is not None
        return self._last.stop_reason

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def mean_logprob(self) -> float:
        """Mean logprob of the tokens, where the request computes logprobs."""
        return self._logprob / self.num_tokens if self.num_tokens else float("-inf")


async def collect(state: RequestState, make_answer: Callable[[int], Answer]) -> list[list[Answer]]:
    """Wait for all answers, which `make_answer` makes by their index.

    Returns for each prompt, in order, every computed answer; with `best_of`, best first.
    """
    request = state.request
    answers = [make_answer(index) for index in range(state.num_answers)]
    num_unfinished = len(answers)
    while num_unfinished:
        for delta in await state.queue.get():
            answers[delta.index].add((delta,))
            num_unfinished -= delta.finish_reason is not None
    if request.times is not None:
        request.times.answered()
    prompts = [answers[first : first + request.best_of] for first in range(0, len(answers), request.best_of)]
    if request.best_of > request.n:
        for candidates in prompts:
            candidates.sort(key=lambda answer: answer.mean_logprob, reverse=True)
    return prompts


def usage_of(state: RequestState, completion_tokens: int) -> Usage:
    """Return the number of tokens that a request has used, with this many in the answers that it returns."""
    prompt_tokens, completion_tokens = state.num_prompt_tokens, state.num_answer_tokens(completion_tokens)
    usage = Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, state.num_cached_tokens)
    if state.num_drafted_tokens:
        usage.drafted_tokens = state.num_drafted_tokens
        usage.accepted_tokens = state.num_accepted_tokens
    return usage


def explanation_of(state: RequestState) -> Explanation | UnsetType:
    """Return where the request's time went until now, if it asks for that."""
    return (explain_so_far(state) if state.request.explain else None) or UNSET


def split_into_events(deltas: list[TokenDelta], interval: int) -> list[list[TokenDelta]]:
    """Split pending deltas into events. Each event has deltas of one sequence, at most `interval` of them."""
    if len(deltas) == 1:
        return [deltas]
    events: list[list[TokenDelta]] = []
    open_events: dict[int, list[TokenDelta]] = {}
    for delta in deltas:
        of_sequence = open_events.get(delta.index)
        if of_sequence is None or len(of_sequence) >= interval:
            of_sequence = open_events[delta.index] = []
            events.append(of_sequence)
        of_sequence.append(delta)
    return events


def new_id(prefix: str, separator: str = "-") -> str:
    return f"{prefix}{separator}{secrets.token_hex(12)}"
