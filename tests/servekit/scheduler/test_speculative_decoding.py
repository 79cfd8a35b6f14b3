"""Claims about drafts: with each drafter the answers are the same, and no sequence waits for a draft."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from msgspec.structs import replace

from servekit.errors import WorkerLost
from servekit.protocol.messages import ScheduledChunk, StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.time_causes import TimeCause
from servekit.scheduler.commands import AddSequence, Finish
from servekit.scheduler.sequence import FinishReason
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.replica import make_drafts
from tests.support.scheduler import (
    EOS,
    add_prompt,
    add_sequence,
    assert_idle,
    make_manager,
    make_prompt,
    make_worker,
    reference,
)

ALL_RIGHT = dict.fromkeys(range(8), (99, 99))
ALL_WRONG = dict.fromkeys(range(8), (99, 0))


class Driver:
    """Plans as many steps as the manager lets in flight, and executes one at a time."""

    def __init__(self, manager: WorkloadManager) -> None:
        self.manager = manager
        self.worker = make_worker(manager)
        self.plans: list[StepPlan] = []
        self.sent: list[StepPlan] = []

    def plan(self) -> None:
        while (plan := self.manager.plan(0.0)) is not None:
            self.manager.check()
            self.plans.append(plan)
            self.sent.append(plan)

    def execute(self, drafts: Mapping[int, tuple[int, int]], deferring: Collection[int] = ()) -> StepResult:
        self.plan()
        return self.worker.execute(self.plans.pop(0), deferring, drafts)

    def step(self, drafts: Mapping[int, tuple[int, int]], deferring: Collection[int] = ()) -> list[SequenceToken]:
        tokens = self.manager.commit(self.execute(drafts, deferring), 0.0)
        self.manager.check()
        return tokens

    def finish(self, drafts: Mapping[int, tuple[int, int]] = ALL_WRONG) -> int:
        """Return the number of steps until nothing is left."""
        num_steps = 0
        while self.manager.has_work:
            self.step(drafts)
            num_steps += 1
        assert_idle(self.manager)
        return num_steps


def chunks_of(driver: Driver) -> list[ScheduledChunk]:
    return [chunk for plan in driver.sent for chunk in plan.chunks]


def with_drafts_in_flight(max_steps_in_flight: int, step_s: float) -> Driver:
    """Return a driver whose newest step has drafts of two sequences. Each step is expected to take `step_s`."""
    manager = make_manager(max_drafts=2, max_steps_in_flight=max_steps_in_flight, num_blocks=24)
    manager.draft_lengths.times.restore([1], [step_s], [1.0], 0.0)
    driver = Driver(manager)
    for number in range(2):
        add_sequence(manager, number, max_tokens=40)
    driver.plan()
    while not manager.steps_in_flight[-1].num_drafts:
        driver.step(ALL_RIGHT)
        driver.plan()
    return driver


def test_a_request_that_comes_during_a_long_step_with_drafts_is_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time until the next step is sent counts as a part of that step: it was lost by awaiting the result."""
    driver = with_drafts_in_flight(2, 10e-3)
    manager = driver.manager
    add_sequence(manager, 2, max_tokens=4)
    while manager.num_in_flight > 1:
        manager.commit(driver.worker.execute(driver.plans.pop(0), (), ALL_RIGHT), 0.0)
    assert manager.plan(1e-3) is None, "two steps may be in flight, but this one is awaited"
    manager.commit(driver.worker.execute(driver.plans.pop(0), (), ALL_RIGHT), 10e-3)
    observed: list[float] = []
    monkeypatch.setattr(manager.draft_lengths, "observe", lambda step, seconds, *_: observed.append(seconds))
    plan = manager.plan(11e-3)
    assert plan is not None and manager.steps_in_flight[-1].num_prefill_tokens == 5
    manager.commit(driver.worker.execute(plan, (), ALL_RIGHT), 19e-3)
    assert observed == [pytest.approx(9e-3)]


