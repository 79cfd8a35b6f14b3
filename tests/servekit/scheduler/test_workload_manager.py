"""Claims about the schedule, each against the naive reference, which serves one prompt at a time."""

import itertools
import random

import pytest

from servekit.errors import ContextTooLong
from servekit.protocol.messages import StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.policy import SHORT_SHARE
from servekit.scheduler.prefill_limiter import MIN_PREFILL_TOKENS
from servekit.scheduler.sequence import FinishReason, Sequence, Status
from tests.support.scheduler import (
    add_prompt,
    add_sequence,
    assert_idle,
    make_manager,
    make_prompt,
    make_sequence,
    make_worker,
    reference,
    run,
)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_every_schedule_gives_the_naive_tokens(budget: int, num_blocks: int, max_steps_in_flight: int) -> None:
    manager = make_manager(
        is_reckless=True,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        max_steps_in_flight=max_steps_in_flight,
    )
    sequences = [add_sequence(manager, i, prompt_length=1 + 3 * i % 17, max_tokens=1 + 5 * i % 14) for i in range(24)]
    run(manager, make_worker(manager))
    for sequence in sequences:
        assert sequence.output_token_ids == reference(sequence)
        assert sequence.status is Status.FINISHED
    assert_idle(manager)
    if num_blocks == 8 and budget > 1:
        assert manager.num_preemptions > 0, "the small pool was meant to force preemption"


@pytest.mark.parametrize("seed", range(60))
def test_random_arrivals_aborts_and_stale_results_lose_no_token(seed: int) -> None:
    """The whole life at random: sequences join and leave mid-run, results come twice or from another epoch."""
    rng = random.Random(seed)
    manager = make_manager(
        num_blocks=rng.choice([8, 12, 40]),
        block_size=rng.choice([1, 4, 16]),
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([1, 5, 16, 64]),
        max_steps_in_flight=rng.choice([1, 2, 3]),
    )
    worker = make_worker(manager)
    sequences: list[Sequence] = []
    aborted: set[int] = set()
    plans = []
    while len(sequences) < 40 or manager.has_work:
        assert worker.num_steps < 20_000, "no progress"
        if len(sequences) < 40 and rng.random() < 0.3:
            prompt_length = rng.randint(1, max(1, manager.config.max_total_tokens - 1) // 2 + 1)
            max_tokens = rng.randint(1, min(40, manager.config.max_total_tokens - prompt_length))
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=rng.random() < 0.3)
            prompt = make_prompt(len(sequences), prompt_length)
            if sequences and rng.random() < 0.5:  # some begin as an earlier one did, output included
                shared = rng.choice(sequences).token_ids[: rng.randint(0, prompt_length)]
                prompt[: len(shared)] = shared
            sequences.append(add_prompt(manager, len(sequences), prompt, sampling, has_length_bound=False))
        if sequences and rng.random() < 0.05:
            victim = rng.choice(sequences)
            if manager.finish(victim.sequence_id, FinishReason.ABORT):
                aborted.add(victim.sequence_id)
            assert not manager.finish(victim.sequence_id, FinishReason.ABORT), "the second release must be a no-op"
        if (plan := manager.plan(0.0)) is not None:
            plans.append(plan)
        elif plans:
            result = worker.execute(plans.pop(0))
            wrong_tokens = tuple(token_id + 1 for token_id in result.token_ids)
            stale = StepResult(result.epoch + rng.choice([-1, 1]), result.step_id, wrong_tokens, 0.0)
            for message in rng.choice([[result], [stale, result], [result, result], [result, stale]]):
                for token in manager.commit(message, 0.0):
                    assert token.sequence.sequence_id not in aborted
                manager.check()
        manager.check()
    for sequence in sequences:
        expected = reference(sequence)
        if sequence.sequence_id in aborted:
            assert sequence.output_token_ids == expected[: sequence.num_output_tokens]
        else:
            assert sequence.output_token_ids == expected
    assert_idle(manager)


def test_prefill_and_decode_share_a_step_under_one_budget() -> None:
    manager = make_manager(max_num_batched_tokens=10)
    add_sequence(manager, 0, prompt_length=4, ignore_eos=True)
    worker = make_worker(manager)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    add_sequence(manager, 1, prompt_length=30)
    plan = manager.plan(0.0)
    assert [chunk.num_tokens for chunk in plan.chunks] == [1, 9]
    assert [chunk.samples for chunk in plan.chunks] == [True, False]


