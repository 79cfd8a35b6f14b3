"""Claims about the search for the highest rate, against servers whose capacity is known."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.record import Outcome, Record
from loadtest.search import Decision, Result, Search, is_saturated, num_in_flight, num_needed
from loadtest.statistics import wilson_interval
from loadtest.timeline import Measurements, measure

# Of a queue with one server, that serves 100/s on average, and a limit of 200 ms: the time in it is exponential with
# rate 100 - r, so 99 % are within the limit at r = 100 - ln(100) / 0.2.
SERVICE_RATE, LIMIT_S = 100.0, 0.2
MAXIMUM = SERVICE_RATE - math.log(100.0) / LIMIT_S


def attainment(rate: float) -> float:
    return 1.0 - math.exp(-(SERVICE_RATE - rate) * LIMIT_S) if rate < SERVICE_RATE else 0.0


def run(search: Search, seed: int) -> int:
    """Each request is good by chance, as often as the formula says. Returns the number of probes."""
    generator = np.random.default_rng(seed)
    num_probes = 0
    while (probe := search.next_probe()) is not None:
        num_good = int(generator.binomial(probe.num_requests, attainment(probe.rate)))
        search.record(probe, num_good, probe.num_requests, is_saturated=probe.rate >= SERVICE_RATE)
        num_probes += 1
    return num_probes


@pytest.mark.parametrize(("start_rate", "tolerance"), [(1.0, 0.05), (70.0, 0.05), (5000.0, 0.05), (20.0, 0.2)])
def test_the_maximum_is_found_within_its_tolerance(start_rate: float, tolerance: float) -> None:
    found = []
    for seed in range(100):
        search = Search(start_rate=start_rate, tolerance=tolerance)
        num_probes = run(search, seed)
        # Doublings or halvings to the bracket, mostly clear ones; halvings within it, with five looks each at most.
        bracketing = abs(math.log2(MAXIMUM / start_rate)) + 2
        bisecting = math.log2(3.0 * math.log(2.0) / math.log(1.0 + tolerance)) + 1
        assert len(search.result.probed) <= bracketing + bisecting
        assert num_probes <= bracketing + 5 * bisecting
        assert search.result.rate is not None
        found.append(search.result.rate / MAXIMUM)
    assert sum(1.0 - tolerance <= each <= 1.0 for each in found) >= 95


def test_the_same_answers_lead_to_the_same_result() -> None:
    first, second = Search(), Search()
    run(first, 1)
    run(second, 1)
    assert first.result == second.result


def test_what_is_reported_was_shown() -> None:
    search = Search(start_rate=10.0)
    run(search, 2)
    result = search.result
    assert result.rate is not None and result.missed_rate is not None
    assert result.rate < result.missed_rate <= result.rate * 1.05 ** (1 / 3)
    best = next(each for each in result.probed if each.rate == result.rate)
    assert best.decision is Decision.MET and best.low >= 0.99
    assert (best.low, best.high) == wilson_interval(best.num_attained, best.num_total, search.confidence)
    rates = [each.rate for each in result.probed]
    assert rates[:4] == [10.0, 20.0, 40.0, 80.0] and rates[4] == pytest.approx(math.sqrt(40.0 * 80.0))


def test_a_rate_is_asked_again_for_as_many_as_there_were_until_it_is_decided() -> None:
    search = Search(start_rate=10.0, num_requests=100, max_requests=1600)
    asked = []
    for _ in range(5):
        probe = search.next_probe()
        assert probe is not None and probe == search.next_probe() and probe.rate == 10.0
        asked.append((probe.num_requests, probe.look))
        search.record(probe, round(0.99 * probe.num_requests), probe.num_requests)
    assert asked == [(100, 0), (100, 1), (200, 2), (400, 3), (800, 4)]
    probe = search.next_probe()
    assert probe is not None and (probe.rate, probe.look) == (5.0, 0), "undecided at the cap counts as not met"


def answer_all(search: Search, *, is_good: bool, **how: bool) -> Result:
    while (probe := search.next_probe()) is not None:
        search.record(probe, probe.num_requests if is_good else 0, probe.num_requests, **how)
    return search.result


def test_the_bounds_end_a_search() -> None:
    best = answer_all(Search(start_rate=3.0, max_rate=50.0), is_good=True)
    assert (best.rate, best.missed_rate) == (50.0, None) and "the highest rate allowed, 50/s" in best.stopped_by
    worst = answer_all(Search(start_rate=3.0, min_rate=1.0), is_good=False)
    assert (worst.rate, worst.missed_rate) == (None, 1.0) and "the lowest rate allowed, 1/s" in worst.stopped_by


@pytest.mark.parametrize(
    ("how", "decision", "words"),
    [
        ({"is_saturated": True}, Decision.SATURATED, "more than the server can do"),
        ({"is_client_limited": True}, Decision.CLIENT, "the server's maximum may be higher"),
    ],
)
def test_a_probe_that_ran_full_is_missed_however_good_it_was(
    how: dict[str, bool], decision: Decision, words: str
) -> None:
    search = Search(start_rate=1.0)
    while (probe := search.next_probe()) is not None:
        search.record(probe, probe.num_requests, probe.num_requests, **(how if probe.rate > 10.0 else {}))
    result = search.result
    assert result.rate is not None and 9.7 < result.rate <= 10.0 and words in result.stopped_by
    assert {each.decision for each in result.probed if each.rate > 10.0} == {decision}


def test_a_probe_that_the_client_spoiled_once_is_asked_again_and_does_not_count() -> None:
    search = Search(start_rate=8.0, max_rate=16.0, num_requests=700)
    first = search.next_probe()
    assert first is not None
    assert search.record(first, 0, 700, is_client_limited=True) is Decision.CLIENT
    again = search.next_probe()
    assert again is not None and (again.rate, again.num_requests, again.look) == (8.0, 700, 1)
    assert search.record(again, 700, 700) is Decision.MET
    result = answer_all(search, is_good=True)
    assert result.rate == 16.0 and result.probed[0].num_total == 700 and not result.is_limited_by_client


def test_a_result_says_that_it_is_the_clients() -> None:
    search = Search(start_rate=1.0)
    while (probe := search.next_probe()) is not None:
        search.record(probe, probe.num_requests, probe.num_requests, is_client_limited=probe.rate > 10.0)
    assert search.result.is_limited_by_client
    search = Search(start_rate=1.0)
    while (probe := search.next_probe()) is not None:  # of 16/s the client is to blame, of what decides it is not
        is_good = probe.rate <= 10.0
        search.record(probe, probe.num_requests * is_good, probe.num_requests, is_client_limited=probe.rate == 16.0)
    assert not search.result.is_limited_by_client


def alone(rate: float, service_s: float, generator: np.random.Generator) -> float:
    """The share of Poisson arrivals that share no moment with another, with one server for each."""
    starts_s = np.cumsum(generator.exponential(1.0 / rate, 100_000))
    gaps_s = np.diff(starts_s)
    return float(((gaps_s[:-1] >= service_s) & (gaps_s[1:] >= service_s)).mean())


@pytest.mark.parametrize("in_flight", [0.05, 0.3, 1.0])
def test_a_search_ends_where_those_with_the_server_to_themselves_miss_the_limits(in_flight: float) -> None:
    share_alone = alone(in_flight, 1.0, np.random.default_rng(1))
    assert share_alone == pytest.approx(math.exp(-2.0 * in_flight), rel=0.05)
    for share, is_over in ((share_alone * 0.85, True), (share_alone * 1.1, False)):
        search = Search(start_rate=4.0, num_requests=5000)
        probe = search.next_probe()
        assert probe is not None
        num_good = round(min(share, 0.97) * 5000)
        assert search.record(probe, num_good, 5000, num_in_flight=in_flight) is Decision.MISSED
        assert (search.next_probe() is None) is is_over
        if is_over:
            assert search.result.rate is None and "a lower rate is no remedy" in search.result.stopped_by


def test_a_miss_under_load_or_after_a_rate_that_was_met_does_not_end_a_search() -> None:
    search = Search(start_rate=4.0)
    probe = search.next_probe()
    assert probe is not None
    search.record(probe, 0, 700, num_in_flight=20.0)
    probe = search.next_probe()
    assert probe is not None and probe.rate == 2.0
    search.record(probe, 700, 700, num_in_flight=0.1)
    probe = search.next_probe()
    assert probe is not None and 2.0 < probe.rate < 4.0
    search.record(probe, 0, 700, num_in_flight=0.1)
    assert search.next_probe() is not None


def test_a_server_that_answers_nothing_is_not_asked_at_a_lower_rate() -> None:
    search = Search(start_rate=4.0)
    probe = search.next_probe()
    assert probe is not None
    search.record(probe, 0, 700, num_in_flight=30.0, is_unanswered=True)
    assert search.next_probe() is None and "nothing was answered" in search.result.stopped_by


def test_those_in_flight_are_as_many_as_little_has_it() -> None:
    measured, _ = queue(50.0, 20_000, seed=2)
    assert num_in_flight(measured) == pytest.approx(50.0 * measured.e2e_s.mean(), rel=0.02)
    assert num_in_flight(measure([])) == 0.0


def test_as_many_requests_are_needed_as_wilson_says() -> None:
    needed = num_needed(0.99, 0.95)
    assert wilson_interval(needed, needed)[0] >= 0.99 > wilson_interval(needed - 1, needed - 1)[0]
    with pytest.raises(LoadTestError, match=r"0\.999 cannot be shown with 1000 requests .* allow at least"):
        Search(attainment=0.999, max_requests=1000)


@pytest.mark.parametrize(
    "settings",
    [
        {"attainment": 1.0},
        {"start_rate": 0.0},
        {"start_rate": 10.0, "max_rate": 5.0},
        {"tolerance": 0.0},
        {"num_requests": 0},
        {"num_requests": 5000, "max_requests": 4000},
    ],
)
def test_what_can_find_nothing_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(LoadTestError):
        Search(**settings)  # type: ignore[arg-type]


def test_a_probe_without_requests_is_an_error() -> None:
    search = Search()
    probe = search.next_probe()
    assert probe is not None
    with pytest.raises(LoadTestError, match="had no requests"):
        search.record(probe, 0, 0)


# -- saturation, on a queue that is simulated -------------------------------------------------------------------------


def queue(rate: float, num: int, seed: int) -> tuple[Measurements, float]:
    """M/M/1: departures follow max(arrival, departure before) + service. Returns the share within the limit, too."""
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1.0 / rate, num))
    services = generator.exponential(1.0 / SERVICE_RATE, num)
    worked = np.cumsum(services)
    departures = worked + np.maximum.accumulate(arrivals - (worked - services))
    records = [
        Record(index, start_s, start_s, [end_s], None, end_s, Outcome.OK, 200, num_output_tokens=1)
        for index, (start_s, end_s) in enumerate(zip(arrivals.tolist(), departures.tolist(), strict=True))
    ]
    return measure(records), float((departures - arrivals <= LIMIT_S).mean())


def test_the_simulated_queue_is_the_textbooks() -> None:
    measured, share = queue(50.0, 20_000, seed=1)
    assert share == pytest.approx(attainment(50.0), abs=0.001)
    assert measured.e2e_s.mean() == pytest.approx(1.0 / (SERVICE_RATE - 50.0), rel=0.05)


def test_a_server_that_keeps_up_is_not_saturated_and_one_that_cannot_is() -> None:
    kept_up = sum(is_saturated(queue(80.0, 1000, seed)[0]) for seed in range(30))
    overloaded = sum(is_saturated(queue(150.0, 1000, seed)[0]) for seed in range(30))
    assert kept_up <= 1 and overloaded == 30


def test_longer_answers_are_no_saturation() -> None:
    # In flight grows because requests take longer; first tokens come as fast as ever.
    starts = np.arange(1000) / 10.0
    records = [
        Record(index, at, at, [at + 0.1, at + 1.0 + at / 10.0], None, at + 1.0 + at / 10.0, Outcome.OK, 200, "", 1, 2)
        for index, at in enumerate(starts.tolist())
    ]
    measured = measure(records)
    counts = measured.in_flight().means(np.linspace(0.0, 100.0, 5))
    assert all(later > earlier for earlier, later in pairwise(counts))
    assert not is_saturated(measured)


def test_too_few_requests_show_no_saturation() -> None:
    assert not is_saturated(queue(500.0, 50, seed=1)[0])
    assert not is_saturated(measure([]))


def test_on_a_real_queue_whose_requests_resemble_their_neighbours_the_maximum_is_near() -> None:
    for seed in range(3):
        search = Search(start_rate=20.0, num_requests=1400)
        num_probes = 0
        while (probe := search.next_probe()) is not None:
            num_probes += 1
            measured, share = queue(probe.rate, probe.num_requests, seed * 1000 + num_probes)
            good = round(share * probe.num_requests)
            search.record(probe, good, probe.num_requests, is_saturated=is_saturated(measured))
        assert search.result.rate == pytest.approx(MAXIMUM, rel=0.2)
