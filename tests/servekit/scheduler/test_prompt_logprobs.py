"""Tests of logprobs of output tokens and prompt tokens, each against the naive reference."""

from __future__ import annotations

import pytest

from servekit.protocol.messages import PromptLogprobs
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.step import SequenceToken
from servekit.simulation.worker import NaiveReference
from tests.support.scheduler import add_prompt, add_sequence, make_manager, make_worker, run

PROMPT = [*range(20, 38)]  # 18 tokens: four blocks of four, and two tokens


ASKING = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=1)
PLAIN = SamplingParams(max_tokens=3, ignore_eos=True)


def test_tokens_have_logprobs_only_for_sequences_that_request_them() -> None:
    manager = make_manager()
    worker = make_worker(manager)
    sequences = [
        add_sequence(manager, i, max_tokens=4, ignore_eos=True, logprobs=n) for i, n in enumerate([None, 0, None, 2])
    ]
    tokens: list[SequenceToken] = []
    while (plan := manager.plan(0.0)) is not None:
        tokens += manager.commit(worker.execute(plan), 0.0)
    for sequence in sequences:
        logprobs = [token.logprobs for token in tokens if token.sequence is sequence]
        num_top = sequence.sampling.logprobs
        expected = [None] * 4 if num_top is None else NaiveReference.logprobs(sequence.token_ids, num_top)[4:]
        assert logprobs == expected and not sequence.prompt_logprobs


def test_a_sequence_with_prompt_logprobs_computes_its_prompt_and_others_reuse_its_kv() -> None:
    manager = make_manager()
    worker = make_worker(manager)
    sequences = []
    for sequence_id, sampling in enumerate((ASKING, ASKING, PLAIN)):
        sequences.append(add_prompt(manager, sequence_id, PROMPT, sampling))
        run(manager, worker)
    first, second, plain = sequences
    assert [sequence.num_cached_tokens for sequence in (first, second, plain)] == [0, 0, 16]
    assert first.prompt_logprobs == second.prompt_logprobs == NaiveReference.logprobs(PROMPT, 1)
    assert plain.prompt_logprobs == []
    assert first.output_token_ids == second.output_token_ids == plain.output_token_ids


def test_a_chunk_with_prompt_logprobs_includes_the_token_after_it() -> None:
    manager = make_manager(max_num_batched_tokens=7)
    worker = make_worker(manager)
    add_prompt(manager, 0, PROMPT, ASKING)
    sent = []
    for _ in range(3):
        plan = manager.plan(0.0)
        sent += [row.token_ids for row in plan.chunks]
        manager.commit(worker.execute(plan), 0.0)
    assert sent == [tuple(PROMPT[:8]), tuple(PROMPT[7:15]), tuple(PROMPT[14:])]


def test_after_a_restart_only_missing_prompt_logprobs_are_computed() -> None:
    """The worker dies when two of three chunks are done and one of them is committed."""
    manager = make_manager(max_num_batched_tokens=7, max_steps_in_flight=2)
    worker = make_worker(manager)
    sequence, expected = add_prompt(manager, 0, PROMPT, ASKING), NaiveReference.logprobs(PROMPT, 1)
    plans = [manager.plan(0.0), manager.plan(0.0)]
    manager.commit(worker.execute(plans[0]), 0.0)
    late = worker.execute(plans[1])
    manager.restart()
    assert manager.commit(late, 0.0) == [] and sequence.prompt_logprobs == expected[:7]
    worker = make_worker(manager)
    other = add_prompt(manager, 1, PROMPT, SamplingParams(max_tokens=1))
    run(manager, worker)
    assert sequence.prompt_logprobs == expected
    assert other.output_token_ids == sequence.output_token_ids[:1]


@pytest.mark.parametrize(("num_reported", "num_shareable"), [(0, 0), (5, 5), (16, 16), (17, 19)])
def test_only_positions_with_reported_prompt_logprobs_are_shareable(num_reported: int, num_shareable: int) -> None:
    sequence = Sequence(0, PROMPT, ASKING)
    sequence.token_ids.extend([1, 2])
    sequence.add_prompt_logprobs(PromptLogprobs(0, 1, tuple(NaiveReference.logprobs(PROMPT, 1)[:num_reported])))
    assert sequence.num_shareable == num_shareable
    plain = Sequence(1, sequence.token_ids, SamplingParams(max_tokens=1))
    assert plain.num_shareable == 19


def test_a_preempted_prompt_reuses_kv_up_to_its_reported_logprobs() -> None:
    """It reuses its own blocks, which it published before it was preempted."""
    manager = make_manager(max_num_batched_tokens=7)
    worker = make_worker(manager)
    first = add_sequence(manager, 0, ignore_eos=True, max_tokens=60)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    victim = add_prompt(manager, 1, PROMPT, ASKING)
    for _ in range(2):
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    num_reported = len(victim.prompt_logprobs)
    assert num_reported == 12, "one token of each step is the other's"
    manager._preempt(victim, manager._running[0], "kv_blocks")
    plan = manager.plan(0.0)
    assert [row.start for row in plan.chunks] == [first.num_computed - 1, 12]
    manager.commit(worker.execute(plan), 0.0)
    run(manager, worker)
    assert victim.prompt_logprobs == NaiveReference.logprobs(PROMPT, 1)


def test_a_gap_in_prompt_logprobs_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="would leave out 2 of its prompt's tokens"):
        Sequence(0, PROMPT, ASKING).add_prompt_logprobs(PromptLogprobs(0, 3, ()))