def test_chunked_prefill_sends_each_prompt_token_once() -> None:
    manager = make_manager(max_num_batched_tokens=7)
    sequence = add_sequence(manager, 0, prompt_length=30, max_tokens=1)
    worker, sent = make_worker(manager), []
    while manager.has_work:
        plan = manager.plan(0.0)
        sent += [token_id for chunk in plan.chunks for token_id in chunk.token_ids]
        manager.commit(worker.execute(plan), 0.0)
    assert sent == sequence.token_ids[:30].tolist()
    assert worker.num_steps == 5


def test_oldest_running_sequence_is_never_preempted() -> None:
    manager = make_manager(num_blocks=8, max_num_batched_tokens=64)
    sequences = [add_sequence(manager, i, prompt_length=4, max_tokens=24, ignore_eos=True) for i in range(6)]
    worker = make_worker(manager)
    while manager.has_work:
        oldest = next(s for s in sequences if s.status is not Status.FINISHED)
        before = oldest.num_preemptions
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
        assert oldest.num_preemptions == before
    assert manager.num_preemptions > 0 and sequences[0].num_preemptions == 0


def test_a_preempted_sequence_keeps_its_tokens_and_its_rank() -> None:
    manager = make_manager(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=64)
    sequences = [add_sequence(manager, i, prompt_length=6, max_tokens=20, ignore_eos=True) for i in range(3)]
    worker = make_worker(manager)
    while not manager.num_preemptions:
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    victim = next(s for s in sequences if s.num_preemptions)
    assert victim.num_output_tokens > 0 and not victim.kv.table
    late = add_sequence(manager, 9, prompt_length=1, max_tokens=1)
    run(manager, worker)
    assert victim.output_token_ids == reference(victim)
    assert late.status is Status.FINISHED


def test_a_sequence_is_not_admitted_only_to_be_preempted() -> None:
    """Two blocks are free and the newcomer needs two, but the running sequence will want its next one."""
    manager = make_manager(num_blocks=4, block_size=4)
    add_sequence(manager, 0, prompt_length=7, max_tokens=8, ignore_eos=True)
    worker = make_worker(manager)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    add_sequence(manager, 1, prompt_length=7, max_tokens=2, ignore_eos=True)
    run(manager, worker)
    assert manager.num_preemptions == 0


def test_aborted_blocks_are_fenced_until_the_step_in_flight_is_done() -> None:
    manager = make_manager()
    sequence = add_sequence(manager, 0)
    plan = manager.plan(0.0)
    manager.finish(sequence.sequence_id, FinishReason.ABORT)
    assert manager.kv_cache.pool.num_fenced == 2 and manager.kv_cache.pool.num_available == 62
    assert manager.commit(make_worker(manager).execute(plan), 0.0) == []
    assert_idle(manager)


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    manager = make_manager(num_blocks=8, block_size=4)
    with pytest.raises(ContextTooLong, match="maximum context length is 33 tokens"):
        add_sequence(manager, 0, prompt_length=30, max_tokens=4)
    fits = add_sequence(manager, 1, prompt_length=30, max_tokens=3, ignore_eos=True)
    run(manager, make_worker(manager))
    assert fits.num_output_tokens == 3


def test_finish_reasons_distinguish_stop_and_length() -> None:
    manager = make_manager()
    plain = add_sequence(manager, 0, max_tokens=250)
    capped = add_sequence(manager, 1, max_tokens=2, ignore_eos=True)
    third_token = reference(make_sequence(2, max_tokens=3, ignore_eos=True))[2]
    stopped = add_sequence(manager, 2, max_tokens=30, ignore_eos=True, stop_token_ids=(third_token,))
    run(manager, make_worker(manager))
    assert plain.finish_reason is FinishReason.STOP and plain.stop_token_id is None
    assert capped.finish_reason is FinishReason.LENGTH and capped.num_output_tokens == 2
    assert stopped.finish_reason is FinishReason.STOP and stopped.stop_token_id == third_token


