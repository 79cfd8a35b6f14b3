"""Tests of a simulated KV block."""

from __future__ import annotations

import random

from servekit.simulation.page import Page


def test_the_total_is_the_sum_of_all_states_after_any_writes() -> None:
    randomness = random.Random(1)
    page = Page.of([0] * 4)
    for _ in range(100):
        page.write(randomness.randrange(4), randomness.getrandbits(40))
        assert page.total == sum(page.states)


def test_a_copy_keeps_its_states_when_the_original_is_written_to() -> None:
    page = Page.of([1, 2])
    copy = page.copy()
    page.write(0, 5)
    assert copy == Page([1, 2], 3) and page == Page([5, 2], 7)


def test_garbage_has_states_that_no_position_has() -> None:
    assert Page.of_garbage(3) == Page([1, 1, 1], 3)
