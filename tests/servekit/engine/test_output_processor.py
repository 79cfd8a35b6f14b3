"""Tests of the way from committed tokens to clients' queues, without a scheduler."""

from __future__ import annotations

import pytest

from servekit.engine.caller import Caller
from servekit.engine.client_queue import ClientQueue
from servekit.engine.detokenizer import Detokenizer
from servekit.engine.output_processor import OutputProcessor
from servekit.engine.request_registry import RequestRegistry
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.errors import InvalidRequest, WorkerLost
from servekit.observability.observer import Observer
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.scheduler.commands import Finish
from servekit.scheduler.sequence import FinishReason, Sequence
from servekit.scheduler.step import SequenceToken


class Recorder(Observer):
    """Records the events of sequences and tokens."""

    def __init__(self) -> None:
        self.admitted: list[int] = []
        self.latencies: list[tuple[list[float], list[float]]] = []
        self.ended: list[tuple[int, FinishReason, float | None]] = []
        self.lengths: list[int] = []  # of the sequences that have ended

    def sequence_admitted(self, sequence: Sequence) -> None:
        self.admitted.append(sequence.sequence_id)

    def tokens_delivered(
        self, first_token_latencies_s: list[float], inter_token_latencies_s: list[float], now_s: float
    ) -> None:
        self.latencies.append((first_token_latencies_s, inter_token_latencies_s))

    def sequence_ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_tokens: int,
        first_token_s: float | None,
        last_token_s: float | None,
        now_s: float,
    ) -> None:
        self.ended.append((sequence.sequence_id, reason, first_token_s))
        self.lengths.append(num_tokens)


class Outputs:
    """An OutputProcessor whose tokens are bytes, with a recorder of its events."""

    def __init__(self) -> None:
        self.registry, self.recorder = RequestRegistry(), Recorder()
        self.processor = OutputProcessor(self.registry, [self.recorder], lambda token_id: token_id == 0)

    def add(self, first_id: int, n: int = 1, is_probe: bool = False, **sampling: str | tuple[str, ...]) -> RequestState:
        queue, outputs = ClientQueue(), []
        for index in range(n):
            params = SamplingParams(max_tokens=9, **sampling)  # type: ignore[arg-type]
            sequence = Sequence(first_id + index, [1, 2], params, arrival_s=1.0)
            detokenizer = Detokenizer(lambda token_id: bytes([token_id]), params.stop, params.include_stop)
            outputs.append(SequenceOutput(sequence, index, detokenizer, queue, f"request-{first_id}", is_probe))
        asked = GenerationRequest(prompts=[Prompt("", "prompt")], sampling=Sampling(), n=n, best_of=n)
        request = RequestState(asked, Caller(), outputs, queue, 1, lambda _: None)
        for output in request.outputs:
            self.processor.add(request, output)
        return request

    def feed(self, request: RequestState, text: str, now_s: float, last: FinishReason | None = None) -> list[Finish]:
        """One token for each character, all in one commit, to the request's first sequence."""
        sequence = request.outputs[0].sequence
        reasons = [None] * (len(text) - 1) + [last]
        tokens = [
            SequenceToken(sequence, ord(character), reason) for character, reason in zip(text, reasons, strict=True)
        ]
        return self.processor.process(tokens, now_s)[0]


async def text_of(request: RequestState) -> str:
    return "".join(delta.text for delta in await request.queue.get())


async def test_latencies_are_reported_once_for_each_commit() -> None:
    outputs = Outputs()
    first, second = outputs.add(0), outputs.add(1)
    sequences = [request.outputs[0].sequence for request in (first, second)]
    outputs.processor.process([SequenceToken(sequence, 97, None) for sequence in sequences], 3.0)
    outputs.processor.process([SequenceToken(sequences[1], 98, None)], 3.5)
    outputs.processor.process([], 4.0)
    assert outputs.recorder.latencies == [([2.0, 2.0], []), ([], [0.5])]


async def test_a_stop_string_ends_the_sequence_and_later_tokens_of_the_commit_are_dropped() -> None:
    outputs = Outputs()
    request = outputs.add(5, stop=("bc",))
    commands = outputs.feed(request, "abcd", 2.0, FinishReason.LENGTH)
    assert commands == [Finish(5, FinishReason.STOP, 3)] and not outputs.registry.outputs
    deltas = await request.queue.get()
    assert "".join(delta.text for delta in deltas) == "a" and len(deltas) == 3
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "bc")
    assert outputs.recorder.ended == [(5, FinishReason.STOP, 2.0)]


