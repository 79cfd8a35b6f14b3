from __future__ import annotations

from servekit.dynamic_batching.item import PIXELS_PER_TOKEN, Item, ItemStatus


def test_a_priority_level_is_worth_ten_seconds_of_waiting() -> None:
    old, urgent = Item(0, 8, arrival_s=0.0), Item(1, 8, arrival_s=9.0, priority=-1)
    assert urgent.rank < old.rank
    assert old.rank < Item(2, 8, arrival_s=11.0, priority=-1).rank


def test_an_item_costs_its_padded_length_and_lives_until_it_is_done() -> None:
    item = Item(0, 65, arrival_s=0.0)
    assert item.cost == 72 and item.is_alive
    item.status = ItemStatus.DONE
    assert not item.is_alive


def test_the_work_of_an_image_is_its_tokens_and_its_pixels() -> None:
    assert Item(0, 65, arrival_s=0.0).work == 72
    assert Item(0, 65, arrival_s=0.0, num_pixels=10 * PIXELS_PER_TOKEN).work == 82
