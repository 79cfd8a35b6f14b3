"""Test the search for the highest rate, against servers whose capacity is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from loadtest.analysis.measurements import Measurements, measure
from loadtest.analysis.search import (
    Decision,
    Observation,
    Probe,
    Result,
    Search,
    is_saturated,
    num_in_flight,
    num_needed,
    observe,
)
from loadtest.analysis.slo import parse
from loadtest.analysis.statistics import Floats, wilson_interval
from loadtest.errors import LoadTestError
from loadtest.record import Outcome, Record

# Of a queue with one server, that serves 100/s on average, and a limit of 200 ms: the time in it is exponential with
# rate 100 - r, so 99 % are within the limit at r = 100 - ln(100) / 0.2.
SERVICE_RATE, LIMIT_S = 100.0, 0.2
MAXIMUM = SERVICE_RATE - math.log(100.0) / LIMIT_S


def attainment(rate: float) -> float:
    return 1.0 - math.exp(-(SERVICE_RATE - rate) * LIMIT_S) if rate < SERVICE_RATE else 0.0


def observed(num_good: int, num_requests: int, **more: Any) -> Observation:
    return Observation(num_good, num_requests, **more)


def counted(probe: Probe) -> int:
    """How many requests of a probe count, if arrivals were even."""
    return round(probe.rate * (probe.duration_s - probe.warm_up_s - probe.cool_down_s))


def run(search: Search, seed: int) -> list[Probe]:
    """Each request is good by chance, as often as the formula says."""
    generator = np.random.default_rng(seed)
    probes = []
    while (probe := search.next_probe()) is not None:
        num = int(generator.poisson(counted(probe)))
        num_good = int(generator.binomial(num, attainment(probe.rate)))
        search.record(probe, observed(num_good, num, is_saturated=probe.rate >= SERVICE_RATE))
        probes.append(probe)
    return probes


@pytest.mark.parametrize(("start_rate", "tolerance"), [(1.0, 0.05), (70.0, 0.05), (5000.0, 0.05), (20.0, 0.2)])
def test_the_maximum_is_found_within_its_tolerance(start_rate: float, tolerance: float) -> None:
    found = []
    for seed in range(100):
        search = Search(start_rate=start_rate, tolerance=tolerance)
        num_probes = len(run(search, seed))
        # Doublings or halvings to the bracket, one probe for its lower end, then halvings with five looks each at most.
        # The last term is for a bound that a short probe got wrong.
        bracketing = abs(math.log2(MAXIMUM / start_rate)) + 3
        bisecting = math.log2(3.0 * math.log(2.0) / math.log(1.0 + tolerance)) + 1
        assert len(search.result.probed) <= bracketing + bisecting + 6
        assert num_probes <= bracketing + 5 * bisecting + 6
        assert search.result.rate is not None
        found.append(search.result.rate / MAXIMUM)
    assert sum(1.0 - tolerance <= each <= 1.0 for each in found) >= 95


def test_the_same_observations_lead_to_the_same_result() -> None:
    first, second = Search(), Search()
    run(first, 1)
    run(second, 1)
    assert first.result == second.result


def test_the_reported_rate_was_shown_by_a_deciding_probe_and_so_was_the_missed_one() -> None:
    for seed in range(20):
        search = Search(start_rate=10.0)
        run(search, seed)
        result = search.result
        assert result.rate is not None and result.missed_rate is not None
        assert result.rate < result.missed_rate <= result.rate * 1.05 ** (1 / 3)
        best = next(each for each in reversed(result.probed) if each.rate == result.rate)
        assert best.is_deciding and best.decision is Decision.MET and best.low >= 0.99
        assert (best.low, best.high) == wilson_interval(best.num_attained, best.num_total, search.confidence)
        assert next(each for each in reversed(result.probed) if each.rate == result.missed_rate).is_deciding


def test_from_one_request_a_second_the_rate_doubles_within_seconds() -> None:
    search = Search()
    seconds = []
    while (probe := search.next_probe()) is not None and not probe.is_deciding:
        seconds.append(probe.duration_s)
        is_good = probe.rate <= 300.0
        num = counted(probe)
        search.record(probe, observed(num * is_good, num, latency_s=0.4))
    assert probe is not None and probe.rate == 256.0
    assert len(seconds) == 10 and max(seconds) <= 11.0 and sum(seconds) <= 45.0


def test_a_deciding_probe_lasts_many_latencies_and_leaves_out_both_its_ends() -> None:
    for latency_s in (0.01, 1.0, 30.0):
        search = Search(start_rate=100.0, max_rate=100.0)
        short = search.next_probe()
        assert short is not None and not short.is_deciding
        search.record(short, observed(100, 100, latency_s=latency_s))
        probe = search.next_probe()
        assert probe is not None and probe.is_deciding
        assert probe.warm_up_s >= 3.0 * latency_s and probe.cool_down_s >= latency_s
        counted_s = probe.duration_s - probe.warm_up_s - probe.cool_down_s
        assert counted_s >= max(20.0, 20.0 * latency_s) - 1e-9
        assert counted_s * probe.rate >= 700.0


def test_a_rate_with_a_longer_latency_than_expected_is_probed_for_longer() -> None:
    search = Search(start_rate=100.0, max_rate=100.0)
    for _ in range(2):
        probe = search.next_probe()
        assert probe is not None
        decision = search.record(probe, observed(1600, 1600, latency_s=3.0 if probe.is_deciding else 0.1, span_s=20.0))
    assert decision is Decision.UNDECIDED
    again = search.next_probe()
    assert again is not None and again.is_deciding and (again.rate, again.look) == (100.0, 1)
    assert again.warm_up_s >= 9.0
    assert search.record(again, observed(6000, 6000, latency_s=3.0, span_s=60.0)) is Decision.MET


def deciding(search: Search) -> Probe:
    """The first deciding probe, after short ones that all passed."""
    while (probe := search.next_probe()) is not None and not probe.is_deciding:
        search.record(probe, observed(counted(probe), counted(probe)))
    assert probe is not None
    return probe


def test_a_rate_is_probed_for_as_many_requests_as_it_had_until_it_is_decided() -> None:
    search = Search(start_rate=10.0, max_rate=10.0, num_requests=100, max_requests=1600, min_duration_s=1.0)
    probe = deciding(search)
    asked = []
    for _ in range(5):
        assert probe == search.next_probe() and probe.rate == 10.0
        asked.append((counted(probe), probe.look))
        num = 100 if probe.look == 0 else counted(probe)
        search.record(probe, observed(round(0.99 * num), num))
        following = search.next_probe()
        assert following is not None
        probe = following
    assert asked == [(120, 0), (100, 1), (200, 2), (400, 3), (800, 4)]
    assert (probe.rate, probe.is_deciding) == (5.0, False), "undecided at the cap counts as not met"


def test_requests_that_miss_their_limits_together_count_as_fewer() -> None:
    decisions = []
    for length in (1.0, 20.0):
        search = Search(start_rate=10.0, max_rate=10.0)
        probe = deciding(search)
        decisions.append(search.record(probe, observed(997, 1000, correlation_length=length)))
    assert decisions == [Decision.UNDECIDED, Decision.UNDECIDED]
    decisions = []
    for length in (1.0, 20.0):
        search = Search(start_rate=10.0, max_rate=10.0)
        probe = deciding(search)
        decisions.append(search.record(probe, observed(9980, 10_000, correlation_length=length)))
    assert decisions == [Decision.MET, Decision.UNDECIDED]


def answer_all(search: Search, *, is_good: bool, **how: bool) -> Result:
    while (probe := search.next_probe()) is not None:
        num = counted(probe)
        search.record(probe, observed(num if is_good else 0, num, **how))
    return search.result


def test_the_bounds_end_a_search() -> None:
    best = answer_all(Search(start_rate=3.0, max_rate=50.0), is_good=True)
    assert (best.rate, best.missed_rate) == (50.0, None) and "the highest rate allowed, 50/s" in best.stopped_by
    assert best.probed[-1].is_deciding and not best.probed[0].is_deciding
    worst = answer_all(Search(start_rate=3.0, min_rate=1.0), is_good=False)
    assert (worst.rate, worst.missed_rate) == (None, 1.0) and "the lowest rate allowed, 1/s" in worst.stopped_by


@pytest.mark.parametrize("wrong", [8.0, 32.0])
def test_a_short_probe_that_was_wrong_costs_time_and_not_the_answer(wrong: float) -> None:
    # A cold start fails the short probe at 8/s; or the short probe at 32/s, beyond the maximum of 20/s, passes.
    search = Search(start_rate=1.0)
    while (probe := search.next_probe()) is not None:
        is_good = probe.rate <= 20.0
        if not probe.is_deciding and probe.rate == wrong:
            is_good = not is_good
        num = counted(probe)
        search.record(probe, observed(num * is_good, num))
    assert search.result.rate is not None and 20.0 / 1.02 < search.result.rate <= 20.0


def test_one_bad_request_does_not_end_the_doubling() -> None:
    search = Search(start_rate=4.0)
    probe = search.next_probe()
    assert probe is not None
    assert search.record(probe, observed(9, 10)) is Decision.PASSED
    probe = search.next_probe()
    assert probe is not None and probe.rate == 8.0


@pytest.mark.parametrize(
    ("how", "decision", "words"),
    [
        ({"is_saturated": True}, Decision.SATURATED, "the server cannot keep up"),
        ({"is_client_limited": True}, Decision.CLIENT, "the server's maximum may be higher"),
    ],
)
def test_a_saturated_probe_is_missed_however_many_requests_were_good(
    how: dict[str, bool], decision: Decision, words: str
) -> None:
    search = Search(start_rate=1.0)
    while (probe := search.next_probe()) is not None:
        num = counted(probe)
        search.record(probe, observed(num, num, **(how if probe.rate > 10.0 else {})))
    result = search.result
    assert result.rate is not None and 9.7 < result.rate <= 10.0 and words in result.stopped_by
    assert {each.decision for each in result.probed if each.rate > 10.0} == {decision}


def test_a_probe_during_which_the_client_was_late_once_is_repeated_and_does_not_count() -> None:
    search = Search(start_rate=8.0, max_rate=16.0, num_requests=700)
    first = search.next_probe()
    assert first is not None
    assert search.record(first, observed(0, 80, is_client_limited=True)) is Decision.CLIENT
    again = search.next_probe()
    assert again is not None and (again.rate, again.duration_s, again.look) == (8.0, first.duration_s, 1)
    assert search.record(again, observed(80, 80)) is Decision.PASSED
    result = answer_all(search, is_good=True)
    assert result.rate == 16.0 and result.probed[0].num_total == 80 and not result.is_limited_by_client


def test_a_result_says_that_the_client_was_the_limit() -> None:
    search = Search(start_rate=1.0)
    while (probe := search.next_probe()) is not None:
        num = counted(probe)
        search.record(probe, observed(num, num, is_client_limited=probe.rate > 10.0))
    assert search.result.is_limited_by_client
    search = Search(start_rate=1.0)
    while (probe := search.next_probe()) is not None:  # the client is late at 16/s, but that rate decides nothing
        num = counted(probe)
        search.record(probe, observed(num * (probe.rate <= 10.0), num, is_client_limited=probe.rate == 16.0))
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
        assert search.record(probe, observed(num_good, 5000, num_in_flight=in_flight)) is Decision.MISSED
        assert (search.next_probe() is None) is is_over
        if is_over:
            assert search.result.rate is None and "a lower rate would not help" in search.result.stopped_by


def test_a_miss_under_load_or_after_a_rate_that_was_met_does_not_end_a_search() -> None:
    search = Search(start_rate=4.0)
    probe = search.next_probe()
    assert probe is not None
    search.record(probe, observed(0, 700, num_in_flight=20.0))
    probe = search.next_probe()
    assert probe is not None and probe.rate == 2.0
    search.record(probe, observed(700, 700, num_in_flight=0.1))
    probe = search.next_probe()
    assert probe is not None and probe.rate == 2.0 and probe.is_deciding
    search.record(probe, observed(700, 700, num_in_flight=0.1))
    probe = search.next_probe()
    assert probe is not None and 2.0 < probe.rate < 4.0
    search.record(probe, observed(0, 700, num_in_flight=0.1))
    assert search.next_probe() is not None


def test_a_search_ends_at_once_if_nothing_is_answered() -> None:
    search = Search(start_rate=4.0)
    probe = search.next_probe()
    assert probe is not None
    search.record(probe, observed(0, 700, num_in_flight=30.0, is_unanswered=True))
    assert search.next_probe() is None and "nothing was answered" in search.result.stopped_by


def test_the_number_in_flight_follows_littles_law() -> None:
    measured, _ = queue(50.0, 20_000, seed=2)
    assert num_in_flight(measured) == pytest.approx(50.0 * measured.e2e_s.mean(), rel=0.02)
    assert num_in_flight(measure([])) == 0.0


def test_the_number_of_requests_needed_follows_from_the_wilson_interval() -> None:
    needed = num_needed(0.99, 0.95)
    assert wilson_interval(needed, needed)[0] >= 0.99 > wilson_interval(needed - 1, needed - 1)[0]
    with pytest.raises(
        LoadTestError, match=r"0\.999 cannot be shown with 1000 requests .* set --max-probe-requests to"
    ):
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
        {"min_duration_s": -1.0},
    ],
)
def test_settings_that_cannot_find_anything_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(LoadTestError):
        Search(**settings)  # type: ignore[arg-type]


def test_a_probe_without_counted_requests_is_an_error() -> None:
    search = Search()
    probe = search.next_probe()
    assert probe is not None
    with pytest.raises(LoadTestError, match="no request of the probe"):
        search.record(probe, observed(0, 0))


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


# -- whole searches against servers with a known capacity --------------------------------------------------------------


Server = Callable[[Floats, np.random.Generator], tuple[Floats, Floats, int]]


def arrivals(probe: Probe, generator: np.random.Generator) -> Floats:
    return np.sort(generator.uniform(0.0, probe.duration_s, generator.poisson(probe.rate * probe.duration_s)))


def serve_one_by_one(starts_s: Floats, generator: np.random.Generator) -> tuple[Floats, Floats, int]:
    """An M/M/1 queue: first tokens, ends, and tokens of each answer."""
    services = generator.exponential(1.0 / SERVICE_RATE, len(starts_s))
    worked = np.cumsum(services)
    ends_s = worked + np.maximum.accumulate(starts_s - (worked - services))
    return ends_s, ends_s, 1


STEP_S, PER_SEQUENCE_S, PER_PROMPT_S, MAX_BATCH, NUM_TOKENS = 0.02, 0.00008, 0.0048, 64, 16
# In the long run each request costs its prompt and its tokens, and a share of 1 / MAX_BATCH of NUM_TOKENS steps.
BATCHING_MAXIMUM = 1.0 / (PER_PROMPT_S + NUM_TOKENS * PER_SEQUENCE_S + NUM_TOKENS * STEP_S / MAX_BATCH)


def serve_in_batches(starts_s: Floats, generator: np.random.Generator) -> tuple[Floats, Floats, int]:
    """Continuous batching with at most MAX_BATCH sequences, as in an LLM server."""
    del generator
    waiting, firsts_s, ends_s = starts_s.tolist(), np.zeros(len(starts_s)), np.zeros(len(starts_s))
    now, step, place, num_running = 0.0, 0, 0, 0
    ending: dict[int, list[int]] = {}
    while place < len(waiting) or num_running:
        if not num_running:
            now = max(now, waiting[place])
        admitted: list[int] = []
        while place < len(waiting) and waiting[place] <= now and num_running + len(admitted) < MAX_BATCH:
            admitted.append(place)
            place += 1
        num_running += len(admitted)
        now += STEP_S + PER_SEQUENCE_S * num_running + PER_PROMPT_S * len(admitted)
        step += 1
        firsts_s[admitted] = now
        if admitted:
            ending[step + NUM_TOKENS - 1] = admitted
        ended = ending.pop(step, [])
        ends_s[ended] = now
        num_running -= len(ended)
    return firsts_s, ends_s, NUM_TOKENS


def find(serve: Server, objectives: str, seed: int) -> tuple[float, float]:
    """The rate that is found from 1 request/s on, and the seconds that the probes would take."""
    generator, search = np.random.default_rng(seed), Search()
    wanted, seconds = parse(objectives), 0.0
    while (probe := search.next_probe()) is not None:
        starts_s = arrivals(probe, generator)
        firsts_s, ends_s, num_tokens = serve(starts_s, generator)
        records = [
            Record(i, s, s, [f, e][:num_tokens], None, e, Outcome.OK, 200, num_output_tokens=num_tokens)
            for i, (s, f, e) in enumerate(zip(starts_s.tolist(), firsts_s.tolist(), ends_s.tolist(), strict=True))
        ]
        measured = measure(records)
        search.record(probe, observe(probe, measured, wanted, np.full(len(records), True), has_timeouts=False))
        seconds += max(probe.duration_s, float(ends_s.max()))
    assert search.result.rate is not None
    return search.result.rate, seconds


# Over 30 seeds, the results were 0.95 to 1.01, 0.97 to 1.09 and 0.94 to 1.08 of the maximum.
@pytest.mark.parametrize(
    ("serve", "objectives", "maximum", "error"),
    [
        (serve_in_batches, "ttft:500ms,tpot:60ms", BATCHING_MAXIMUM, 0.06),
        # So long that no queue of a probe reaches it: the growth of the queue decides.
        (serve_in_batches, "ttft:20s", BATCHING_MAXIMUM, 0.1),
        (serve_one_by_one, f"ttft:{LIMIT_S}s", MAXIMUM, 0.09),
    ],
)
def test_repeated_searches_agree_on_the_maximum_of_a_known_server(
    serve: Server, objectives: str, maximum: float, error: float
) -> None:
    for seed in range(3):
        rate, seconds = find(serve, objectives, seed)
        assert rate == pytest.approx(maximum, rel=error)
        assert seconds < 800.0


def test_only_requests_between_the_warm_up_and_the_cool_down_of_a_probe_count() -> None:
    starts_s = np.arange(100) / 10.0
    # Good until 2 s and from 9 s on; those between take too long.
    ends_s = starts_s + np.where((starts_s >= 2.0) & (starts_s < 9.0), 0.5, 0.1)
    records = [
        Record(i, at, at, [end], None, end, Outcome.OK, 200, num_output_tokens=1)
        for i, (at, end) in enumerate(zip(starts_s.tolist(), ends_s.tolist(), strict=True))
    ]
    probe = Probe(rate=10.0, duration_s=10.0, warm_up_s=2.0, cool_down_s=1.0, is_deciding=True)
    seen = observe(probe, measure(records), parse("e2e:200ms"), np.full(100, True), has_timeouts=False)
    assert (seen.num_good, seen.num_requests) == (0, 70)
    assert (seen.span_s, seen.latency_s) == pytest.approx((7.0, 0.5))