@pytest.mark.parametrize(
    ("max_steps_in_flight", "step_s", "rule"),
    [
        (2, 10e-3, "long_speculative_step"),
        (3, 10e-3, "long_speculative_step"),
        (2, 1e-3, "max_steps_in_flight"),  # such short steps are not awaited
        (1, 10e-3, "max_steps_in_flight"),  # each step is awaited, with drafts or without
    ],
)
def test_a_request_that_comes_during_a_step_with_drafts_is_told_why_its_own_is_not_planned(
    max_steps_in_flight: int, step_s: float, rule: str
) -> None:
    manager = with_drafts_in_flight(max_steps_in_flight, step_s).manager
    sequence = add_sequence(manager, 2, max_tokens=4)
    (span,) = sequence.history.spans(5e-3)
    assert span.queue is not None
    states = [state for state, _ in span.queue.between(0.0, 5e-3)]
    assert states[-1] is not None and (states[-1].cause, states[-1].rule) == (TimeCause.NEXT_STEP, rule)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafter", ["right", "wrong", "alternates", "few", "random"])
def test_answers_are_the_same_whoever_drafts(drafter: str, depth: int) -> None:
    manager = make_manager(max_drafts=4, max_steps_in_flight=depth, num_blocks=24, is_reckless=True)
    driver = Driver(manager)
    sequences = [add_sequence(manager, i, prompt_length=1 + 3 * i % 17, max_tokens=1 + 7 * i % 40) for i in range(12)]
    for number in range(10_000):
        if not manager.has_work:
            break
        driver.step({slot: make_drafts(drafter, 4, number, slot) for slot in range(8)})
    assert_idle(manager)
    assert [each.output_token_ids for each in sequences] == [reference(each) for each in sequences]
    assert any(chunk.num_drafts for chunk in chunks_of(driver))


@pytest.mark.parametrize("depth", [1, 2])
def test_accepted_drafts_save_steps(depth: int) -> None:
    manager = make_manager(max_drafts=4, max_steps_in_flight=depth)
    sequence = add_sequence(manager, 0, max_tokens=101, ignore_eos=True)
    num_steps = Driver(manager).finish(ALL_RIGHT)
    assert sequence.output_token_ids == reference(sequence)
    assert num_steps <= 1 + 100 / 5 + depth
    assert sequence.num_accepted_tokens == sequence.num_drafted_tokens >= 78


def test_without_speculation_no_chunk_has_drafts_and_no_time_is_learned() -> None:
    manager = make_manager()
    driver = Driver(manager)
    add_sequence(manager, 0)
    driver.finish(ALL_RIGHT)
    assert not any(chunk.num_drafts for chunk in chunks_of(driver))
    assert not manager.draft_lengths.times.classes


def test_drafts_are_counted_by_their_position() -> None:
    manager = make_manager(max_drafts=3)
    driver = Driver(manager)
    sequence = add_sequence(manager, 0, max_tokens=40, ignore_eos=True)
    driver.step({})
    driver.step({sequence.slot or 0: (3, 2)})
    driver.step({sequence.slot or 0: (1, 1)})
    assert manager.draft_lengths.num_drafted == [2, 1, 1], "those that were made, and not all that were planned"
    assert manager.draft_lengths.num_accepted == [2, 1, 0]
    assert (sequence.num_drafted_tokens, sequence.num_accepted_tokens) == (4, 3)
    assert sequence.num_output_tokens == 1 + 3 + 2


def test_tokens_behind_a_stop_string_are_not_learned_as_the_length_of_an_answer() -> None:
    manager = make_manager(max_drafts=3)
    driver = Driver(manager)
    sequence = add_sequence(manager, 0, max_tokens=40, ignore_eos=True)
    driver.step({})
    driver.step(ALL_RIGHT)
    assert sequence.num_output_tokens == 5
    assert manager.apply(Finish(0, FinishReason.STOP, 2))
    assert manager.output_lengths.mean_length == 2