def test_leaders_share_prompt_blocks_with_their_forks_even_without_a_prefix_cache() -> None:
    """Ten tokens in blocks of four: forks share two blocks, copy the third, and compute one token."""
    manager = make_manager(enable_prefix_caching=False)
    worker = make_worker(manager)
    leader = add_sequence(manager, 0, prompt_length=10, ignore_eos=True)
    forks = [add_prompt(manager, i, leader.token_ids, leader.sampling, leader_id=0) for i in range(1, 4)]
    assert (manager.num_running, manager.num_waiting) == (0, 4)
    first = manager.plan(0.0)
    assert [chunk.num_tokens for chunk in first.chunks] == [10], "forks wait for what they will share"
    manager.commit(worker.execute(first), 0.0)
    second = manager.plan(0.0)
    assert [chunk.num_tokens for chunk in second.chunks] == [1, 1, 1, 1] and len(second.copies) == 3
    assert manager.kv_cache.pool.num_leased == 3 + 3
    manager.commit(worker.execute(second), 0.0)
    assert {sequence.kv.table[0] for sequence in forks} == {leader.kv.table[0]}
    run(manager, worker)
    for sequence in (leader, *forks):
        assert sequence.output_token_ids == reference(sequence)


def test_forks_go_on_when_their_leader_is_aborted() -> None:
    manager = make_manager(max_num_batched_tokens=4)
    worker = make_worker(manager)
    leader = add_sequence(manager, 0, prompt_length=10)
    forks = [add_prompt(manager, i, leader.token_ids, leader.sampling, leader_id=0) for i in (1, 2)]
    plan = manager.plan(0.0)
    manager.finish(forks[1].sequence_id, FinishReason.ABORT)
    manager.finish(leader.sequence_id, FinishReason.ABORT)
    manager.commit(worker.execute(plan), 0.0)
    late = add_prompt(manager, 3, forks[0].token_ids, leader.sampling, leader_id=0)
    run(manager, worker)
    assert forks[0].output_token_ids == late.output_token_ids == reference(late)
    assert not forks[1].output_token_ids
    assert_idle(manager)


def test_a_deadline_ends_waiting_prefilling_and_running_sequences() -> None:
    manager = make_manager(max_num_batched_tokens=8, max_num_seqs=2)
    worker = make_worker(manager)
    prompt = [5] * 6
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    running = add_prompt(manager, 0, prompt, sampling, ttft_deadline_s=1.0, deadline_s=3.0)
    prefilling = add_prompt(manager, 1, [6] * 30, sampling, ttft_deadline_s=2.0)
    waiting = add_prompt(manager, 2, prompt, sampling, deadline_s=2.5)
    patient = add_prompt(manager, 3, prompt, SamplingParams(max_tokens=4, ignore_eos=True), ttft_deadline_s=1e9)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    assert manager.next_deadline_s == 1.0
    assert manager.expire(1.0) == [], "it had its first token in time"
    assert prefilling.num_computed and not prefilling.num_output_tokens
    in_flight = manager.plan(1.5)
    assert manager.num_in_flight == 1
    assert manager.expire(2.0) == [prefilling]
    assert manager.commit(worker.execute(in_flight), 2.0)[0].sequence is running
    assert manager.expire(2.9) == [waiting]
    assert manager.expire(3.5) == [running]
    assert {s.finish_reason for s in (running, prefilling, waiting)} == {FinishReason.DEADLINE}
    with pytest.raises(AssertionError, match="expired work"):
        manager.plan(2e9)
    run(manager, worker)
    assert patient.output_token_ids == reference(patient)


def test_deadlines_of_ended_sequences_are_dropped() -> None:
    """A day for every request, and a thousand of them; what is kept is what is alive."""
    manager = make_manager()
    worker = make_worker(manager)
    for i in range(1000):
        add_prompt(manager, i, [i], SamplingParams(max_tokens=1), deadline_s=86400.0, ttft_deadline_s=86399.0)
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    assert len(manager._deadlines) < 10


def test_all_sequences_continue_with_their_tokens_after_a_restart() -> None:
    """The worker dies with two steps in flight; what it says after its death counts for nothing."""
    manager = make_manager(max_steps_in_flight=2)
    worker = make_worker(manager)
    sequences = [add_sequence(manager, i, prompt_length=9, max_tokens=12, ignore_eos=True) for i in range(4)]
    for _ in range(5):
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    last_words = [manager.plan(0.0), manager.plan(0.0)]
    before = [sequence.output_token_ids for sequence in sequences]
    manager.restart()
    manager.check()
    assert manager.num_running == 0 and all(before)
    assert manager.commit(worker.execute(last_words[0]), 0.0) == [] and manager.num_stale_results == 1
    run(manager, make_worker(manager))
    for sequence, tokens in zip(sequences, before, strict=True):
        assert sequence.output_token_ids[: len(tokens)] == tokens
        assert sequence.output_token_ids == reference(sequence) and sequence.num_preemptions == 0
    assert_idle(manager)


