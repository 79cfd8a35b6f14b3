"""Claims about the schedule, each against the naive one-prompt-at-a-time reference of `paged_oracle`."""

import random
from typing import Any

import pytest

from servekit.errors import ContextTooLong
from servekit.messages import StepResult
from servekit.sampling_params import SamplingParams
from servekit.sequence import FinishReason, Sequence, Status
from servekit.workload_manager import SchedulerConfig, WorkloadManager
from tests.paged_oracle import PagedOracle, naive_generate

EOS = frozenset(range(20))  # 2 % of the oracle's vocabulary: answers end by themselves after about 50 tokens


def make_manager(**changes: Any) -> WorkloadManager:
    limits = {"num_blocks": 64, "block_size": 4, "max_model_len": 1000, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    return WorkloadManager(SchedulerConfig(eos_token_ids=EOS, **{**limits, **changes}))


def make_oracle(manager: WorkloadManager) -> PagedOracle:
    config = manager.config
    return PagedOracle(config.num_blocks, config.block_size, config.max_num_batched_tokens)


def make_sequence(sequence_id: int, prompt_length: int = 5, max_tokens: int = 8, **sampling: object) -> Sequence:
    prompt = [random.Random(sequence_id).randrange(1000) for _ in range(prompt_length)]
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Sequence(sequence_id, prompt, params, has_length_bound=False)  # admitted optimistically


def reference(sequence: Sequence) -> list[int]:
    eos = frozenset() if sequence.sampling.ignore_eos else EOS
    prompt = sequence.token_ids[: sequence.prompt_length]
    return naive_generate(prompt, sequence.sampling.max_tokens, eos | set(sequence.sampling.stop_token_ids))


def run(manager: WorkloadManager, oracle: PagedOracle, max_steps: int = 100_000) -> None:
    """Drive to the end, at the manager's own depth, checking every law after every step."""
    plans = []
    while manager.has_work:
        while (plan := manager.plan(0.0)) is not None:
            manager.check()
            plans.append(plan)
        assert plans, "there is work, nothing is in flight, and no step was planned"
        manager.commit(oracle.execute(plans.pop(0)), 0.0)
        manager.check()
        assert oracle.num_steps < max_steps, "no progress"


def assert_at_rest(manager: WorkloadManager) -> None:
    assert not manager.has_work
    assert manager.memory.pool.num_available == manager.config.num_blocks
    manager.check()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_every_schedule_gives_the_naive_tokens(budget: int, num_blocks: int, max_steps_in_flight: int) -> None:
    manager = make_manager(
        max_num_batched_tokens=budget, num_blocks=num_blocks, max_steps_in_flight=max_steps_in_flight
    )
    sequences = [make_sequence(i, prompt_length=1 + 3 * i % 17, max_tokens=1 + 5 * i % 14) for i in range(24)]
    for sequence in sequences:
        manager.add(sequence)
    run(manager, make_oracle(manager))
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
    oracle = make_oracle(manager)
    sequences: list[Sequence] = []
    aborted: set[int] = set()
    plans = []
    while len(sequences) < 40 or manager.has_work:
        assert oracle.num_steps < 20_000, "no progress"
        if len(sequences) < 40 and rng.random() < 0.3:
            prompt_length = rng.randint(1, max(1, manager.max_total_tokens - 1) // 2 + 1)
            max_tokens = rng.randint(1, min(40, manager.max_total_tokens - prompt_length))
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
            result = oracle.execute(plans.pop(0))
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
    oracle = make_oracle(manager)
    manager.commit(oracle.execute(manager.plan(0.0)), 0.0)
    manager.add(make_sequence(1, prompt_length=30))
    plan = manager.plan(0.0)
    assert [row.num_tokens for row in plan.rows] == [1, 9]
    assert [row.samples for row in plan.rows] == [True, False]


def test_chunked_prefill_sends_each_prompt_token_once() -> None:
    manager = make_manager(max_num_batched_tokens=7)
    sequence = make_sequence(0, prompt_length=30, max_tokens=1)
    manager.add(sequence)
    oracle, sent = make_oracle(manager), []
    while manager.has_work:
        plan = manager.plan(0.0)
        sent += [token_id for row in plan.rows for token_id in row.token_ids]
        manager.commit(oracle.execute(plan), 0.0)
    assert sent == sequence.token_ids[:30]
    assert oracle.num_steps == 5


def test_oldest_running_sequence_is_never_preempted() -> None:
    manager = make_manager(num_blocks=8, max_num_batched_tokens=64)
    sequences = [make_sequence(i, prompt_length=4, max_tokens=24, ignore_eos=True) for i in range(6)]
    for sequence in sequences:
        manager.add(sequence)
    oracle = make_oracle(manager)
    while manager.has_work:
        oldest = next(s for s in sequences if s.status is not Status.FINISHED)
        before = oldest.num_preemptions
        manager.commit(oracle.execute(manager.plan(0.0)), 0.0)
        assert oldest.num_preemptions == before
    assert manager.num_preemptions > 0 and sequences[0].num_preemptions == 0


def test_preempted_sequence_keeps_its_tokens_and_its_place() -> None:
    manager = make_manager(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=64)
    sequences = [make_sequence(i, prompt_length=6, max_tokens=20, ignore_eos=True) for i in range(3)]
    for sequence in sequences:
        manager.add(sequence)
    oracle = make_oracle(manager)
    while not manager.num_preemptions:
        manager.commit(oracle.execute(manager.plan(0.0)), 0.0)
    victim = next(s for s in sequences if s.num_preemptions)
    assert victim.num_output_tokens > 0 and not victim.block_table
    late = make_sequence(9, prompt_length=1, max_tokens=1)
    manager.add(late)
    run(manager, oracle)
    assert victim.output_token_ids == reference(victim)
    assert late.status is Status.FINISHED


def test_a_newcomer_is_not_let_in_only_to_be_preempted() -> None:
    """Two blocks are free and the newcomer needs two, but the running sequence will want its next one."""
    manager = make_manager(num_blocks=4, block_size=4)
    manager.add(make_sequence(0, prompt_length=7, max_tokens=8, ignore_eos=True))
    oracle = make_oracle(manager)
    manager.commit(oracle.execute(manager.plan(0.0)), 0.0)
    manager.add(make_sequence(1, prompt_length=7, max_tokens=2, ignore_eos=True))
    run(manager, oracle)
    assert manager.num_preemptions == 0


def test_aborted_blocks_are_fenced_until_the_step_in_flight_is_done() -> None:
    manager = make_manager()
    sequence = make_sequence(0)
    manager.add(sequence)
    plan = manager.plan(0.0)
    manager.finish(sequence, FinishReason.ABORT)
    assert manager.memory.pool.num_fenced == 2 and manager.memory.pool.num_available == 62
    assert manager.commit(make_oracle(manager).execute(plan), 0.0) == []
    assert_at_rest(manager)


def test_what_can_never_fit_is_refused_when_it_arrives() -> None:
    manager = make_manager(num_blocks=8, block_size=4)
    with pytest.raises(ContextTooLong, match="maximum context length is 33 tokens"):
        manager.add(make_sequence(0, prompt_length=30, max_tokens=4))
    fits = make_sequence(1, prompt_length=30, max_tokens=3, ignore_eos=True)
    manager.add(fits)
    run(manager, make_oracle(manager))
    assert fits.num_output_tokens == 3


def test_stop_reasons_are_told_apart() -> None:
    manager = make_manager()
    plain = make_sequence(0, max_tokens=250)
    capped = make_sequence(1, max_tokens=2, ignore_eos=True)
    third_token = reference(make_sequence(2, max_tokens=3, ignore_eos=True))[2]
    stopped = make_sequence(2, max_tokens=30, ignore_eos=True, stop_token_ids=(third_token,))
    for sequence in (plain, capped, stopped):
        manager.add(sequence)
    run(manager, make_oracle(manager))
    assert plain.finish_reason is FinishReason.STOP and plain.stop_token_id is None
    assert capped.finish_reason is FinishReason.LENGTH and capped.num_output_tokens == 2
    assert stopped.finish_reason is FinishReason.STOP and stopped.stop_token_id == third_token
