"""Claims about single decisions of the dynamic batcher; its promises as a whole are in simulation/test_predictor.py."""

from __future__ import annotations

from math import inf

from servekit.dynamic_batching.dynamic_batcher import Batch, BatchLimits, DynamicBatcher
from servekit.dynamic_batching.item import NEVER, PIXELS_PER_TOKEN, Item, ItemStatus

LIMITS = BatchLimits(max_batch_size=4, max_batch_tokens=64, max_delay_s=0.01)


def make(*lengths: int, limits: BatchLimits = LIMITS, deadline_s: float = NEVER) -> tuple[DynamicBatcher, list[Item]]:
    batcher = DynamicBatcher(limits)
    items = [Item(index, length, 0.0, deadline_s=deadline_s) for index, length in enumerate(lengths)]
    for item in items:
        batcher.add(item)
    return batcher, items


def ids(batch: Batch | None) -> list[int]:
    return [] if batch is None else [item.item_id for item in batch.items]


def test_a_batch_waits_for_others_until_the_delay_is_over() -> None:
    batcher, _ = make(8, 8)
    assert batcher.plan(0.009) is None
    assert batcher.next_plan_s() == 0.01
    assert ids(batcher.plan(0.01)) == [0, 1]
    assert batcher.next_plan_s() == NEVER


def test_a_full_batch_does_not_wait() -> None:
    assert ids(make(8, 8, 8, 8)[0].plan(0.0)) == [0, 1, 2, 3]
    assert ids(make(32, 32)[0].plan(0.0)) == [0, 1]


def test_a_batch_ends_before_the_first_item_that_does_not_fit() -> None:
    batcher, _ = make(32, 8, 32, 8)
    assert ids(batcher.plan(0.0)) == [0, 1]
    batcher.commit(0, 0)
    assert ids(batcher.plan(0.0)) == [2, 3], "what is left had its delay"


def test_an_item_longer_than_a_batch_is_computed_alone() -> None:
    batcher, _ = make(8, 1000, 8)
    assert ids(batcher.plan(0.0)) == [0]
    assert ids(batcher.plan(0.0)) == [1]


def test_a_batch_ends_before_the_image_that_makes_its_message_too_long() -> None:
    """The event loop encodes the message of a batch in one piece."""
    batcher = DynamicBatcher(BatchLimits(max_batch_size=4, max_batch_tokens=64, max_batch_bytes=100))
    for index, num_bytes in enumerate((60, 40, 1, 500, 20)):
        batcher.add(Item(index, 8, 0.0, num_bytes=num_bytes))
    batches = []
    while batcher.has_work:
        batch = batcher.plan(1.0)
        assert batch is not None
        batches.append(ids(batch))
        batcher.commit(batch.epoch, batch.batch_id)
    assert batches == [[0, 1], [2], [3], [4]]


def test_a_batch_ends_before_the_image_that_would_take_too_long_to_decode() -> None:
    """All images of a batch are decoded before the model computes one of them."""
    batcher = DynamicBatcher(BatchLimits(max_batch_size=4, max_batch_tokens=64, max_batch_pixels=PIXELS_PER_TOKEN))
    for index, share in enumerate((0.6, 0.4, 0.1, 5, 0.1)):
        batcher.add(Item(index, 8, 0.0, num_pixels=int(share * PIXELS_PER_TOKEN)))
    batches, works = [], []
    while batcher.has_work:
        batch = batcher.plan(1.0)
        assert batch is not None
        batches.append(ids(batch))
        works.append(batch.work)
        batcher.commit(batch.epoch, batch.batch_id)
    assert batches == [[0, 1], [2], [3], [4]] and works == [16, 8, 13, 8]


def test_behind_a_running_batch_only_a_full_one_is_planned() -> None:
    batcher, _ = make(8, 8, 8, 8, 8)
    assert ids(batcher.plan(0.0)) == [0, 1, 2, 3]
    assert batcher.plan(1.0) is None and batcher.has_work
    for item_id in range(5, 8):
        batcher.add(Item(item_id, 8, 1.0))
    assert ids(batcher.plan(1.0)) == [4, 5, 6, 7]
    batcher.add(Item(8, 64, 1.0))
    assert batcher.plan(1.0) is None, "two batches are in flight"


