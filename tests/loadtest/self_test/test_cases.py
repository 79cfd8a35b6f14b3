"""Test the self-test: its report on this client, and that a client with errors does not pass."""

from __future__ import annotations

import random

import msgspec
import pytest

from loadtest.running import connection_pool
from loadtest.running.clock import now_s
from loadtest.self_test import cases as self_test
from loadtest.self_test.cases import SelfTestReport
from loadtest.target import ApiFormat
from tests.support.timing import again_if_late, assert_on_time, assert_within


class Reports:
    """A report that all tests read. A test that finds it disturbed by other programs asks for another one."""

    def __init__(self) -> None:
        self._latest: SelfTestReport | None = None
        self._readers: set[str] = set()

    def read_by(self, test: str) -> SelfTestReport:
        if self._latest is None or test in self._readers:
            self._latest = _self_test()
            self._readers.clear()
        self._readers.add(test)
        return self._latest


def _self_test() -> SelfTestReport:
    """Shorter than a user's: one api, and pauses of a tenth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "NUM_CLOSED", 220)
        return self_test.self_test(apis=[ApiFormat.COMPLETIONS], rate=80.0, duration_s=0.25, stall_s=0.1, freeze_s=0.15)


@pytest.fixture(scope="module")
def reports() -> Reports:
    return Reports()


@again_if_late
def test_measured_times_match_the_servers_log(reports: Reports) -> None:
    report = reports.read_by("accuracy")
    (accuracy,) = report.accuracy
    assert accuracy.num_answered == accuracy.num_requests == 20 and not report.errors
    assert accuracy.ttft_error_s is not None and accuracy.itl_error_s is not None
    assert accuracy.itl_error_s.num == 20 * 19
    # At the median, for the 99th percentile of a machine that runs other tests is theirs.
    assert_within(0.002, accuracy.ttft_error_s.p50)
    assert_within(0.001, accuracy.itl_error_s.p50)


@again_if_late
def test_a_stalled_client_reports_its_lag(reports: Reports) -> None:
    report = reports.read_by("stall")
    lag_s = report.stall.loop_lag_s
    assert lag_s is not None
    assert_on_time(report.stall.is_good, "the client is late during its stall only")
    # For two fifths of the run, and by half of the pause in the mean.
    assert lag_s.max >= 0.09 and lag_s.p90 > 0.03
    assert report.stall.num_late_starts >= 3
    assert any("the client itself was up to" in note for note in report.stall.notes)
    assert not msgspec.structs.replace(report.stall, notes=[]).is_good, "whoever reads the summary has to be reported"


@again_if_late
def test_an_open_loop_sees_a_stalled_server_and_a_closed_loop_does_not(reports: Reports) -> None:
    omission = reports.read_by("omission").omission
    assert_on_time(omission.is_good, "the server stalls once only")
    assert omission.open_latency_s is not None and omission.closed_latency_s is not None
    assert omission.open_latency_s.p99 > 0.12
    assert_within(0.07, omission.closed_latency_s.p99)
    # Those who asked evenly during a pause of d waited from 0 to d: a third of all, d / 2 in the mean, or longer.
    assert omission.open_latency_s.mean > 0.4 * 0.15 / 2 / 3
    assert omission.closed_latency_s.max > 0.12, "somebody met it"


def test_the_self_test_detects_wrong_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(0)
    monkeypatch.setattr(connection_pool, "now_s", lambda: now_s() + draws.choice([0.0, 0.005]))
    errors: list[str] = []
    with self_test._reference_server() as url:
        accuracy = self_test._measure_accuracy(url, ApiFormat.GENERATE_STREAM, 100.0, 10, 0.1, errors)
    assert accuracy.num_answered == 10 and not accuracy.is_good
    assert accuracy.itl_error_s is not None and accuracy.itl_error_s.p99 > 0.004
