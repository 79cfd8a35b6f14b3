"""What a request's sequences have said so far, put together for whichever door is to tell it."""

from __future__ import annotations

import secrets

from servekit.client_queue import TokenDelta
from servekit.sequence import FinishReason
from servekit.submission import Submission


class Answer:
    """One sequence's text and tokens."""

    def __init__(self, index: int) -> None:
        self.index = index  # of its sequence in the request
        self.deltas: list[TokenDelta] = []

    @property
    def is_finished(self) -> bool:
        return bool(self.deltas) and self.deltas[-1].finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason:
        reason = self.deltas[-1].finish_reason
        assert reason is not None, "the answer is not finished"
        return reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.deltas[-1].stop_reason

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[TokenDelta]:
        """Its tokens; an end at a deadline is none."""
        return [delta for delta in self.deltas if delta.token_id is not None]

    @property
    def num_tokens(self) -> int:
        return len(self.deltas) - (bool(self.deltas) and self.deltas[-1].token_id is None)

    @property
    def mean_logprob(self) -> float:
        known = [delta.logprobs.logprob for delta in self.deltas if delta.logprobs is not None]
        return sum(known) / len(known) if known else float("-inf")


async def collect(submission: Submission) -> list[list[Answer]]:
    """For each prompt, in order, all the answers that were computed for it: the best first if there is a choice."""
    request = submission.request
    answers = [Answer(index) for index in range(submission.num_answers)]
    num_unfinished = len(answers)
    while num_unfinished:
        for delta in await submission.queue.get():
            answers[delta.index].deltas.append(delta)
            num_unfinished -= delta.finish_reason is not None
    prompts = [answers[first : first + request.best_of] for first in range(0, len(answers), request.best_of)]
    if request.best_of > request.n:
        for candidates in prompts:
            candidates.sort(key=lambda answer: answer.mean_logprob, reverse=True)
    return prompts


def events_of(deltas: list[TokenDelta], interval: int) -> list[list[TokenDelta]]:
    """What has come, as events: each some deltas of one sequence, up to an interval of them."""
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


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