async def test_only_tokens_that_the_client_got_are_counted() -> None:
    """Speculative decoding commits several tokens at once, and the manager does not know stop strings."""
    outputs = Outputs()
    request = outputs.add(5, stop=("bc",))
    sequence = request.outputs[0].sequence
    sequence.token_ids.extend(b"abcdef")
    sequence.num_drafted_tokens, sequence.num_accepted_tokens = 7, 5
    tokens = [SequenceToken(sequence, token_id, None) for token_id in b"abcdef"]
    assert outputs.processor.process(tokens, 2.0) == ([Finish(5, FinishReason.STOP, 3)], 3)
    assert outputs.recorder.lengths == [3]
    assert request.num_generated_tokens == 3
    assert (request.num_drafted_tokens, request.num_accepted_tokens) == (7, 3)
    assert outputs.recorder.latencies == [([1.0], [0.0, 0.0])]


async def test_an_answer_whose_key_may_have_no_more_tokens_ends_by_length_with_its_whole_text() -> None:
    outputs = Outputs()
    request = outputs.add(5, stop=("cx",))
    tokens_left = iter([True, True, False])
    request.outputs[0].count_token = lambda: next(tokens_left)
    commands = outputs.feed(request, "abcd", 2.0)
    assert commands == [Finish(5, FinishReason.LENGTH, 3)] and not outputs.registry.outputs
    deltas = await request.queue.get()
    assert "".join(delta.text for delta in deltas) == "abc" and len(deltas) == 3
    assert deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("include_stop", "text"), [(False, "a"), (True, "ab")])
async def test_the_token_that_stops_a_sequence_is_text_only_on_request(include_stop: bool, text: str) -> None:
    outputs = Outputs()
    request = outputs.add(0, include_stop=include_stop)  # type: ignore[arg-type]
    outputs.feed(request, "ab", 2.0, FinishReason.STOP)
    assert await text_of(request) == text


async def test_text_held_back_for_a_stop_string_is_released_at_the_end() -> None:
    outputs = Outputs()
    at_limit, at_deadline = outputs.add(0, stop=("bcd",)), outputs.add(1, stop=("bcd",))
    outputs.feed(at_limit, "abc", 2.0, FinishReason.LENGTH)
    assert await text_of(at_limit) == "abc"
    outputs.feed(at_deadline, "abc", 2.0)
    assert await text_of(at_deadline) == "a"
    outputs.processor.expire([at_deadline.outputs[0].sequence], 3.0)
    (end,) = await at_deadline.queue.get()
    assert (end.text, end.token_id, end.finish_reason) == ("bc", None, FinishReason.DEADLINE)


async def test_a_failed_grammar_is_an_error_of_its_request_only() -> None:
    outputs = Outputs()
    failing, other = outputs.add(0), outputs.add(1)
    token = SequenceToken(failing.outputs[0].sequence, 0, FinishReason.ERROR, failure="too ambiguous")
    assert outputs.processor.process([token], 2.0) == ([Finish(0, FinishReason.ERROR, 0)], 0)
    with pytest.raises(InvalidRequest, match="could not follow its grammar: too ambiguous"):
        await failing.queue.get()
    outputs.feed(other, "a", 3.0)
    assert await text_of(other) == "a"


async def test_a_failure_ends_all_siblings_and_no_other_request() -> None:
    outputs = Outputs()
    request, other = outputs.add(0, n=3), outputs.add(3)
    outputs.feed(request, "a", 2.0, FinishReason.LENGTH)  # the first sibling has ended already
    commands = outputs.processor.fail_request_of(1, WorkerLost("lost"), 3.0)
    assert commands == [Finish(1, FinishReason.ERROR, 0), Finish(2, FinishReason.ERROR, 0)]
    assert await text_of(request) == "a"
    with pytest.raises(WorkerLost):
        await request.queue.get()
    assert [output.sequence.sequence_id for output in outputs.registry.outputs] == [3]
    assert outputs.registry.unfinished(other) == other.outputs


def test_the_readiness_probe_is_in_no_event() -> None:
    outputs = Outputs()
    probe, request = outputs.add(0, is_probe=True), outputs.add(1)
    for each in (probe, request):
        outputs.feed(each, "a", 2.0, FinishReason.LENGTH)
    assert outputs.recorder.admitted == [1]
    assert outputs.recorder.latencies == [([1.0], [])]
    assert outputs.recorder.ended == [(1, FinishReason.LENGTH, 2.0)]


def test_unfinished_work_is_described_by_counts_and_the_first_request_ids() -> None:
    outputs = Outputs()
    assert outputs.registry.describe() == "0 sequences of 0 requests"
    outputs.add(0, n=2)
    assert outputs.registry.describe() == "2 sequences of 1 requests (request-0)"
    for sequence_id in range(2, 9):
        outputs.add(sequence_id)
    described = outputs.registry.describe()
    assert described.startswith("9 sequences of 8 requests (request-0, request-2,") and described.endswith(", …)")