def test_results_are_committed_once_and_only_for_items_that_are_wanted() -> None:
    batcher, items = make(8, 8, 8)
    batch = batcher.plan(0.01)
    assert batch is not None and batch.num_tokens == 24
    batcher.finish(items[1])
    batcher.finish(items[1])
    assert batcher.commit(batch.epoch, batch.batch_id) == [(0, items[0]), (2, items[2])]
    assert batcher.commit(batch.epoch, batch.batch_id) == []
    assert batcher.num_stale_results == 1 and not batcher.has_work


def test_what_a_lost_worker_had_waits_again_in_its_place_and_needs_no_further_delay() -> None:
    batcher, items = make(8, 8)
    batcher.plan(0.01)
    batcher.finish(items[0])
    batcher.add(Item(2, 8, 0.02))
    assert batcher.restart() == []
    assert batcher.commit(0, 0) == [] and batcher.num_stale_results == 1
    assert batcher.next_plan_s() == -inf
    assert ids(batcher.plan(0.02)) == [1, 2]
    assert batcher.epoch == 1


def test_a_suspect_is_computed_alone_and_fails_with_the_third_worker() -> None:
    batcher, items = make(8, 8)
    for _ in range(2):
        batcher.plan(0.01)
        assert batcher.restart() == []
    batcher.add(Item(2, 8, 0.02))
    assert batcher.num_suspects == 2
    assert ids(batcher.plan(0.02)) == [0]
    for item_id in range(3, 8):
        batcher.add(Item(item_id, 8, 0.02))
    assert batcher.plan(0.02) is None, "the suspect has the worker for itself"
    assert batcher.restart() == [items[0]]
    assert ids(batcher.plan(0.02)) == [1]
    batcher.commit(batcher.epoch, 3)
    assert ids(batcher.plan(0.02)) == [2, 3, 4, 5]


def test_a_suspect_whose_client_leaves_is_not_computed() -> None:
    batcher, items = make(8, 8)
    for _ in range(2):
        batcher.plan(0.01)
        batcher.restart()
    batcher.finish(items[0])
    assert batcher.num_suspects == 1 and batcher.num_waiting == 1
    assert ids(batcher.plan(0.02)) == [1]


def test_the_last_suspect_that_runs_alone_keeps_full_batches_back() -> None:
    batcher, _ = make(8)
    for _ in range(2):
        batcher.plan(0.01)
        batcher.restart()
    assert ids(batcher.plan(0.01)) == [0]
    for item_id in range(1, 9):
        batcher.add(Item(item_id, 8, 0.02))
    assert batcher.plan(0.02) is None


def test_deadlines_end_waiting_and_running_items_and_are_swept_out() -> None:
    batcher, items = make(8, 8, 8, 8, 8, 8, deadline_s=5.0)
    assert batcher.next_deadline_s() == 5.0
    batcher.plan(0.0)
    assert batcher.expire(4.9) == []
    for item in items[:2]:
        batcher.finish(item)
    assert batcher.expire(5.0) == items[2:]
    assert batcher.next_deadline_s() == NEVER and batcher._deadlines == []
    assert batcher.commit(0, 0) == []
    assert all(item.status is ItemStatus.DONE for item in items) and not batcher.has_work


def test_ended_items_with_deadlines_are_not_kept() -> None:
    batcher = DynamicBatcher(LIMITS)
    batcher.add(Item(0, 8, 0.0, deadline_s=1.0))
    for item_id in range(1, 100):
        item = Item(item_id, 8, 0.0, deadline_s=2.0)
        batcher.add(item)
        batcher.finish(item)
        assert len(batcher._deadlines) <= 3
    first = batcher.expire(1.0)
    assert [item.item_id for item in first] == [0]


def test_when_all_that_waited_has_left_the_delay_begins_anew() -> None:
    batcher, items = make(8)
    batcher.finish(items[0])
    assert batcher.plan(1.0) is None and batcher.next_plan_s() == NEVER
    batcher.add(Item(1, 8, 1.0))
    assert batcher.next_plan_s() == 1.01
    assert batcher.num_served("") == 0
