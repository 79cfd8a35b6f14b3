"""Claims about the schedule, each against the naive reference, which serves one prompt at a time."""

import random
from typing import Any

import pytest

from servekit.errors import ContextTooLong
from servekit.messages import StepResult
from servekit.pacing import LEAST_PREFILL
from servekit.policy import SHORT_SHARE
from servekit.sampling_params import SamplingParams
from servekit.scheduler_config import SchedulerConfig
from servekit.sequence import FinishReason, Sequence, Status
from servekit.simulated_worker import NaiveReference, SimulatedWorker
from servekit.simulation import RecklessForecast
from servekit.workload_manager import WorkloadManager

EOS = frozenset({39, 74})  # 2 % of the simulated vocabulary: answers end by themselves after about 50 tokens


def make_manager(is_reckless: bool = False, **changes: Any) -> WorkloadManager:
    limits = {"num_blocks": 64, "block_size": 4, "max_model_len": 1000, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    config = SchedulerConfig(eos_token_ids=EOS, **{**limits, **changes})
    return WorkloadManager(config, RecklessForecast(config.block_size) if is_reckless else None)


def make_worker(manager: WorkloadManager) -> SimulatedWorker:
    config = manager.config
    return SimulatedWorker(config.num_blocks, config.block_size, config.max_num_batched_tokens)


def make_sequence(sequence_id: int, prompt_length: int = 5, max_tokens: int = 8, **sampling: object) -> Sequence:
    prompt = [random.Random(sequence_id).randrange(1000) for _ in range(prompt_length)]
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Sequence(sequence_id, prompt, params, has_length_bound=False)  # admitted optimistically


def reference(sequence: Sequence) -> list[int]:
    return NaiveReference(EOS).output(sequence.token_ids[: sequence.prompt_length], sequence.sampling)


def run(manager: WorkloadManager, worker: SimulatedWorker, max_steps: int = 100_000) -> None:
    """Drive to the end, at the manager's own depth, checking every law after every step."""
    plans = []
    while manager.has_work:
        while (plan := manager.plan(0.0)) is not None:
            manager.check()
            plans.append(plan)
        assert plans, "there is work, nothing is in flight, and no step was planned"
        manager.commit(worker.execute(plans.pop(0)), 0.0)
        manager.check()
        assert worker.num_steps < max_steps, "no progress"


def assert_at_rest(manager: WorkloadManager) -> None:
    assert not manager.has_work
    assert manager.memory.pool.num_available == manager.config.num_blocks
    manager.check()


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
    sequences = [make_sequence(i, prompt_length=1 + 3 * i % 17, max_tokens=1 + 5 * i % 14) for i in range(24)]
    for sequence in sequences:
        manager.add(sequence)
    run(manager, make_worker(manager))
    for sequence in sequences:
        assert sequence.output_token_ids == reference(sequence)
        assert sequence.status is Status.FINISHED
    assert_at_rest(manager)
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
            sequence = make_sequence(len(sequences), prompt_length, max_tokens, ignore_eos=rng.random() < 0.3)
            if sequences and rng.random() < 0.5:  # some begin as an earlier one did, output included
                shared = rng.choice(sequences).token_ids[: rng.randint(0, prompt_length)]
                sequence.token_ids[: len(shared)] = shared
            sequences.append(sequence)
            manager.add(sequence)
        if sequences and rng.random() < 0.05:
            victim = rng.choice(sequences)
            if manager.finish(victim, FinishReason.ABORT):
                aborted.add(victim.sequence_id)
            assert not manager.finish(victim, FinishReason.ABORT), "the second release must be a no-op"
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
    assert_at_rest(manager)


def test_prefill_and_decode_share_a_step_under_one_budget() -> None:
    manager = make_manager(max_num_batched_tokens=10)
    manager.add(make_sequence(0, prompt_length=4, ignore_eos=True))
    worker = make_worker(manager)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    manager.add(make_sequence(1, prompt_length=30))
    plan = manager.plan(0.0)
    assert [row.num_tokens for row in plan.rows] == [1, 9]
    assert [row.samples for row in plan.rows] == [True, False]


def test_chunked_prefill_sends_each_prompt_token_once() -> None:
    manager = make_manager(max_num_batched_tokens=7)
    sequence = make_sequence(0, prompt_length=30, max_tokens=1)
    manager.add(sequence)
    worker, sent = make_worker(manager), []
    while manager.has_work:
        plan = manager.plan(0.0)
        sent += [token_id for row in plan.rows for token_id in row.token_ids]
        manager.commit(worker.execute(plan), 0.0)
    assert sent == sequence.token_ids[:30]
    assert worker.num_steps == 5


def test_oldest_running_sequence_is_never_preempted() -> None:
    manager = make_manager(num_blocks=8, max_num_batched_tokens=64)
    sequences = [make_sequence(i, prompt_length=4, max_tokens=24, ignore_eos=True) for i in range(6)]
    for sequence in sequences:
        manager.add(sequence)
    worker = make_worker(manager)
    while manager.has_work:
        oldest = next(s for s in sequences if s.status is not Status.FINISHED)
        before = oldest.num_preemptions
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
        assert oldest.num_preemptions == before
    assert manager.num_preemptions > 0 and sequences[0].num_preemptions == 0


def test_preempted_sequence_keeps_its_tokens_and_its_place() -> None:
    manager = make_manager(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=64)
    sequences = [make_sequence(i, prompt_length=6, max_tokens=20, ignore_eos=True) for i in range(3)]
    for sequence in sequences:
        manager.add(sequence)
    worker = make_worker(manager)
    while not manager.num_preemptions:
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    victim = next(s for s in sequences if s.num_preemptions)
    assert victim.num_output_tokens > 0 and not victim.block_table
    late = make_sequence(9, prompt_length=1, max_tokens=1)
    manager.add(late)
    run(manager, worker)
    assert victim.output_token_ids == reference(victim)
    assert late.status is Status.FINISHED


def test_a_newcomer_is_not_let_in_only_to_be_preempted() -> None:
    """Two blocks are free and the newcomer needs two, but the running sequence will want its next one."""
    manager = make_manager(num_blocks=4, block_size=4)
    manager.add(make_sequence(0, prompt_length=7, max_tokens=8, ignore_eos=True))
    worker = make_worker(manager)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    manager.add(make_sequence(1, prompt_length=7, max_tokens=2, ignore_eos=True))
    run(manager, worker)
    assert manager.num_preemptions == 0


def test_aborted_blocks_are_fenced_until_the_step_in_flight_is_done() -> None:
    manager = make_manager()
    sequence = make_sequence(0)
    manager.add(sequence)
    plan = manager.plan(0.0)
    manager.finish(sequence, FinishReason.ABORT)
    assert manager.memory.pool.num_fenced == 2 and manager.memory.pool.num_available == 62
    assert manager.commit(make_worker(manager).execute(plan), 0.0) == []
    assert_at_rest(manager)


def test_what_can_never_fit_is_refused_when_it_arrives() -> None:
    manager = make_manager(num_blocks=8, block_size=4)
    with pytest.raises(ContextTooLong, match="maximum context length is 33 tokens"):
        manager.add(make_sequence(0, prompt_length=30, max_tokens=4))
    fits = make_sequence(1, prompt_length=30, max_tokens=3, ignore_eos=True)
    manager.add(fits)
    run(manager, make_worker(manager))
    assert fits.num_output_tokens == 3


def test_stop_reasons_are_told_apart() -> None:
    manager = make_manager()
    plain = make_sequence(0, max_tokens=250)
    capped = make_sequence(1, max_tokens=2, ignore_eos=True)
    third_token = reference(make_sequence(2, max_tokens=3, ignore_eos=True))[2]
    stopped = make_sequence(2, max_tokens=30, ignore_eos=True, stop_token_ids=(third_token,))
    for sequence in (plain, capped, stopped):
        manager.add(sequence)
    run(manager, make_worker(manager))
    assert plain.finish_reason is FinishReason.STOP and plain.stop_token_id is None
    assert capped.finish_reason is FinishReason.LENGTH and capped.num_output_tokens == 2
    assert stopped.finish_reason is FinishReason.STOP and stopped.stop_token_id == third_token


def test_leaders_share_prompt_blocks_with_their_forks_even_without_a_prefix_cache() -> None:
    """Ten tokens in blocks of four: forks share two blocks, copy the third, and compute one token."""
    manager = make_manager(enable_prefix_caching=False)
    worker = make_worker(manager)
    leader = make_sequence(0, prompt_length=10, ignore_eos=True)
    prompt = leader.token_ids.copy()
    forks = [Sequence(i, prompt, leader.sampling, leader=leader) for i in range(1, 4)]
    for sequence in (leader, *forks):
        manager.add(sequence)
    assert (manager.num_running, manager.num_waiting) == (0, 4)
    first = manager.plan(0.0)
    assert [row.num_tokens for row in first.rows] == [10], "forks wait for what they will share"
    manager.commit(worker.execute(first), 0.0)
    second = manager.plan(0.0)
    assert [row.num_tokens for row in second.rows] == [1, 1, 1, 1] and len(second.copies) == 3
    assert manager.memory.pool.num_leased == 3 + 3
    manager.commit(worker.execute(second), 0.0)
    assert {sequence.block_table[0] for sequence in forks} == {leader.block_table[0]}
    run(manager, worker)
    for sequence in (leader, *forks):
        assert sequence.output_token_ids == reference(sequence)


def test_forks_are_not_left_behind_when_their_leader_leaves_early() -> None:
    manager = make_manager(max_num_batched_tokens=4)
    worker = make_worker(manager)
    leader = make_sequence(0, prompt_length=10)
    forks = [Sequence(i, leader.token_ids, leader.sampling, leader=leader) for i in (1, 2)]
    for sequence in (leader, *forks):
        manager.add(sequence)
    plan = manager.plan(0.0)
    manager.finish(forks[1], FinishReason.ABORT)
    manager.finish(leader, FinishReason.ABORT)
    manager.commit(worker.execute(plan), 0.0)
    late = Sequence(3, forks[0].token_ids, leader.sampling, leader=leader)
    manager.add(late)
    run(manager, worker)
    assert forks[0].output_token_ids == late.output_token_ids == reference(late)
    assert not forks[1].output_token_ids
    assert_at_rest(manager)


def test_a_deadline_ends_what_waits_what_prefills_and_what_runs() -> None:
    manager = make_manager(max_num_batched_tokens=8, max_num_seqs=2)
    worker = make_worker(manager)
    prompt = [5] * 6
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    running = Sequence(0, prompt, sampling, ttft_deadline_s=1.0, deadline_s=3.0)
    prefilling = Sequence(1, [6] * 30, sampling, ttft_deadline_s=2.0)
    waiting = Sequence(2, prompt, sampling, deadline_s=2.5)
    patient = Sequence(3, prompt, SamplingParams(max_tokens=4, ignore_eos=True), ttft_deadline_s=1e9)
    for sequence in (running, prefilling, waiting, patient):
        manager.add(sequence)
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


def test_deadlines_do_not_pile_up_behind_those_who_were_in_time() -> None:
    """A day for every request, and a thousand of them; what is kept is what is alive."""
    manager = make_manager()
    worker = make_worker(manager)
    for i in range(1000):
        sequence = Sequence(i, [i], SamplingParams(max_tokens=1), deadline_s=86400.0, ttft_deadline_s=86399.0)
        manager.add(sequence)
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    assert len(manager._deadlines) < 10


def test_after_a_restart_everyone_goes_on_where_they_were() -> None:
    """The worker dies with two steps in flight; what it says after its death counts for nothing."""
    manager = make_manager(max_steps_in_flight=2)
    worker = make_worker(manager)
    sequences = [make_sequence(i, prompt_length=9, max_tokens=12, ignore_eos=True) for i in range(4)]
    for sequence in sequences:
        manager.add(sequence)
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
    assert_at_rest(manager)


def test_results_out_of_order_are_applied_in_order() -> None:
    manager = make_manager(max_steps_in_flight=3)
    worker = make_worker(manager)
    sequence = make_sequence(0, max_tokens=6, ignore_eos=True)
    manager.add(sequence)
    first, second, third = (worker.execute(manager.plan(0.0)) for _ in range(3))
    assert manager.commit(third, 0.0) == manager.commit(second, 0.0) == []
    assert len(manager.commit(first, 0.0)) == 3
    run(manager, worker)
    assert sequence.output_token_ids == reference(sequence)


@pytest.mark.parametrize("max_preemptions", [0, 1, 3])
def test_nobody_is_preempted_more_often_than_agreed(max_preemptions: int) -> None:
    """Once it is, a sequence comes back with all the blocks it can ever need, and nobody may take them."""
    manager = make_manager(num_blocks=8, max_num_batched_tokens=64, max_preemptions=max_preemptions)
    sequences = [make_sequence(i, prompt_length=3, max_tokens=28, ignore_eos=True) for i in range(12)]
    for sequence in sequences:
        manager.add(sequence)
    run(manager, make_worker(manager))
    assert all(sequence.output_token_ids == reference(sequence) for sequence in sequences)
    assert max(sequence.num_preemptions for sequence in sequences) <= max_preemptions
    assert (manager.num_preemptions > 0) == (max_preemptions > 0)


def test_where_lengths_are_bounded_nobody_is_let_in_who_would_be_preempted() -> None:
    manager = make_manager(num_blocks=16, max_num_batched_tokens=64)
    sequences = [make_sequence(i, prompt_length=3, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(12)]
    for sequence in sequences:
        sequence.has_length_bound = True
        manager.add(sequence)
    manager.plan(0.0)
    assert manager.num_running > 4, "the sum of all that they may need is far above the peak"
    manager.restart()
    run(manager, make_worker(manager))
    assert manager.num_preemptions == 0


def test_a_short_prompt_overtakes_a_long_one_that_is_under_way() -> None:
    manager = make_manager(max_num_batched_tokens=8, scheduling_policy="shortest")
    worker = make_worker(manager)
    long, short = make_sequence(0, prompt_length=80), make_sequence(1, prompt_length=5)
    manager.add(long)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    manager.add(short)
    plan = manager.plan(0.0)
    assert [row.num_tokens for row in plan.rows] == [5, 3], (
        "three quarters for the short, at least a quarter for the long"
    )
    assert len(manager.commit(worker.execute(plan), 0.0)) == 1
    run(manager, worker)
    assert long.output_token_ids == reference(long) and short.output_token_ids == reference(short)


def test_the_urgent_do_not_wait_for_a_prompt_that_is_under_way() -> None:
    manager = make_manager(max_num_batched_tokens=8, scheduling_policy="priority")
    worker = make_worker(manager)
    long, urgent, calm = make_sequence(0, prompt_length=80), make_sequence(1), make_sequence(2)
    manager.add(long)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    urgent.priority, calm.priority = -1, 1
    manager.add(calm)
    manager.add(urgent)
    plan = manager.plan(0.0)
    assert [row.num_tokens for row in plan.rows] == [5, 3], "the urgent prompt, and three tokens of the long one"
    assert manager.commit(worker.execute(plan), 0.0)[0].sequence is urgent
    run(manager, worker)
    assert calm.output_token_ids == reference(calm)


def test_the_forecast_learns_from_answers_that_a_stop_string_ended() -> None:
    """Stop strings are found in the text, outside the manager."""
    manager = make_manager()
    worker = make_worker(manager)
    for i in range(200):
        sequence = make_sequence(i, max_tokens=60, ignore_eos=True)
        manager.add(sequence)
        for _ in range(30):
            manager.commit(worker.execute(manager.plan(0.0)), 0.0)
        manager.finish(sequence, FinishReason.STOP)
    assert manager.forecast.tokens_to_come(make_sequence(999, max_tokens=100)) == 30


def test_prefill_is_cut_to_the_inter_token_target() -> None:
    """Steps of 1 ms and 0.1 ms a token: beside a stream and a target of 4 ms, some 29 tokens of prompt."""
    manager = make_manager(max_num_batched_tokens=64, itl_target_s=4e-3, num_blocks=200)
    worker, now = make_worker(manager), 0.0
    manager.add(make_sequence(0, prompt_length=30, max_tokens=400, ignore_eos=True))
    chunks = []
    for i in range(60):
        if i % 10 == 5:
            manager.add(make_sequence(i, prompt_length=100, max_tokens=1))
        plan = manager.plan(now)
        now += 1e-3 + 1e-4 * plan.num_tokens
        manager.commit(worker.execute(plan), now)
        chunks.append(plan.num_tokens)
    assert chunks[0] == LEAST_PREFILL, "knowing nothing, little"
    assert 25 <= max(chunks[20:]) <= 30


def test_a_fifth_of_the_prefill_stays_with_the_long_prompt() -> None:
    """However many short ones come: of 20 tokens, SHORT_SHARE is theirs at most while the long one is under way."""
    manager = make_manager(max_num_batched_tokens=20, scheduling_policy="shortest", num_blocks=200)
    worker = make_worker(manager)
    long = make_sequence(0, prompt_length=200, max_tokens=1)
    manager.add(long)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    for i in range(1, 30):
        manager.add(make_sequence(i, prompt_length=8, max_tokens=1))
    for _ in range(5):
        before = long.num_computed
        plan = manager.plan(0.0)
        assert plan.num_tokens == 20 and long.num_computed - before == 20 - int(20 * SHORT_SHARE) == 4
        manager.commit(worker.execute(plan), 0.0)


def test_a_second_long_prompt_does_not_take_the_share_of_the_short() -> None:
    manager = make_manager(max_num_batched_tokens=20, scheduling_policy="shortest", num_blocks=200)
    worker = make_worker(manager)
    longs = [make_sequence(0, prompt_length=200), make_sequence(1, prompt_length=190)]
    for sequence in longs:
        manager.add(sequence)
    for _ in range(2):
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    short = make_sequence(2, prompt_length=8, max_tokens=1)
    manager.add(short)
    assert [token.sequence for token in manager.commit(worker.execute(manager.plan(0.0)), 0.0)] == [short]


def test_a_long_conversation_that_is_cached_is_a_short_prompt() -> None:
    manager = make_manager(max_num_batched_tokens=20, scheduling_policy="shortest", num_blocks=200)
    worker = make_worker(manager)
    talk = make_sequence(0, prompt_length=100, max_tokens=1)
    manager.add(talk)
    run(manager, worker)
    manager.add(make_sequence(1, prompt_length=200))
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    turn = Sequence(2, [*talk.token_ids, 5, 6, 7], SamplingParams(max_tokens=1))
    manager.add(turn)
    assert turn.num_missing == 4
    assert [token.sequence for token in manager.commit(worker.execute(manager.plan(0.0)), 0.0)] == [turn]


def test_nobody_is_seated_in_a_step_in_which_somebody_ran_short() -> None:
    """Two sequences fill the pool; one ends while the step that fences its blocks is in flight; a third waits."""
    manager = make_manager(is_reckless=True, num_blocks=4, max_steps_in_flight=2, max_num_batched_tokens=64)
    worker = make_worker(manager)
    first, second, third = (make_sequence(i, 6, max_tokens=9, ignore_eos=True) for i in range(3))
    manager.add(first)
    manager.add(second)
    plans = [manager.plan(0.0), manager.plan(0.0)]
    manager.commit(worker.execute(plans.pop(0)), 0.0)
    plans.append(manager.plan(0.0))  # both have filled two blocks of four
    manager.commit(worker.execute(plans.pop(0)), 0.0)
    manager.finish(second, FinishReason.ABORT)
    manager.add(third)
    plan = manager.plan(0.0)
    assert plan is None, "the first needs a block, and those of the second are fenced"
    manager.commit(worker.execute(plans.pop(0)), 0.0)
    assert len(manager.plan(0.0).rows) == 1, "the first grows; the third would take what it will need next"
    assert third.status is Status.WAITING


def test_the_last_ranked_is_the_one_who_is_preempted() -> None:
    manager = make_manager(is_reckless=True, num_blocks=9, max_num_batched_tokens=64)
    worker = make_worker(manager)
    sequences = [make_sequence(i, prompt_length=7, max_tokens=9, ignore_eos=True) for i in range(3)]
    for sequence in sequences:
        manager.add(sequence)
    while not manager.num_preemptions:
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    assert [sequence.num_preemptions for sequence in sequences] == [0, 0, 1]


def test_shared_blocks_whose_first_owner_is_gone_still_count() -> None:
    """A prefix of two blocks is held by a follower; its owner has ended. A newcomer must not be promised its room."""
    manager = make_manager(num_blocks=7, max_num_batched_tokens=64)
    worker = make_worker(manager)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    owner = Sequence(0, prompt, SamplingParams(max_tokens=1))
    follower = Sequence(1, prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    manager.add(owner)
    manager.add(follower)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    assert owner.status is Status.FINISHED and follower.num_found_blocks == 2
    # Four blocks at most for the follower, so three are left; this one would come to need four.
    manager.add(Sequence(2, [50] * 5, SamplingParams(max_tokens=9, ignore_eos=True)))
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    assert manager.num_running == 1
    run(manager, worker)
    assert manager.num_preemptions == 0
