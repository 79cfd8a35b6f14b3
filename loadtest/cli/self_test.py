"""`self-test`: print how far this client's measurements can be trusted on this machine."""

from __future__ import annotations

import argparse

from loadtest.cli.exit_codes import OBJECTIVE_MISSED, SUCCESS
from loadtest.errors import LoadTestError
from loadtest.reporting.formatting import as_time
from loadtest.self_test.cases import MAX_ERROR_S, self_test

MIN_RATE, MAX_RATE = 1.0, 10_000.0  # requests/s


def run_self_test(arguments: argparse.Namespace) -> int:
    if not MIN_RATE <= arguments.rate <= MAX_RATE:
        raise LoadTestError(f"--rate {arguments.rate:g} is not within {MIN_RATE:g} to {MAX_RATE:g} requests/s")
    report = self_test(rate=arguments.rate)
    for each in report.accuracy:
        errors = ", ".join(
            f"{name} error {as_time(error.p50)} (p50), {as_time(error.p99)} (p99)"
            for name, error in (("TTFT", each.ttft_error_s), ("ITL", each.itl_error_s))
            if error is not None
        )
        print(f"{each.api}: {each.num_answered} of {each.num_requests} answered; {errors}; {_passed(each.is_good)}")
    stall, omission = report.stall, report.omission
    lag = "none" if stall.loop_lag_s is None else as_time(stall.loop_lag_s.max)
    print(
        f"client stalled for {as_time(stall.stall_s)}: reported event loop lag {lag}, late starts "
        f"{stall.num_late_starts}; {_passed(stall.is_good)}"
    )
    if omission.open_latency_s and omission.closed_latency_s:
        print(
            f"server stalled for {as_time(omission.freeze_s)}: p99 latency {as_time(omission.open_latency_s.p99)} from "
            f"intended starts; a closed loop reports {as_time(omission.closed_latency_s.p99)}; "
            f"{_passed(omission.is_good)}"
        )
    for error in report.errors:
        print(f"client error: {error}")
    print(f"allowed error at p99: {as_time(MAX_ERROR_S)}; {_passed(report.is_good)}")
    return SUCCESS if report.is_good else OBJECTIVE_MISSED


def _passed(is_good: bool) -> str:
    return "passed" if is_good else "FAILED"