def test_what_is_rejected_is_scheduled_again_from_the_newest_token() -> None:
    """Two steps in flight: the second one was planned as if all drafts of the first one were accepted."""
    manager = make_manager(max_drafts=3, max_steps_in_flight=2)
    driver = Driver(manager)
    sequence = add_sequence(manager, 0, prompt_length=5, max_tokens=40, ignore_eos=True)
    driver.step({})
    driver.step(ALL_WRONG)
    driver.plan()
    starts = [(chunk.start, chunk.num_tokens) for chunk in chunks_of(driver)]
    # The prompt; a step behind it; one behind that; one that was planned when the second was known to have one token.
    assert starts == [(0, 5), (5, 4), (9, 4), (10, 4)]
    assert (sequence.num_tokens, sequence.num_computed, sequence.num_pending) == (7, 14, 8)
    driver.step(ALL_WRONG)
    driver.step(ALL_WRONG)
    driver.manager.finish(0, FinishReason.ABORT)
    assert sequence.output_token_ids == reference(sequence)[:4]


def test_no_draft_is_planned_behind_the_last_token_or_beyond_the_reserved_blocks() -> None:
    for max_tokens in range(1, 24):
        manager = make_manager(max_drafts=7, max_steps_in_flight=2, block_size=2)
        driver = Driver(manager)
        sequence = add_sequence(manager, 0, prompt_length=3, max_tokens=max_tokens, ignore_eos=True)
        driver.finish(ALL_RIGHT if max_tokens % 2 else {0: (7, 3), 7: (7, 3)})
        assert sequence.output_token_ids == reference(sequence)
        assert max(chunk.start + chunk.num_tokens for chunk in chunks_of(driver)) <= 3 + max_tokens - 1
        num_blocks = sum(len(chunk.new_block_ids) for chunk in chunks_of(driver))
        assert num_blocks <= -(-(3 + max_tokens - 1) // 2)


def test_prompts_go_before_drafts() -> None:
    manager = make_manager(max_drafts=7, max_num_batched_tokens=12)
    driver = Driver(manager)
    add_sequence(manager, 0, prompt_length=4, max_tokens=60, ignore_eos=True)
    driver.step({})
    add_sequence(manager, 1, prompt_length=25, max_tokens=2)
    for num_prefill_tokens, num_drafts in ((11, 0), (11, 0), (3, 7)):
        driver.step(ALL_RIGHT)
        decode, *prefill = driver.sent[-1].chunks
        assert decode.num_drafts == num_drafts
        assert [chunk.num_tokens for chunk in prefill] == [num_prefill_tokens]


def test_no_sequence_is_preempted_for_a_draft() -> None:
    """All but two of the blocks are in use: two sequences get drafts up to the end of their blocks."""
    manager = make_manager(max_drafts=7, num_blocks=8, block_size=4, max_num_seqs=3, is_reckless=True)
    driver = Driver(manager)
    sequences = [add_sequence(manager, number, prompt_length=5, max_tokens=10, ignore_eos=True) for number in range(3)]
    while manager.num_running < 3 or any(not each.num_output_tokens for each in sequences):
        driver.step({})
    assert manager.kv_cache.pool.num_available == 2
    driver.plan()
    assert [chunk.num_drafts for chunk in driver.sent[-1].chunks] == [7, 2, 2]
    assert manager.num_preemptions == 0 and manager.kv_cache.pool.num_available == 0
    driver.finish()
    assert [each.output_token_ids for each in sequences] == [reference(each) for each in sequences]


def test_a_client_may_allow_fewer_drafts_or_none() -> None:
    manager = make_manager(max_drafts=5)
    driver = Driver(manager)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    for number, max_drafts in enumerate([None, 0, 2, 99]):
        manager.apply(
            AddSequence(
                sequence_id=number, prompt_token_ids=make_prompt(number, 4), sampling=sampling, max_drafts=max_drafts
            )
        )
    driver.step({})
    driver.plan()
    assert [chunk.num_drafts for chunk in driver.sent[-1].chunks] == [5, 0, 2, 5]
    assert [command.max_drafts for command in manager.withdraw(None)] == [5, 0, 2, 5]


def test_a_stop_token_ends_the_span() -> None:
    """Also if a worker accepts what comes behind it."""
    manager = make_manager(max_drafts=7)
    driver = Driver(manager)
    sequences = [add_sequence(manager, number, max_tokens=200) for number in range(8)]
    driver.finish(ALL_RIGHT)
    stopped = [each for each in sequences if each.finish_reason is FinishReason.STOP]
    assert stopped and all(each.token_ids[-1] in EOS for each in stopped)
    assert [each.output_token_ids for each in sequences] == [reference(each) for each in sequences]


def test_a_draft_that_was_not_made_because_the_answer_ends_counts_as_rejected_for_none() -> None:
    manager = make_manager(max_drafts=7)
    driver = Driver(manager)
    sequences = [add_sequence(manager, number, max_tokens=200) for number in range(8)]
    num_ended = 0
    while manager.has_work:
        before = {each: (each.acceptance, each.num_output_tokens) for each in sequences if each.finish_reason is None}
        # As many right drafts for each as it has tokens before its last one.
        lefts = {each: len(reference(each)) - each.num_output_tokens - 1 for each in before}
        slots = {each.slot: min(7, max(0, left)) for each, left in lefts.items() if each.slot is not None}
        driver.step({slot: (number, number) for slot, number in slots.items()})
        for each, (acceptance, num_tokens) in before.items():
            if each.finish_reason is FinishReason.STOP and num_tokens:
                num_ended += 1
                assert each.acceptance >= acceptance
    assert num_ended > 3
    assert [each.output_token_ids for each in sequences] == [reference(each) for each in sequences]


def test_a_sequence_that_was_in_flight_in_a_crash_gets_no_drafts_from_then_on() -> None:
    manager = make_manager(max_drafts=4)
    driver = Driver(manager)
    sequence = add_sequence(manager, 0, max_tokens=30, ignore_eos=True)
    driver.step({})
    driver.plan()
    assert driver.sent[-1].chunks[0].num_drafts == 4
    assert manager.restart() == []
    driver.plans.clear()
    driver.worker = make_worker(manager)
    num_before = len(chunks_of(driver))
    driver.finish(ALL_RIGHT)
    assert not any(chunk.num_drafts for chunk in chunks_of(driver)[num_before:])
    assert sequence.output_token_ids == reference(sequence)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_deferral_sets_a_sequence_back_to_its_newest_token(depth: int) -> None:
    """Whatever was planned behind it: the steps in flight are ignored, and their drafts as well."""
    manager = make_manager(max_drafts=3, max_steps_in_flight=depth)
    driver = Driver(manager)
    slow, other = (add_sequence(manager, number, max_tokens=100, ignore_eos=True) for number in range(2))
    driver.step({})
    for number in range(30):
        driver.step(dict.fromkeys(range(8), (3, number % 4)), [slow.slot or 0] if number % 3 else ())
    driver.finish(ALL_RIGHT)
    assert slow.output_token_ids == reference(slow)
    assert other.output_token_ids == reference(other)
    assert manager.num_deferrals > 5


def test_an_invalid_token_ends_only_its_own_sequence() -> None:
    """Its span has no other token. Failures are counted by span, and the span before it may be longer."""
    manager = make_manager(max_drafts=3)
    driver = Driver(manager)
    longer, lost = (add_sequence(manager, number, max_tokens=30, ignore_eos=True) for number in range(2))
    driver.step({})
    result = driver.execute({slot: (3, 3) if slot == longer.slot else (3, 0) for slot in range(8)})
    assert result.counts == (4, 1)
    tokens = manager.commit(replace(result, failures=((1, "too complex"),)), 0.0)
    manager.check()
    failed = [token for token in tokens if token.failure is not None]
    assert [(token.sequence, token.token_id) for token in failed] == [(lost, result.token_ids[4])]
    assert longer.num_output_tokens == 5 and lost.num_output_tokens == 1
    driver.finish(ALL_RIGHT)
    assert longer.output_token_ids == reference(longer)


def test_logprobs_of_a_span_come_with_its_tokens() -> None:
    manager = make_manager(max_drafts=3)
    driver = Driver(manager)
    add_sequence(manager, 0, max_tokens=30, ignore_eos=True, logprobs=2)
    add_sequence(manager, 1, max_tokens=30, ignore_eos=True)
    driver.step({})
    tokens = driver.step(ALL_RIGHT)
    assert [token.sequence.sequence_id for token in tokens] == [0] * 4 + [1] * 4
    assert [token.logprobs is not None for token in tokens] == [True] * 4 + [False] * 4


def forge(result: StepResult, counts: tuple[int, ...], num_tokens: int | None = None) -> StepResult:
    """The result with other counts, and with as many tokens as they say."""
    return replace(result, counts=counts, token_ids=(7,) * (sum(counts) if num_tokens is None else num_tokens))


def test_a_result_with_impossible_spans_is_refused_and_changes_nothing() -> None:
    manager = make_manager(max_drafts=3)
    driver = Driver(manager)
    sequences = [add_sequence(manager, number, max_tokens=30, ignore_eos=True) for number in range(2)]
    driver.step({})
    result = driver.execute(ALL_RIGHT)
    assert result.counts == (4, 4)
    before = [repr(each) for each in sequences]
    for malformed in (
        forge(result, (5, 1)),  # more than drafts were planned, and one
        forge(result, (0, 4)),
        forge(result, (-1, 4)),
        forge(result, (4,)),
        forge(result, (4, 4, 1)),
        forge(result, (4, 3), 8),
        forge(result, (), 8),
        replace(result, logprobs=(None,) * 2),  # by span, not by token
        replace(result, deferred=(1,)),  # a deferred span has one token
        replace(result, failures=((0, "too complex"),)),
        replace(result, deferred=(2,)),
        replace(result, num_drafts=(4, 3)),  # more than were planned
        replace(result, num_drafts=(2, 3)),  # fewer than were accepted
        replace(result, num_drafts=(-1, 3), counts=(1, 4), token_ids=(7,) * 5),
        replace(result, num_drafts=(3,)),
        replace(result, num_drafts=()),
    ):
        with pytest.raises(WorkerLost, match="does not fit its step of 2 spans"):
            manager.commit(malformed, 0.0)
        assert [repr(each) for each in sequences] == before
        manager.check()
    assert len(manager.commit(result, 0.0)) == 8


@pytest.mark.parametrize(("max_tokens", "num_cached"), [(4, 4), (5, 8)])
def test_a_block_is_found_by_others_when_all_its_positions_are_computed(max_tokens: int, num_cached: int) -> None:
    """The fourth token fills a block, and ends a span. Its own KV is computed only if another token follows."""
    manager = make_manager(max_drafts=3, block_size=4)
    driver = Driver(manager)
    prompt = make_prompt(0, 4)
    first = add_prompt(manager, 0, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    driver.finish(ALL_RIGHT)
    again = add_prompt(manager, 1, [*prompt, *first.output_token_ids[:4], 5], SamplingParams(max_tokens=4))
    driver.step({})
    assert again.num_cached_tokens == num_cached
    driver.finish(ALL_RIGHT)
    assert again.output_token_ids == reference(again)


def test_under_fair_a_tenant_pays_for_its_tokens_and_not_for_rejected_drafts() -> None:
    paid = []
    for max_drafts, drafts in ((0, {}), (4, ALL_WRONG), (4, ALL_RIGHT)):
        manager = make_manager(max_drafts=max_drafts, scheduling_policy="fair")
        driver = Driver(manager)
        add_prompt(manager, 0, make_prompt(0, 6), SamplingParams(max_tokens=21, ignore_eos=True), tenant="a")
        driver.finish(drafts)
        paid.append(manager.waiting_queue.num_served_tokens)  # type: ignore[attr-defined]
    assert paid == [{"a": 6 + 20}] * 3
