"""The state of one admitted request: its client's queue, and the output of each of its sequences."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from servekit.engine.caller import Caller
from servekit.engine.client_queue import ClientQueue
from servekit.engine.detokenizer import Detokenizer
from servekit.protocol.messages import TokenLogprobs
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GenerationRequest
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.sequence import NEVER, FinishReason, Sequence


class SequenceOutput:
    """One sequence of a request as its client sees it: its text so far, and the queue that the text goes to."""

    __slots__ = (
        "count_token",
        "detokenizer",
        "ended_s",
        "first_token_s",
        "index",
        "is_fork",
        "is_probe",
        "last_token_s",
        "num_tokens",
        "queue",
        "request_id",
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
        self.is_fork = sequence.leader is not None  # its prompt is computed and counted with its leader's
        self.index = index  # within the request
        self.detokenizer = detokenizer
        self.queue = queue
        self.request_id = request_id  # for logs; clients may choose it, so it need not be unique
        self.is_probe = is_probe  # whether it is the server's own readiness probe, which no metric counts
        self.count_token: Callable[[], bool] | None = None  # whether the answer may have another one; None: it may
        # That were delivered. The sequence may have more: tokens after a stop string, which is found only in the text.
        self.num_tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.ended_s: float | None = None


class RequestState:
    """A request that was admitted. Read its `queue`, or `abort` it."""

    def __init__(
        self,
        request: GenerationRequest,
        caller: Caller,
        outputs: list[SequenceOutput],
        queue: ClientQueue,
        interval: int,
        abort: Callable[[RequestState], None],
    ) -> None:
        self.request = request
        self.caller = caller
        self.outputs = outputs  # one for each answer that is computed, prompt by prompt
        self.queue = queue
        self.interval = interval  # tokens of a sequence that are streamed together
        self._abort = abort
        self._release_result: Callable[[], None] | None = None

    @property
    def num_answers(self) -> int:
        """How many answers are computed, over all prompts."""
        return len(self.outputs)

    def prompt_token_ids(self, index: int) -> array[int]:
        """The tokens of the prompt at `index`."""
        sequence = self._leader(index)
        return sequence.token_ids[: sequence.prompt_length]

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs]:
        """Logprobs of the prompt's tokens except the first. Complete when the first answer to it has a token."""
        return self._leader(index).prompt_logprobs

    def seed(self, index: int) -> int:
        """The seed of the sequence at `index`."""
        return self.outputs[index].sequence.sampling.seed

    def _leader(self, index: int) -> Sequence:
        return self.outputs[index * self.request.best_of].sequence

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens. Each prompt counts once, however many answers it gets."""
        return sum(sequence.prompt_length for sequence in self._leaders())

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was in the prefix cache."""
        return sum(sequence.num_cached_tokens or 0 for sequence in self._leaders())

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all answers so far, including answers of `best_of` that are not returned."""
        return sum(output.num_tokens for output in self.outputs)

    def num_answer_tokens(self, num_counted: int) -> int:
        """Return how many tokens the returned answers have, of which a reader of the queue has counted so many."""
        return num_counted

    @property
    def num_drafted_tokens(self) -> int:
        """Drafts that were verified for all answers so far, in speculative decoding."""
        return sum(output.sequence.num_drafted_tokens for output in self.outputs)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that became tokens of the answers. Accepted drafts after an answer's end do not count."""
        return sum(min(output.sequence.num_accepted_tokens, output.num_tokens) for output in self.outputs)

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """The finish reason of each answer; None for one that has not ended."""
        return [output.sequence.finish_reason for output in self.outputs]

    def _leaders(self) -> Iterator[Sequence]:
        return (output.sequence for output in self.outputs if not output.is_fork)

    def abort(self) -> None:
        """Free everything that this request still holds. Does not await, so it may be called in a `finally` clause."""
        self._abort(self)

    def hold_result(self, release: Callable[[], None]) -> None:
        """Keep `release`, which gives back the memory that is reserved for the result."""
        self._release_result = release

    def release_result(self) -> None:
        """Give back the memory that the result may take: the answer is written, or there will be none. Idempotent."""
        release, self._release_result = self._release_result, None
        if release is not None:
            release()


def add_commands(
    request: GenerationRequest,
    caller: Caller,
    token_ids: array[int],
    block_hashes: list[bytes],
    sampling: list[SamplingParams],
    arrival_s: float,
    ids: Iterator[int],
) -> Iterator[AddSequence]:
    """Commands that add one sequence for each answer to a prompt. The first one computes the prompt for all.

    The others take the hashes of the first one's blocks, too.
    """
    leader_id: int | None = None
    for each in sampling:
        sequence_id = next(ids)
        yield AddSequence(
            sequence_id=sequence_id,
            prompt_token_ids=token_ids,
            sampling=each,
            arrival_s=arrival_s,
            tenant=caller.tenant,
            priority=request.priority,
            ttft_deadline_s=_deadline(arrival_s, request.ttft_ms),
            deadline_s=_deadline(arrival_s, request.deadline_ms),
            leader_id=leader_id,
            has_length_bound=request.max_tokens is not None,
            block_hashes=block_hashes if leader_id is None else (),
            max_drafts=request.max_drafts,
            adapter=request.adapter,
        )
        leader_id = sequence_id if leader_id is None else leader_id


def _deadline(arrival_s: float, milliseconds: int | None) -> float:
    return NEVER if milliseconds is None else arrival_s + milliseconds / 1e3
