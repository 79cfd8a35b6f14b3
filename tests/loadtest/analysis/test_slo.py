"""Test objectives: which requests keep a limit, which runs meet a demand, and what was not measured."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.analysis import slo
from loadtest.analysis.slo import Demand, Limit
from loadtest.errors import LoadTestError
from loadtest.planning.plan import Request
from loadtest.record import STOPPED_BY_USER, Outcome, Record
from tests.loadtest.analysis.test_summary import answered, failed, planned, summary_of


def test_objectives_are_read_as_written() -> None:
    found = slo.parse("ttft:200ms, tpot:30ms,e2e:5s,ttft_p99:500ms,e2e_p999:7.5s,itl_p99.9:50ms,tpot_mean:1s")
    assert found.limits == (Limit("ttft", 0.2), Limit("tpot", 0.03), Limit("e2e", 5.0))
    assert found.demands == (
        Demand("ttft", "p99", 0.5),
        Demand("e2e", "p99.9", 7.5),
        Demand("itl", "p99.9", 0.05),
        Demand("tpot", "mean", 1.0),
    )
    assert slo.parse("e2e_p100:1s").demands[0].statistic == "p100"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft",
        "ttft:200",
        "ttft:200us",
        "ttft:-1s",
        "latency:1s",
        "ttft:1s,ttft:2s",
        "ttft_p150.5:1s",
        "ttft_p101:1s",
    ],
)
def test_invalid_objectives_are_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(LoadTestError, match="--slo: "):
        slo.parse(text)


def test_goodput_is_the_share_of_requests_that_met_all_limits() -> None:
    records = [
        answered(0, 0.0, [0.1, 0.2, 0.3]),
        answered(1, 0.0, [0.5, 0.6, 0.7]),  # late
        answered(2, 0.0, [0.1, 0.9, 1.0]),  # stutters
        answered(3, 0.0, [0.6, 2.0]),  # both
        answered(4, 0.0, [0.2]),  # has no pause, so none too long
        failed(5, 0.0, 0.1),
        Record(6, 9.0),  # the run had ended
    ]
    goodput = summary_of(records, "ttft:200ms,itl:500ms").full.goodput
    assert goodput is not None
    assert (goodput.num_good, goodput.num, goodput.num_failed) == (2, 6, 1)
    assert goodput.share == pytest.approx(1 / 3)
    assert goodput.requests_per_s == pytest.approx(1.0)
    assert goodput.num_missed == {"ttft": 2, "itl": 2}


def test_limits_count_from_the_intended_start() -> None:
    late_start = answered(0, 0.0, [1.0, 1.1], started_s=0.9)
    goodput = summary_of([late_start], "ttft:200ms").full.goodput
    assert goodput is not None and goodput.num_good == 0


def test_turns_lost_to_an_earlier_failure_count_as_failed() -> None:
    requests = [Request(0, 0.0, "", 1), *(Request(index, None, "", 1, follows=index - 1) for index in range(1, 6))]
    records = [answered(0, 0.0, [1.0]), failed(1, 1.0, 2.0), Record(2, 0.0), Record(3, 0.0)]
    requests[4] = Request(4, 0.0, "", 1)
    summary = summary_of([*records, Record(4, 0.0), Record(5, 0.0)], "ttft:2s", plan=planned(6, requests=requests))
    assert summary.full.goodput is not None
    assert (summary.full.goodput.num, summary.full.goodput.num_good) == (4, 1)
    assert (summary.num_lost_turns, summary.num_forestalled) == (2, 2)


def test_a_demand_counts_all_requests_and_failures_as_infinite() -> None:
    good = [answered(index, 0.0, [0.1 + index / 1000.0]) for index in range(99)]
    verdicts = summary_of(good, "ttft_p99:500ms,ttft_max:150ms,ttft_mean:1s").verdicts
    assert [each.is_met for each in verdicts] == [True, False, True]
    assert verdicts[0].value_s == pytest.approx(0.1 + 97.02 / 1000.0)
    mixed = [*good[:90], *(failed(index, 0.0, 0.001) for index in range(90, 99))]
    verdicts = summary_of(mixed, "ttft_p90:500ms,ttft_p99:500ms,ttft_mean:1s").verdicts
    assert [(each.is_met, each.value_s is None) for each in verdicts] == [(True, False), (False, True), (False, True)]


@pytest.mark.parametrize(("num_refused", "is_met"), [(50, False), (3, False), (1, True), (0, True)])
def test_refusing_requests_does_not_meet_a_demand_on_itl(num_refused: int, is_met: bool) -> None:
    gaps = 0.01 * np.arange(1, 201)
    records = [answered(index, 0.0, gaps.tolist()) for index in range(100 - num_refused)]
    records += [failed(100 + index, 0.0, 0.001) for index in range(num_refused)]
    verdicts = summary_of(records, "itl_p98:50ms").verdicts
    # A refused request is as many lost gaps as an answered one has: 3 of 100 are more than 2 in a hundred.
    assert [each.is_met for each in verdicts] == [is_met]


def test_requests_the_user_stopped_are_neither_good_nor_failed() -> None:
    cut = failed(1, 0.0, 0.1, Outcome.CUT)
    cut.error, cut.status = STOPPED_BY_USER, 200
    requests = [Request(index, 0.0, "", 1) for index in range(3)]
    requests.append(Request(3, None, "", 1, follows=1))
    kept = [answered(0, 0.0, [0.1]), cut, Record(2, 0.05, error=STOPPED_BY_USER), Record(3, 0.1)]
    summary = summary_of(kept, "ttft:200ms,e2e_p99:1s", plan=planned(4, requests=requests))
    goodput = summary.full.goodput
    assert goodput is not None and (goodput.num_good, goodput.num, goodput.num_failed) == (1, 1, 0)
    assert [each.is_met for each in summary.verdicts] == [True]
    assert (summary.num_forestalled, summary.num_lost_turns, summary.failures) == (2, 0, [])
    assert summary.outcomes == {"ok": 1, "cut": 1, "skipped": 2}
    assert summary.notes[0] == "2 of 4 planned requests were not started before the run ended; no figure counts them"
    assert len(summary.notes) == 2 and summary.notes[1].startswith("1 requests were in flight when the user stopped")
    # What the server cut is the server's.
    cut.error = "connection reset"
    assert [each.is_met for each in summary_of(kept, "e2e_p99:1s").verdicts] == [False]


def test_a_demand_without_measured_values_is_missed() -> None:
    assert [each.is_met for each in summary_of([answered(0, 0.0, [1.0])], "tpot_p50:1s").verdicts] == [False]


@pytest.mark.parametrize("name", ["ttft", "tpot", "itl"])
def test_limits_and_demands_without_measured_values_are_missed_with_a_note(name: str) -> None:
    whole = [answered(index, 0.0, [], ended_s=5.0, num_tokens=50) for index in range(10)]
    summary = summary_of(whole, f"{name}:10s,e2e:10s,{name}_p99:10s,e2e_p99:10s")
    assert summary.full.ttft_s is None and summary.full.e2e_s is not None
    goodput = summary.full.goodput
    assert goodput is not None and goodput.num_good == 0 and goodput.num_missed == {name: 10, "e2e": 0}
    assert [each.is_met for each in summary.verdicts] == [False, True]
    (note,) = summary.notes
    assert note.startswith(f"no answer has a measured {name} ")


def test_an_answer_without_a_token_misses_the_first_one_and_keeps_what_is_between() -> None:
    empty = [answered(0, 0.0, [0.1, 0.2]), answered(1, 0.0, [], ended_s=0.2, num_tokens=0)]
    summary = summary_of(empty, "ttft:1s,tpot:1s,ttft_max:1s,tpot_max:1s")
    assert summary.full.goodput is not None and summary.full.goodput.num_missed == {"ttft": 1, "tpot": 0}
    assert [each.is_met for each in summary.verdicts] == [False, True]
