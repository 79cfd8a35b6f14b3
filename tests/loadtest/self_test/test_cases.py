"""Test the self-test: its report on this client, and that a client with errors does not pass."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest

from loadtest.running import connection_pool
from loadtest.running.clock import now_s
from loadtest.self_test import cases as self_test
from loadtest.self_test.cases import SelfTestReport
from loadtest.target import ApiFormat


@pytest.fixture(scope="module")
def report() -> Iterator[SelfTestReport]:
    """Shorter than a user's: one api, and pauses of a tenth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "NUM_CLOSED", 220)
        yield self_test.self_test(apis=[ApiFormat.COMPLETIONS], rate=80.0, duration_s=0.25, stall_s=0.1, freeze_s=0.15)


def test_measured_times_match_the_servers_log(report: SelfTestReport) -> None:
    (accuracy,) = report.accuracy
    assert accuracy.num_answered == accuracy.num_requests == 20 and not report.errors
    assert accuracy.ttft_error_s is not None and accuracy.itl_error_s is not None
    assert accuracy.itl_error_s.num == 20 * 19
    # At the median, for the 99th percentile of a machine that runs other tests is theirs.
    assert accuracy.ttft_error_s.p50 < 0.002
    assert accuracy.itl_error_s.p50 < 0.001


def test_a_stalled_client_reports_its_lag(report: SelfTestReport) -> None:
    lag_s = report.stall.loop_lag_s
    assert lag_s is not None and report.stall.is_good
    # For two fifths of the run, and by half of the pause in the mean.
    assert lag_s.max >= 0.09 and lag_s.p90 > 0.03
    assert report.stall.num_late_starts >= 3
    assert any("the client itself was up to" in note for note in report.stall.notes)
    assert not msgspec.structs.replace(report.stall, notes=[]).is_good, "whoever reads the summary has to be reported"


def test_an_open_loop_sees_a_stalled_server_and_a_closed_loop_does_not(report: SelfTestReport) -> None:
    omission = report.omission
    assert omission.is_good
    assert omission.open_latency_s is not None and omission.closed_latency_s is not None
    assert omission.open_latency_s.p99 > 0.12 > 0.07 > omission.closed_latency_s.p99
    # Those who asked evenly during a pause of d waited from 0 to d: a third of all, d / 2 in the mean.
    assert omission.open_latency_s.mean == pytest.approx(0.15 / 2 / 3, rel=0.6)
    assert omission.closed_latency_s.max > 0.12, "somebody met it"


def test_the_self_test_detects_wrong_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(0)
    monkeypatch.setattr(connection_pool, "now_s", lambda: now_s() + draws.choice([0.0, 0.005]))
    errors: list[str] = []
    with self_test._reference_server() as url:
        accuracy = self_test._measure_accuracy(url, ApiFormat.GENERATE_STREAM, 100.0, 10, 0.1, errors)
    assert accuracy.num_answered == 10 and not accuracy.is_good
    assert accuracy.itl_error_s is not None and accuracy.itl_error_s.p99 > 0.004
