"""Output for an API process: one message in a turn of the event loop, in order, and nothing while it does not read."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from servekit.api_processes.messages import Output, PromptLogprobsPart, RequestFailed
from servekit.api_processes.outbox import MAX_DELTAS, MAX_PROMPT_LOGPROBS, Outbox, RemoteClientQueue
from servekit.engine.caller import Caller
from servekit.engine.client_queue import TokenDelta
from servekit.engine.detokenizer import NullDetokenizer
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.errors import WorkerLost
from servekit.protocol.messages import TokenLogprobs
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.scheduler.sequence import FinishReason, Sequence


class Connection:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.is_full = False
        self.sent: list[Any] = []
        self.on_room: Any = None

    def send(self, message: Any) -> None:
        self.sent.append(message)


def make_queue(number: int, outbox: Outbox, num_logprobs: int | None = None) -> RemoteClientQueue:
    """The queue of a request with two answers to one prompt."""
    queue = RemoteClientQueue(number, outbox)
    prompts, sampling = [Prompt("", "prompt")], Sampling()
    request = GenerationRequest(prompts=prompts, sampling=sampling, best_of=2, prompt_logprobs=num_logprobs)
    first = Sequence(0, [1], SamplingParams(max_tokens=9))
    second = Sequence(1, [1], SamplingParams(max_tokens=9), leader=first)
    outputs = [SequenceOutput(each, at, NullDetokenizer(), queue) for at, each in enumerate((first, second))]
    queue.state = RequestState(request, Caller(), outputs, queue, 1, lambda _: None)
    return queue


def token(index: int, token_id: int, reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(index, token_id, "", False, reason)


async def test_all_tokens_of_a_turn_of_the_event_loop_are_one_message() -> None:
    connection = Connection()
    outbox = Outbox(cast(Any, connection))
    queues = [make_queue(number, outbox) for number in range(50)]
    for token_id in range(3):
        for queue in queues:
            queue.put(token(0, token_id))
        assert len(connection.sent) == token_id
        await asyncio.sleep(0)
        output = connection.sent[-1]
        assert [number for number, _ in output.deltas] == list(range(50))
        assert len(output.times) == (50 if token_id == 0 else 0), "times come with the first token"


async def test_times_come_with_the_first_token_and_with_the_end() -> None:
    connection = Connection()
    queue = make_queue(3, Outbox(cast(Any, connection)))
    queue.put(token(0, 1))
    queue.state.outputs[0].last_token_s = 4.0
    queue.state.outputs[0].sequence.num_preemptions = 2
    queue.put(token(0, 2))
    queue.put(token(0, 3, FinishReason.LENGTH))
    await asyncio.sleep(0)
    (output,) = connection.sent
    assert [(each.request, each.num_preemptions, each.last_token_s) for each in output.times] == [
        (3, 0, None),
        (3, 2, 4.0),
    ]


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    connection = Connection()
    outbox = Outbox(cast(Any, connection))
    failing, other = make_queue(0, outbox), make_queue(1, outbox)
    failing.put(token(0, 1))
    failing.fail(WorkerLost("gone"))
    other.put(token(0, 2))
    await asyncio.sleep(0)
    assert [type(each) for each in connection.sent] == [Output, RequestFailed, Output]
    assert connection.sent[1].failure.kind == "WorkerLost"


async def test_logprobs_of_a_prompt_come_before_its_first_token_in_parts() -> None:
    connection = Connection()
    outbox = Outbox(cast(Any, connection))
    queue = make_queue(0, outbox, num_logprobs=0)
    logprobs = [TokenLogprobs(float(-number)) for number in range(2 * MAX_PROMPT_LOGPROBS + 1)]
    queue.state.outputs[0].sequence.prompt_logprobs = logprobs
    queue.put(token(0, 1))
    queue.put(token(1, 1))  # of the same prompt
    await asyncio.sleep(0)
    assert len(connection.sent) == 1, "one part in a turn of the event loop"
    for _ in range(3):
        await asyncio.sleep(0)
    assert [type(each) for each in connection.sent] == [PromptLogprobsPart] * 3 + [Output]
    assert [each for part in connection.sent[:3] for each in part.logprobs] == logprobs
    assert len(connection.sent[3].deltas) == 2


async def test_nothing_is_sent_while_the_process_does_not_read() -> None:
    connection = Connection()
    queue = make_queue(0, Outbox(cast(Any, connection)))
    connection.is_full = True
    for token_id in range(MAX_DELTAS + 1):
        queue.put(token(0, token_id))
        if token_id % 500 == 0:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not connection.sent
    connection.is_full = False
    connection.on_room()
    await asyncio.sleep(0)
    assert [delta.token_id for each in connection.sent for _, delta in each.deltas] == list(range(MAX_DELTAS + 1))


async def test_a_message_has_a_bounded_number_of_tokens() -> None:
    connection = Connection()
    queue = make_queue(0, Outbox(cast(Any, connection)))
    for token_id in range(2 * MAX_DELTAS + 1):
        queue.put(token(0, token_id))
    await asyncio.sleep(0)
    assert max(len(each.deltas) for each in connection.sent) == MAX_DELTAS
    assert [delta.token_id for each in connection.sent for _, delta in each.deltas] == list(range(2 * MAX_DELTAS + 1))
