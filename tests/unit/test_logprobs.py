"""Claims about what the manager hands on of the model's thoughts, each against the naive reference."""

from __future__ import annotations

import pytest

from servekit.messages import PromptLogprobs
from servekit.sampling_params import SamplingParams
from servekit.sequence import Sequence
from servekit.simulated_worker import NaiveReference
from servekit.step import SequenceToken
from tests.unit.test_workload_manager import make_manager, make_sequence, make_worker, run

PROMPT = [*range(20, 38)]  # 18 tokens: four blocks of four, and two tokens


def asking(sequence_id: int, **options: int) -> Sequence:
    return Sequence(sequence_id, PROMPT, SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=1, **options))


def test_tokens_come_with_the_logprobs_of_those_who_ask() -> None:
    manager = make_manager()
    worker = make_worker(manager)
    sequences = [make_sequence(i, max_tokens=4, ignore_eos=True, logprobs=n) for i, n in enumerate([None, 0, None, 2])]
    for sequence in sequences:
        manager.add(sequence)
    tokens: list[SequenceToken] = []
    while (plan := manager.plan(0.0)) is not None:
        tokens += manager.commit(worker.execute(plan), 0.0)
    for sequence in sequences:
        told = [token.logprobs for token in tokens if token.sequence is sequence]
        num_top = sequence.sampling.logprobs
        expected = [None] * 4 if num_top is None else NaiveReference.logprobs(sequence.token_ids, num_top)[4:]
        assert told == expected and not sequence.prompt_logprobs


def test_who_wants_its_prompt_explained_computes_it_and_lets_others_find_it() -> None:
    manager = make_manager()
    worker = make_worker(manager)
    first, second, plain = asking(0), asking(1), Sequence(2, PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    for sequence in (first, second, plain):
        manager.add(sequence)
        run(manager, worker)
    assert [sequence.num_cached_tokens for sequence in (first, second, plain)] == [0, 0, 16]
    assert first.prompt_logprobs == second.prompt_logprobs == NaiveReference.logprobs(PROMPT, 1)
    assert plain.prompt_logprobs == []
    assert first.output_token_ids == second.output_token_ids == plain.output_token_ids


def test_a_chunk_to_be_explained_brings_the_token_behind_it_along() -> None:
    manager = make_manager(max_num_batched_tokens=7)
    worker = make_worker(manager)
    manager.add(asking(0))
    sent = []
    for _ in range(3):
        plan = manager.plan(0.0)
        sent += [row.token_ids for row in plan.rows]
        manager.commit(worker.execute(plan), 0.0)
    assert sent == [tuple(PROMPT[:8]), tuple(PROMPT[7:15]), tuple(PROMPT[14:])]


def test_what_was_told_stands_and_only_the_rest_is_computed_for_its_logits() -> None:
    """The worker dies when two of three chunks are done and one of them is committed."""
    manager = make_manager(max_num_batched_tokens=7, max_steps_in_flight=2)
    worker = make_worker(manager)
    sequence, expected = asking(0), NaiveReference.logprobs(PROMPT, 1)
    manager.add(sequence)
    plans = [manager.plan(0.0), manager.plan(0.0)]
    manager.commit(worker.execute(plans[0]), 0.0)
    late = worker.execute(plans[1])
    manager.restart()
    assert manager.commit(late, 0.0) == [] and sequence.prompt_logprobs == expected[:7]
    worker = make_worker(manager)
    manager.add(other := Sequence(1, PROMPT, SamplingParams(max_tokens=1)))
    run(manager, worker)
    assert sequence.prompt_logprobs == expected
    assert other.output_token_ids == sequence.output_token_ids[:1]


@pytest.mark.parametrize(("num_told", "num_shareable"), [(0, 0), (5, 5), (16, 16), (17, 19)])
def test_only_what_was_told_may_be_somebody_elses(num_told: int, num_shareable: int) -> None:
    sequence = asking(0)
    sequence.token_ids += [1, 2]
    sequence.explain_prompt(PromptLogprobs(0, 1, tuple(NaiveReference.logprobs(PROMPT, 1)[:num_told])))
    assert sequence.num_shareable == num_shareable
    plain = Sequence(1, sequence.token_ids, SamplingParams(max_tokens=1))
    assert plain.num_shareable == 19


def test_a_prompt_half_told_finds_as_much_as_was_told() -> None:
    """Its own blocks, published before it lost its seat: what was told of will do."""
    manager = make_manager(max_num_batched_tokens=7)
    worker = make_worker(manager)
    first, victim = make_sequence(0, ignore_eos=True, max_tokens=60), asking(1)
    manager.add(first)
    manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    manager.add(victim)
    for _ in range(2):
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
    num_told = len(victim.prompt_logprobs)
    assert num_told == 12, "one token of each step is the other's"
    manager._preempt(victim)
    plan = manager.plan(0.0)
    assert [row.start for row in plan.rows] == [first.num_computed - 1, 12]
    manager.commit(worker.execute(plan), 0.0)
    run(manager, worker)
    assert victim.prompt_logprobs == NaiveReference.logprobs(PROMPT, 1)


def test_a_hole_in_what_is_told_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="would leave out 2 of its prompt's tokens"):
        asking(0).explain_prompt(PromptLogprobs(0, 3, ()))