def test_results_out_of_order_are_applied_in_order() -> None:
    manager = make_manager(max_steps_in_flight=3)
    worker = make_worker(manager)
    sequence = add_sequence(manager, 0, max_tokens=6, ignore_eos=True)
    first, second, third = (worker.execute(manager.plan(0.0)) for _ in range(3))
    assert manager.commit(third, 0.0) == manager.commit(second, 0.0) == []
    assert len(manager.commit(first, 0.0)) == 3
    run(manager, worker)
    assert sequence.output_token_ids == reference(sequence)


@pytest.mark.parametrize("max_preemptions", [0, 1, 3])
def test_a_sequence_is_preempted_at_most_max_preemptions_times(max_preemptions: int) -> None:
    """After its last preemption a sequence is admitted with all the blocks it can ever need, and keeps them."""
    manager = make_manager(num_blocks=8, max_num_batched_tokens=64, max_preemptions=max_preemptions)
    sequences = [add_sequence(manager, i, prompt_length=3, max_tokens=28, ignore_eos=True) for i in range(12)]
    run(manager, make_worker(manager))
    assert all(sequence.output_token_ids == reference(sequence) for sequence in sequences)
    assert max(sequence.num_preemptions for sequence in sequences) <= max_preemptions
    assert (manager.num_preemptions > 0) == (max_preemptions > 0)


def test_bounded_sequences_are_never_preempted() -> None:
    manager = make_manager(num_blocks=16, max_num_batched_tokens=64)
    for i in range(12):
        sampling = SamplingParams(max_tokens=5 + 3 * i, ignore_eos=True)
        add_prompt(manager, i, make_prompt(i, 3), sampling, has_length_bound=True)
    manager.plan(0.0)
    assert manager.num_running > 4, "the sum of all that they may need is far above the peak"
    manager.restart()
    run(manager, make_worker(manager))
    assert manager.num_preemptions == 0


def test_a_short_prompt_overtakes_a_running_long_one() -> None:
    manager = make_manager(max_num_batched_tokens=8, scheduling_policy="shortest")
    worker = make_worker(manager)
    long = add_sequence(manager, 0, prompt_length=80)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    short = add_sequence(manager, 1, prompt_length=5)
    plan = manager.plan(0.0)
    assert [chunk.num_tokens for chunk in plan.chunks] == [5, 3], (
        "three quarters for the short, at least a quarter for the long"
    )
    assert len(manager.commit(worker.execute(plan), 0.0)) == 1
    run(manager, worker)
    assert long.output_token_ids == reference(long) and short.output_token_ids == reference(short)


def test_a_higher_priority_prompt_overtakes_a_running_one() -> None:
    manager = make_manager(max_num_batched_tokens=8, scheduling_policy="priority")
    worker = make_worker(manager)
    add_sequence(manager, 0, prompt_length=80)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    sampling = SamplingParams(max_tokens=8)
    calm = add_prompt(manager, 2, make_prompt(2, 5), sampling, priority=1)
    urgent = add_prompt(manager, 1, make_prompt(1, 5), sampling, priority=-1)
    plan = manager.plan(0.0)
    assert [chunk.num_tokens for chunk in plan.chunks] == [5, 3], "the urgent prompt, and three tokens of the long one"
    assert manager.commit(worker.execute(plan), 0.0)[0].sequence is urgent
    run(manager, worker)
    assert calm.output_token_ids == reference(calm)


def test_the_predictor_learns_from_answers_that_a_stop_string_ended() -> None:
    """Stop strings are found in the text, outside the manager."""
    manager = make_manager()
    worker = make_worker(manager)
    for i in range(200):
        sequence = add_sequence(manager, i, max_tokens=60, ignore_eos=True)
        for _ in range(30):
            manager.commit(worker.execute(manager.plan(0.0)), 0.0)
        manager.finish(sequence.sequence_id, FinishReason.STOP)
    assert manager.output_lengths.tokens_to_come(make_sequence(999, max_tokens=100)) == 30


def test_prefill_is_limited_by_the_inter_token_target() -> None:
    """Steps of 1 ms and 0.1 ms a token: beside a stream and a target of 4 ms, some 29 tokens of prompt."""
    manager = make_manager(max_num_batched_tokens=64, itl_target_s=4e-3, num_blocks=200)
    worker, now = make_worker(manager), 0.0
    add_sequence(manager, 0, prompt_length=30, max_tokens=400, ignore_eos=True)
    chunks = []
    for i in range(60):
        if i % 10 == 5:
            add_sequence(manager, i, prompt_length=100, max_tokens=1)
        plan = manager.plan(now)
        now += 1e-3 + 1e-4 * plan.num_tokens
        manager.commit(worker.execute(plan), now)
        chunks.append(plan.num_tokens)
    assert chunks[0] == MIN_PREFILL_TOKENS, "at first, when the cost is unknown, little"
    assert 25 <= max(chunks[20:]) <= 30


