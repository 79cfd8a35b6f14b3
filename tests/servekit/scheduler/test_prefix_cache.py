"""Claims about prefixes that are computed once: found, shared, isolated, and evicted in the right order."""

from __future__ import annotations

from array import array

from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.prefix_cache import PrefixCache, chain_hash, continue_chain, salt_hash
from servekit.scheduler.sequence import FinishReason
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.worker import NaiveReference, SimulatedWorker
from tests.support.scheduler import add_prompt, assert_idle, make_manager, make_worker, run

PROMPT = [7 * i % 90 + 100 for i in range(18)]  # four full blocks of four tokens, and two tokens more


def ask(
    manager: WorkloadManager, worker: SimulatedWorker, prompt: list[int], tenant: str = "", max_tokens: int = 3
) -> int:
    """Run one prompt to its end; return how many tokens were computed for it."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    sequence = add_prompt(manager, _next_id(manager), prompt, sampling, tenant=tenant)
    num_computed = 0
    while manager.has_work:
        plan = manager.plan(0.0)
        assert plan is not None
        num_computed += plan.num_tokens
        manager.commit(worker.execute(plan), 0.0)
        manager.check()
    assert sequence.output_token_ids == naive_generate(prompt, max_tokens, frozenset())
    return num_computed


def naive_generate(prompt: list[int], max_tokens: int, eos: frozenset[int]) -> list[int]:
    return NaiveReference(eos).output(prompt, SamplingParams(max_tokens=max_tokens))


def _next_id(manager: WorkloadManager) -> int:
    manager.next_test_id = getattr(manager, "next_test_id", -1) + 1  # type: ignore[attr-defined]
    return manager.next_test_id  # type: ignore[attr-defined,no-any-return]


def test_a_second_turn_computes_only_what_is_new() -> None:
    manager = make_manager()
    worker = make_worker(manager)
    assert ask(manager, worker, PROMPT) == 18 + 2
    answer = naive_generate(PROMPT, 3, frozenset())
    second = [*PROMPT, *answer, 50, 51, 52]
    assert ask(manager, worker, second) == len(second) - 20 + 2, "five blocks were known: 18 + 2 computed answers"
    assert manager.num_cached_tokens == 20
    assert manager.num_prompt_tokens == 18 + 24


def test_the_last_token_is_always_computed() -> None:
    manager = make_manager()
    worker = make_worker(manager)
    ask(manager, worker, PROMPT[:16], max_tokens=1)
    assert ask(manager, worker, PROMPT[:16], max_tokens=1) == 4, "three blocks are found, not the one that samples"


def test_prefixes_are_found_while_their_first_owner_is_still_prefilled() -> None:
    manager = make_manager(max_num_batched_tokens=64)
    worker = make_worker(manager)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    first, second = (add_prompt(manager, i, PROMPT, sampling) for i in range(2))
    plan = manager.plan(0.0)
    assert plan is not None
    assert [chunk.num_tokens for chunk in plan.chunks] == [18, 2], "even in the same step"
    assert plan.chunks[0].new_block_ids[:4] == plan.chunks[1].new_block_ids[:4]
    manager.commit(worker.execute(plan), 0.0)
    run(manager, worker)
    assert first.output_token_ids == second.output_token_ids == naive_generate(PROMPT, 4, frozenset())


def test_hashes_of_a_command_are_those_that_the_manager_computes() -> None:
    """The manager finds the same blocks, whether a command has all of a prompt's hashes, some, or none."""
    computed = []
    for num_given in (0, 2, 4):
        manager = make_manager()
        worker = make_worker(manager)
        ask(manager, worker, PROMPT, "org", max_tokens=1)
        given: list[bytes] = []
        continue_chain(given, "org", array("i", PROMPT), num_given, manager.config.block_size)
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        sequence = add_prompt(manager, 9, PROMPT, sampling, tenant="org", block_hashes=given)
        run(manager, worker)
        assert sequence.num_cached_tokens == 16
        computed.append(sequence.kv.hashes)
    assert computed[0] == computed[1] == computed[2] and len(computed[0]) == 6
    assert len(given) == 4, "the sequence goes on with a copy"


def test_prefixes_are_shared_within_a_tenant_and_never_between_tenants() -> None:
    manager = make_manager()
    worker = make_worker(manager)
    assert ask(manager, worker, PROMPT, tenant="org_1", max_tokens=1) == 18
    assert ask(manager, worker, PROMPT, tenant="org_12", max_tokens=1) == 18
    assert ask(manager, worker, PROMPT, tenant="org_1", max_tokens=1) == 2
    assert salt_hash("org_1") != salt_hash("org_12") != chain_hash(salt_hash("org_1"), memoryview(b""))


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(enable_prefix_caching=False)
    worker = make_worker(manager)
    assert ask(manager, worker, PROMPT, max_tokens=1) == ask(manager, worker, PROMPT, max_tokens=1) == 18
    assert manager.kv_cache.pool.num_cached == 0


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    manager = make_manager(num_blocks=6)
    worker = make_worker(manager)
    ask(manager, worker, PROMPT[:17], max_tokens=1)
    assert manager.kv_cache.pool.num_cached == 4
    ask(manager, worker, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], max_tokens=1)  # takes both free blocks and the tail
    assert ask(manager, worker, PROMPT[:17], max_tokens=1) == 17 - 12, "three of four blocks survived"


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    manager = make_manager(num_blocks=8, max_num_batched_tokens=64)
    worker = make_worker(manager)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    sequences = [add_prompt(manager, i, [i + 1] * 9, sampling, tenant=str(i), has_length_bound=False) for i in range(3)]
    run(manager, worker)
    assert manager.num_preemptions > 0
    for sequence in sequences:
        assert sequence.output_token_ids == naive_generate([sequence.sequence_id + 1] * 9, 16, frozenset())
    assert_idle(manager)


def test_dispatched_blocks_of_an_aborted_prompt_are_found() -> None:
    manager = make_manager(max_num_batched_tokens=8)
    worker = make_worker(manager)
    sequence = add_prompt(manager, 0, PROMPT, SamplingParams(max_tokens=4))
    plan = manager.plan(0.0)
    manager.finish(sequence.sequence_id, FinishReason.ABORT)
    manager.commit(worker.execute(plan), 0.0)
    manager.next_test_id = 0  # type: ignore[attr-defined]
    assert ask(manager, worker, PROMPT, max_tokens=1) == 18 - 8


def test_duplicate_blocks_are_published_once() -> None:
    prefixes = PrefixCache(4)
    first, second = prefixes.pool.lease(2)
    block_hash = chain_hash(salt_hash(""), memoryview(b"ab"))
    prefixes.publish(first, block_hash)
    prefixes.publish(second, block_hash)
    prefixes.check()
    assert prefixes.find([block_hash]) == [first]
    prefixes.pool.release([first, second])
    assert (prefixes.pool.num_cached, prefixes.pool.num_free) == (1, 3)
