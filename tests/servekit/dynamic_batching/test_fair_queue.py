from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servekit.dynamic_batching.fair_queue import FairQueue
from servekit.dynamic_batching.item import PIXELS_PER_TOKEN, Item, ItemStatus


def items_of(tenant: str, count: int, first_id: int = 0) -> list[Item]:
    return [Item(first_id + index, 8, arrival_s=float(index), tenant=tenant) for index in range(count)]


def take(queue: FairQueue) -> Item | None:
    item = queue.first()
    if item is not None:
        queue.pop(item)
        queue.charge(item)
        item.status = ItemStatus.IN_FLIGHT
    return item


def test_tenants_take_turns() -> None:
    queue = FairQueue()
    for item in [*items_of("a", 3), *items_of("b", 3, 10)]:
        queue.push(item)
    taken = [take(queue) for _ in range(6)]
    assert [item.tenant for item in taken if item is not None] == ["a", "b", "a", "b", "a", "b"]
    assert take(queue) is None


def test_large_images_count_for_more_turns_than_small_ones() -> None:
    queue = FairQueue()
    for index in range(2):
        queue.push(Item(index, 8, arrival_s=0.0, tenant="a", num_pixels=24 * PIXELS_PER_TOKEN))
    for item in items_of("b", 5, 10):
        queue.push(item)
    taken = [take(queue) for _ in range(7)]
    assert [item.tenant for item in taken if item is not None] == ["a", *"bbbb", "a", "b"]


def test_a_tenant_that_was_idle_saves_up_nothing() -> None:
    queue = FairQueue()
    for item in items_of("a", 10):
        queue.push(item)
    for _ in range(8):
        take(queue)
    queue.push(items_of("b", 1, 20)[0])
    assert queue.num_served("b") == queue.num_served("a") == 64
    while take(queue) is not None:
        pass
    queue.push(items_of("c", 1, 30)[0])
    assert queue.num_served("c") == queue.num_served("a"), "it starts level with the last that waited"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=60))
def test_what_has_ended_is_never_first_and_is_swept_out(steps: list[tuple[str, bool]]) -> None:
    queue, waiting = FairQueue(), list[Item]()
    for number, (tenant, ends_one) in enumerate(steps):
        if ends_one and waiting:
            item = waiting.pop(len(waiting) // 2)
            item.status = ItemStatus.DONE
            queue.discard(item)
        else:
            waiting.append(Item(number, 8, arrival_s=float(number), tenant=tenant))
            queue.push(waiting[-1])
        assert (queue.first() is None) == (not waiting)
        num_entries = sum(len(each.entries) for each in queue._queues.values())
        assert num_entries <= 2 * len(waiting)
    taken = []
    while (item := take(queue)) is not None:
        taken.append(item)
    assert sorted(item.item_id for item in taken) == sorted(item.item_id for item in waiting)