def test_a_fifth_of_the_prefill_stays_with_the_long_prompt() -> None:
    """However many short ones come: of 20 tokens, SHORT_SHARE is theirs at most while the long one is under way."""
    manager = make_manager(max_num_batched_tokens=20, scheduling_policy="shortest", num_blocks=200)
    worker = make_worker(manager)
    long = add_sequence(manager, 0, prompt_length=200, max_tokens=1)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    for i in range(1, 30):
        add_sequence(manager, i, prompt_length=8, max_tokens=1)
    for _ in range(5):
        before = long.num_computed
        plan = manager.plan(0.0)
        assert plan.num_tokens == 20 and long.num_computed - before == 20 - int(20 * SHORT_SHARE) == 4
        manager.commit(worker.execute(plan), 0.0)


def test_a_second_long_prompt_does_not_take_the_share_of_short_ones() -> None:
    manager = make_manager(max_num_batched_tokens=20, scheduling_policy="shortest", num_blocks=200)
    worker = make_worker(manager)
    for sequence_id, prompt_length in ((0, 200), (1, 190)):
        add_sequence(manager, sequence_id, prompt_length=prompt_length)
    for _ in range(2):
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    short = add_sequence(manager, 2, prompt_length=8, max_tokens=1)
    assert [token.sequence for token in manager.commit(worker.execute(manager.plan(0.0)), 0.0)] == [short]


def test_a_cached_long_conversation_counts_as_a_short_prompt() -> None:
    manager = make_manager(max_num_batched_tokens=20, scheduling_policy="shortest", num_blocks=200)
    worker = make_worker(manager)
    talk = add_sequence(manager, 0, prompt_length=100, max_tokens=1)
    run(manager, worker)
    add_sequence(manager, 1, prompt_length=200)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    turn = add_prompt(manager, 2, [*talk.token_ids, 5, 6, 7], SamplingParams(max_tokens=1))
    assert turn.num_missing == 4
    assert [token.sequence for token in manager.commit(worker.execute(manager.plan(0.0)), 0.0)] == [turn]


def test_no_sequence_is_admitted_in_a_step_in_which_a_running_one_found_no_block() -> None:
    """Two sequences fill the pool; one ends while the step that fences its blocks is in flight; a third waits."""
    manager = make_manager(is_reckless=True, num_blocks=4, max_steps_in_flight=2, max_num_batched_tokens=64)
    worker = make_worker(manager)
    _, second = (add_sequence(manager, i, 6, max_tokens=9, ignore_eos=True) for i in range(2))
    plans = [manager.plan(0.0), manager.plan(0.0)]
    manager.commit(worker.execute(plans.pop(0)), 0.0)
    plans.append(manager.plan(0.0))  # both have filled two blocks of four
    manager.commit(worker.execute(plans.pop(0)), 0.0)
    manager.finish(second.sequence_id, FinishReason.ABORT)
    third = add_sequence(manager, 2, 6, max_tokens=9, ignore_eos=True)
    plan = manager.plan(0.0)
    assert plan is None, "the first needs a block, and those of the second are fenced"
    manager.commit(worker.execute(plans.pop(0)), 0.0)
    assert len(manager.plan(0.0).chunks) == 1, "the first grows; the third would take what it will need next"
    assert third.status is Status.WAITING


def test_the_last_ranked_sequence_is_preempted() -> None:
    manager = make_manager(is_reckless=True, num_blocks=9, max_num_batched_tokens=64)
    worker = make_worker(manager)
    sequences = [add_sequence(manager, i, prompt_length=7, max_tokens=9, ignore_eos=True) for i in range(3)]
    while not manager.num_preemptions:
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    assert [sequence.num_preemptions for sequence in sequences] == [0, 0, 1]


