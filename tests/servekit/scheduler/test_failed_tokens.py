"""Claims about invalid tokens: if a worker could not choose one, only the token's sequence ends."""

from __future__ import annotations

from msgspec.structs import replace

from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.sequence import FinishReason
from tests.support.scheduler import add_sequence, assert_idle, make_manager, make_worker, reference, run


def test_an_invalid_token_ends_only_its_own_sequence() -> None:
    manager = make_manager(max_steps_in_flight=2)
    worker = make_worker(manager)
    lost, gone, other = (add_sequence(manager, number, max_tokens=20) for number in range(3))
    first, second = manager.plan(0.0), manager.plan(0.0)
    assert first is not None and second is not None
    result = worker.execute(first)
    manager.finish(gone.sequence_id, FinishReason.ABORT)  # its client disconnected: no sequence is left to fail
    tokens = manager.commit(replace(result, failures=((0, "too complex"), (1, "too complex"))), 0.0)
    manager.check()
    outcomes = {token.sequence: (token.finish_reason, token.failure) for token in tokens}
    assert outcomes == {lost: (FinishReason.ERROR, "too complex"), other: (None, None)}
    assert lost.output_token_ids == [], "an invalid token is not part of the answer"
    manager.commit(worker.execute(second), 0.0)
    run(manager, worker)
    assert other.output_token_ids == reference(other)
    assert_idle(manager)


def test_sampling_params_know_bans_and_ends() -> None:
    """The properties by which the worker chooses its fast paths."""
    plain = SamplingParams(max_tokens=9)
    assert not plain.bans_tokens and plain.ends_at_eos
    for banning in ({"allowed_token_ids": (1,)}, {"bad_words": ((1,),)}, {"min_tokens": 1}):
        assert replace(plain, **banning).bans_tokens
    assert not replace(plain, ignore_eos=True).ends_at_eos
    assert replace(plain, ignore_eos=True, grammar="g").ends_at_eos, "nothing may follow a grammar's end"
