"""A request that was admitted: its sequences as their client sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from servekit.caller import Caller
from servekit.client_queue import ClientQueue
from servekit.detokenizer import Detokenizer
from servekit.generation_request import GenerationRequest
from servekit.messages import TokenLogprobs
from servekit.sampling_params import SamplingParams
from servekit.sequence import NEVER, FinishReason, Sequence


class Generation:
    """One sequence as its client sees it: the text so far, and where it goes."""

    __slots__ = (
        *("detokenizer", "first_token_s", "index", "is_fork", "is_probe", "last_token_s", "queue", "request_id"),
        "sequence",
    )

    def __init__(
        self,
        sequence: Sequence,
        index: int,
        detokenizer: Detokenizer,
        queue: ClientQueue,
        request_id: str = "",
        is_probe: bool = False,
    ) -> None:
        self.sequence = sequence
        self.is_fork = sequence.leader is not None  # its prompt is computed, and counted, with another one
        self.index = index
        self.detokenizer = detokenizer
        self.queue = queue
        self.request_id = request_id  # for the log
        self.is_probe = is_probe  # the server's own question, which no metric counts
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None


class Submission:
    """A request that was admitted: read its `queue`, or `abort` it."""

    def __init__(
        self,
        request: GenerationRequest,
        caller: Caller,
        generations: list[Generation],
        queue: ClientQueue,
        interval: int,
        finish: Callable[[Generation, FinishReason], None],
    ) -> None:
        self._finish = finish
        self._generations = generations
        self.request = request
        self.caller = caller
        self.queue = queue
        self.interval = interval  # tokens of a sequence that are handed out together

    @property
    def generations(self) -> list[Generation]:
        """One for each answer, to be looked at."""
        return self._generations

    @property
    def num_answers(self) -> int:
        """That are computed."""
        return len(self._generations)

    def prompt_token_ids(self, index: int) -> list[int]:
        """Of the request's prompt at `index`."""
        sequence = self._leader(index)
        return sequence.token_ids[: sequence.prompt_length]

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs]:
        """Of all its tokens but the first; there when its first answer has begun."""
        return self._leader(index).prompt_logprobs

    def seed(self, index: int) -> int:
        """Of the sequence at `index`."""
        return self._generations[index].sequence.sampling.seed

    def _leader(self, index: int) -> Sequence:
        return self._generations[index * self.request.best_of].sequence

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt once, however many answers it gets."""
        return sum(sequence.prompt_length for sequence in self._leaders())

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was there already."""
        return sum(sequence.num_cached_tokens or 0 for sequence in self._leaders())

    @property
    def num_generated_tokens(self) -> int:
        """Of all answers so far, also of those that nobody is told."""
        return sum(generation.sequence.num_output_tokens for generation in self._generations)

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        return [generation.sequence.finish_reason for generation in self._generations]

    def _leaders(self) -> Iterator[Sequence]:
        return (generation.sequence for generation in self._generations if not generation.is_fork)

    def abort(self) -> None:
        """Free everything that this request still holds. Does not await, so that it may run in a `finally`."""
        for generation in self._generations:
            self._finish(generation, FinishReason.ABORT)


def make_sequences(
    request: GenerationRequest,
    caller: Caller,
    token_ids: list[int],
    sampling: list[SamplingParams],
    arrival_s: float,
    ids: Iterator[int],
) -> Iterator[Sequence]:
    """One for each answer to a prompt; the first one computes it for all."""
    leader: Sequence | None = None
    for each in sampling:
        sequence = Sequence(
            next(ids),
            token_ids,
            each,
            arrival_s,
            tenant=caller.tenant,
            priority=request.priority,
            ttft_deadline_s=_deadline(arrival_s, request.ttft_ms),
            deadline_s=_deadline(arrival_s, request.deadline_ms),
            leader=leader,
            has_length_bound=request.max_tokens is not None,
        )
        leader = leader or sequence
        yield sequence


def _deadline(arrival_s: float, milliseconds: int | None) -> float:
    return NEVER if milliseconds is None else arrival_s + milliseconds / 1e3
