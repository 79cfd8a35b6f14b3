"""Claims about tokens that mean nothing: a worker that could not choose one says so, and only its sequence ends."""

from __future__ import annotations

from msgspec.structs import replace

from servekit.sampling_params import SamplingParams
from servekit.sequence import FinishReason
from tests.unit.test_workload_manager import assert_at_rest, make_manager, make_sequence, make_worker, reference, run


def test_a_sequence_whose_token_means_nothing_ends_alone() -> None:
    manager = make_manager(max_steps_in_flight=2)
    worker = make_worker(manager)
    lost, gone, other = (make_sequence(number, max_tokens=20) for number in range(3))
    for sequence in (lost, gone, other):
        manager.add(sequence)
    first, second = manager.plan(0.0), manager.plan(0.0)
    assert first is not None and second is not None
    result = worker.execute(first)
    manager.finish(gone, FinishReason.ABORT)  # its client left meanwhile: nothing is left to fail
    tokens = manager.commit(replace(result, failures=((0, "too complex"), (1, "too complex"))), 0.0)
    manager.check()
    told = {token.sequence: (token.finish_reason, token.failure) for token in tokens}
    assert told == {lost: (FinishReason.ERROR, "too complex"), other: (None, None)}
    assert lost.output_token_ids == [], "what it chose was no token of the answer"
    manager.commit(worker.execute(second), 0.0)
    run(manager, worker)
    assert other.output_token_ids == reference(other)
    assert_at_rest(manager)


def test_wishes_are_told_apart() -> None:
    """What the worker asks its rows before it looks any closer."""
    plain = SamplingParams(max_tokens=9)
    assert not plain.bans_tokens and plain.ends_at_eos
    for banning in ({"allowed_token_ids": (1,)}, {"bad_words": ((1,),)}, {"min_tokens": 1}):
        assert replace(plain, **banning).bans_tokens
    assert not replace(plain, ignore_eos=True).ends_at_eos
    assert replace(plain, ignore_eos=True, grammar="g").ends_at_eos, "nothing may come behind a grammar's end"