def test_shared_blocks_count_after_their_first_owner_ended() -> None:
    """A prefix of two blocks is held by a follower; its owner has ended. A newcomer must not be promised its room."""
    manager = make_manager(num_blocks=7, max_num_batched_tokens=64)
    worker = make_worker(manager)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    owner = add_prompt(manager, 0, prompt, SamplingParams(max_tokens=1))
    follower = add_prompt(manager, 1, prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    assert owner.status is Status.FINISHED and follower.kv.num_found == 2
    # Four blocks at most for the follower, so three are left; this one would come to need four.
    add_prompt(manager, 2, [50] * 5, SamplingParams(max_tokens=9, ignore_eos=True))
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    assert manager.num_running == 1
    run(manager, worker)
    assert manager.num_preemptions == 0


def test_a_shared_prefix_is_in_several_tables_until_one_sequence_is_left() -> None:
    manager = make_manager(max_num_batched_tokens=64)
    worker = make_worker(manager)
    for sequence_id, max_tokens in ((0, 1), (1, 8)):
        add_prompt(manager, sequence_id, range(9), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    shared = [manager.kv_cache.shared_blocks(manager._running)]
    plan = manager.plan(0.0)
    shared.append(manager.kv_cache.shared_blocks(manager._running))
    manager.commit(worker.execute(plan), 0.0)
    shared.append(manager.kv_cache.shared_blocks(manager._running))
    assert list(map(len, shared)) == [0, 2, 0]


def test_no_block_and_no_slot_is_leaked_while_sequences_run_and_after_they_end() -> None:
    manager = make_manager()
    worker = make_worker(manager)
    for sequence_id in range(3):
        add_sequence(manager, sequence_id)
    while manager.has_work:
        plan = manager.plan(0.0)
        assert manager.num_leaked == 0 and manager.num_in_flight == 1
        manager.commit(worker.execute(plan), 0.0)
    assert manager.num_leaked == 0
    manager._free_slots.pop()
    manager.kv_cache.pool.lease(2)
    assert manager.num_leaked == 3, "a slot and two blocks that no sequence has"


def test_forks_that_wait_for_their_leaders_prompt_count_as_deferred() -> None:
    manager = make_manager()
    for sequence_id, leader_id in ((0, None), (1, 0)):
        add_prompt(manager, sequence_id, range(5), SamplingParams(max_tokens=2), leader_id=leader_id)
    assert manager.num_waiting == 2 and manager.num_followers == 1


# -- what one plan may do ----------------------------------------------------------------------------------------------


def test_one_plan_admits_only_so_many_sequences_and_the_next_plans_the_others() -> None:
    manager = make_manager(max_admissions_per_step=2, max_steps_in_flight=9)
    sequences = [add_sequence(manager, i, prompt_length=1) for i in range(5)]
    plans = [manager.plan(0.0) for _ in range(3)]
    assert [len(plan.slot_assignments) for plan in plans if plan is not None] == [2, 2, 1]
    assert [sequence.slot is None for sequence in sequences] == [False] * 5


def test_a_long_prompt_evicts_no_more_blocks_in_one_plan_than_it_computes() -> None:
    manager = make_manager(num_blocks=32, max_num_batched_tokens=8, max_model_len=200)
    pool = manager.kv_cache.pool
    worker = make_worker(manager)
    add_sequence(manager, 0, prompt_length=120, max_tokens=1)
    run(manager, worker)
    assert pool.num_cached == 30
    long = add_sequence(manager, 1, prompt_length=110, max_tokens=1)
    num_cached = [pool.num_cached]
    while manager.has_work:
        plan = manager.plan(0.0)
        assert plan is not None
        if long.kv.table:
            num_cached.append(pool.num_cached)
        manager.commit(worker.execute(plan), 0.0)
    evicted = [before - after for before, after in itertools.pairwise(num_cached)]
    assert sum(evicted) >= 26 and max(evicted) <= 2, "a step of 8 tokens writes to two blocks of four"


def test_blocks_that_a_prompt_has_reserved_are_not_given_to_others() -> None:
    manager = make_manager(num_blocks=8, max_num_batched_tokens=4, scheduling_policy="shortest")
    long = add_sequence(manager, 0, prompt_length=24, max_tokens=1)
    assert manager.plan(0.0) is not None
    pool = manager.kv_cache.pool
    assert (pool.num_leased, pool.num_reserved, pool.num_available) == (1, 5, 2)
    add_sequence(manager, 1, prompt_length=12, max_tokens=1)
    manager.commit(StepResult(0, 0, (), 0.0), 0.0)
    assert manager.plan(0.0) is not None
    assert manager.num_running == 1, "the short one needs three blocks, and two are not reserved"
    manager.finish(long.sequence_id, FinishReason.ABORT)
    assert pool.num_reserved == 0
