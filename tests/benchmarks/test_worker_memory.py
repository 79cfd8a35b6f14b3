"""The benchmark of a worker's memory fails for growth, and not for memory that goes up and down."""

from __future__ import annotations

from benchmarks.worker_memory import MAX_GROWTH_MIB, NUM_REPORTS, growth

STARTED = 480.0


def test_memory_that_grows_with_each_request_is_over_the_limit() -> None:
    grown = [STARTED, *(900 + 10.0 * number for number in range(NUM_REPORTS))]
    assert growth(grown) == 100 > MAX_GROWTH_MIB["worker"]
    # What the first report on the growth measured, for each 20,000 of 100,000 requests.
    assert growth([490, 919, 978, 1022, 1059, 1075]) > MAX_GROWTH_MIB["worker"]


def test_memory_that_goes_up_and_down_or_grows_at_the_start_only_is_not() -> None:
    sawtooth = [STARTED, *(850 + 70.0 * (number % 3) for number in range(NUM_REPORTS))]
    assert abs(growth(sawtooth)) <= MAX_GROWTH_MIB["worker"]
    # As measured on 2026-11-24 (docs/performance.md).
    assert growth([477, 971, 953, 936, 842, 1020, 1063, 860]) <= MAX_GROWTH_MIB["worker"]
