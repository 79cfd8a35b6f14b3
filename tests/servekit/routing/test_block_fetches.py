"""Claims about blocks that are on the way: how many there may be, and that a failure delays the next try."""

from __future__ import annotations

from servekit.routing.block_fetches import FETCH_TIMEOUT_S, MAX_FETCHES, MAX_PAUSE_S, MIN_PAUSE_S, BlockFetches, Fetch

KEYS = tuple(bytes([number]) * 16 for number in range(3))


def begin(fetches: BlockFetches, sequence_id: int = 7, target_id: int = 1, now_s: float = 0.0) -> Fetch:
    return fetches.begin(sequence_id, 0, target_id, KEYS, 5, now_s)


def test_a_fetch_is_on_the_way_until_its_answer() -> None:
    fetches = BlockFetches()
    fetch = begin(fetches)
    assert 7 in fetches and 8 not in fetches and fetches.to(1) == [fetch] and fetches.to(2) == []
    assert fetches.end(fetch.number, 1, KEYS, 1.0) == fetch
    assert 7 not in fetches and fetches.to(1) == [] and fetches.num_failed == 0
    assert fetches.may_begin(0, 1, 1.0)


def test_an_answer_that_belongs_to_no_fetch_changes_nothing() -> None:
    fetches = BlockFetches()
    fetch = begin(fetches)
    assert fetches.end(fetch.number + 1, 1, KEYS, 0.0) is None
    assert fetches.end(fetch.number, 2, KEYS, 0.0) is None, "of another replica"
    assert fetches.end(fetch.number, 1, KEYS[1:], 0.0) is None, "the first block is missing"
    assert fetches.end(fetch.number, 1, (*KEYS, KEYS[0]), 0.0) is None, "more than was asked for"
    assert 7 in fetches and fetches.num_failed == 0


def test_a_replica_fetches_for_a_few_sequences_at_a_time() -> None:
    fetches = BlockFetches()
    found = [begin(fetches, sequence_id) for sequence_id in range(MAX_FETCHES)]
    assert not fetches.may_begin(0, 1, 0.0) and fetches.may_begin(0, 2, 0.0)
    fetches.end(found[0].number, 1, KEYS, 0.0)
    assert fetches.may_begin(0, 1, 0.0)


def test_after_failures_the_next_fetch_between_these_replicas_waits_longer_and_longer_up_to_a_limit() -> None:
    fetches, now_s, pauses_s = BlockFetches(), 0.0, []
    for _ in range(8):
        fetches.end(begin(fetches, now_s=now_s).number, 1, KEYS[:2], now_s)
        assert fetches.may_begin(0, 2, now_s) and fetches.may_begin(3, 1, now_s), "between others"
        began_s = now_s
        while not fetches.may_begin(0, 1, now_s):
            now_s += 0.5
        pauses_s.append(now_s - began_s)
    assert pauses_s[:3] == [MIN_PAUSE_S, 2 * MIN_PAUSE_S, 4 * MIN_PAUSE_S] and pauses_s[-1] == MAX_PAUSE_S
    assert fetches.num_failed == 8
    fetches.end(begin(fetches, now_s=now_s).number, 1, KEYS, now_s)
    fetches.end(begin(fetches, now_s=now_s).number, 1, (), now_s)
    assert not fetches.may_begin(0, 1, now_s) and fetches.may_begin(0, 1, now_s + MIN_PAUSE_S), "as after the first one"


def test_fetches_that_fail_together_are_one_failure_for_the_pause() -> None:
    fetches = BlockFetches()
    for fetch in [begin(fetches, sequence_id) for sequence_id in range(MAX_FETCHES)]:
        fetches.end(fetch.number, 1, (), 0.0)
    assert fetches.num_failed == MAX_FETCHES and fetches.may_begin(0, 1, MIN_PAUSE_S)


def test_a_fetch_without_an_answer_is_given_up_and_its_answer_comes_too_late() -> None:
    fetches = BlockFetches()
    first, second = begin(fetches, 7), begin(fetches, 8, now_s=1.0)
    assert list(fetches.expire(FETCH_TIMEOUT_S - 0.1)) == []
    assert list(fetches.expire(FETCH_TIMEOUT_S)) == [first]
    assert fetches.to(1) == [second] and fetches.num_failed == 1
    assert fetches.end(first.number, 1, KEYS, FETCH_TIMEOUT_S) is None
    assert not fetches.may_begin(0, 1, FETCH_TIMEOUT_S)


def test_the_next_worker_of_a_replica_is_asked_anew() -> None:
    fetches = BlockFetches()
    begin(fetches, 7)
    other = begin(fetches, 8, target_id=2)
    fetches.forget_target(1)
    assert 7 not in fetches and fetches.to(2) == [other]
    assert fetches.may_begin(0, 1, 0.0) and fetches.num_failed == 0
