"""The state of a request to a remote model. Its tokens are counted by the model's server."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from servekit.engine.caller import Caller
from servekit.engine.client_queue import ClientQueue
from servekit.engine.detokenizer import NullDetokenizer
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.protocol.messages import TokenLogprobs
from servekit.protocol.sampling_params import SamplingParams
from servekit.remote.openai_stream import Usage
from servekit.requests.generation import GenerationRequest
from servekit.scheduler.sequence import FinishReason, Sequence

CHARACTERS_PER_TOKEN = 4  # an estimate, until the server has counted the prompt


class RemoteState(RequestState):
    """A request to a remote model.

    Its sequences have no tokens. Each one records the times and the end of one answer, for the log and the metrics.
    """

    def __init__(
        self,
        request: GenerationRequest,
        caller: Caller,
        interval: int,
        arrival_s: float,
        abort: Callable[[RequestState], None],
        release_places: Callable[[int], None],
    ) -> None:
        super().__init__(request, caller, [], ClientQueue(interval), interval, abort)
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the server has answered
        self.task: asyncio.Task[None] | None = None
        self.timers: list[asyncio.TimerHandle] = []  # of deadlines
        self.arrival_s = arrival_s
        self.usage: dict[int, Usage] = {}  # by prompt
        self.num_unfinished = request.num_sequences
        self._release_places = release_places
        self._num_places = len(request.prompts)
        sampling = SamplingParams(max_tokens=request.max_tokens or 1, seed=request.sampling.seed or 0)
        for index in range(request.num_sequences):
            leader = self.outputs[index - index % request.n].sequence if index % request.n else None
            sequence = Sequence(index, (0,), sampling, arrival_s, tenant=caller.tenant, leader=leader)
            output = SequenceOutput(sequence, index, NullDetokenizer(), self.queue, caller.request_id)
            self.outputs.append(output)

    def outputs_of(self, number: int) -> list[SequenceOutput]:
        """The answers to the prompt with this number."""
        n = self.request.n
        return self.outputs[number * n : (number + 1) * n]

    def release_places(self, num_places: int | None = None) -> None:
        """Give back this number of places in the queue, or all that are left."""
        num_places = self._num_places if num_places is None else num_places
        self._num_places -= num_places
        self._release_places(num_places)

    def has_begun(self) -> None:
        """Note that the server has begun to answer."""
        if not self.begun.done():
            self.begun.set_result(None)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def prompt_token_ids(self, index: int) -> array[int]:
        return array("i")  # the tokens are not known

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs]:
        return []

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompt_tokens_of(number) for number in range(len(self.request.prompts)))

    def prompt_tokens_of(self, number: int) -> int:
        """Tokens of one prompt: as the server has counted them, or until then an estimate."""
        if number in self.usage:
            return self.usage[number].num_prompt_tokens
        return -(-len(self.request.prompts[number].content) // CHARACTERS_PER_TOKEN)

    @property
    def num_cached_tokens(self) -> int:
        return sum(usage.num_cached_tokens for usage in self.usage.values())

    @property
    def num_generated_tokens(self) -> int:
        return sum(
            self.usage[number].num_completion_tokens
            if number in self.usage
            else sum(output.num_tokens for output in self.outputs_of(number))
            for number in range(len(self.request.prompts))
        )

    def num_answer_tokens(self, num_counted: int) -> int:
        return self.num_generated_tokens if len(self.usage) == len(self.request.prompts) else num_counted

    # -- the end ------------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[SequenceOutput]:
        """The answers that have not ended."""
        return [output for output in self.outputs if output.sequence.finish_reason is None]

    def note_end(self, output: SequenceOutput, reason: FinishReason) -> None:
        """Note that an answer has ended."""
        assert output.sequence.finish_reason is None, "an answer ends once"
        output.sequence.finish_reason = reason
        self.num_unfinished -= 1
