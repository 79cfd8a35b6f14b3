"""Measure the errors of this client on this machine, against the times that a reference server logged.

Three claims are tested. Measured times are correct to within 2 ms at the 99th percentile. A client that stalls reports
it. A server that stalls is seen by all requests that were due meanwhile (coordinated omission: Tene, "How NOT to
measure latency", 2015); a closed loop with the same server hardly sees it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from msgspec import Struct

from loadtest.analysis.measurements import measure
from loadtest.analysis.statistics import Distribution, Floats, distribution
from loadtest.analysis.summarise import summarise
from loadtest.analysis.summary import Environment
from loadtest.analysis.validity import CLIENT_WAS_LATE
from loadtest.errors import LoadTestError
from loadtest.planning.plan import Plan, Request
from loadtest.record import Outcome, Record
from loadtest.running.clock import now_s
from loadtest.running.metrics_scraper import get
from loadtest.running.runner import Runner, ShareResult
from loadtest.self_test.reference_server import Schedule, Written
from loadtest.target import ApiFormat, Target

MAX_ERROR_S = 0.002  # at the 99th percentile
HEAD_START_S = 0.05
NUM_CLOSED, NUM_CLOSED_CLIENTS = 600, 2
CLOSED_FREEZE_AT_S = 0.1
STREAMED = (ApiFormat.GENERATE_STREAM, ApiFormat.COMPLETIONS, ApiFormat.CHAT, ApiFormat.TGI)


class Accuracy(Struct):
    """For one API: the differences between what was measured and what the server logged.

    The server counts the time of a first token from the arrival of the request, the client from its start. The error
    therefore includes the way there and back, and the opening of a connection.
    """

    api: ApiFormat
    num_requests: int
    num_answered: int
    ttft_error_s: Distribution | None
    itl_error_s: Distribution | None
    start_lag_s: Distribution | None  # from intended starts
    loop_lag_s: Distribution | None

    @property
    def is_good(self) -> bool:
        errors = (self.ttft_error_s, self.itl_error_s)
        are_small = all(error is not None and error.p99 <= MAX_ERROR_S for error in errors)
        return are_small and self.num_answered == self.num_requests


class Stall(Struct):
    """The client was stalled on purpose for so long."""

    stall_s: float
    loop_lag_s: Distribution | None
    num_late_starts: int  # by more than a tenth of the stall
    notes: list[str]  # of the summary

    @property
    def is_good(self) -> bool:
        """Whether the lag was measured, and the summary has a note about it."""
        is_noted = any(note.startswith(CLIENT_WAS_LATE) for note in self.notes)
        is_seen = self.loop_lag_s is not None and self.loop_lag_s.max >= 0.9 * self.stall_s
        return is_seen and self.num_late_starts > 0 and is_noted


class Omission(Struct):
    """The server was stalled for so long. Latencies are to the end of the answer."""

    freeze_s: float
    open_latency_s: Distribution | None  # from intended starts
    closed_latency_s: Distribution | None  # from actual starts, of clients that wait for each answer

    @property
    def is_good(self) -> bool:
        if self.open_latency_s is None or self.closed_latency_s is None:
            return False
        return self.open_latency_s.p99 >= 0.8 * self.freeze_s and self.closed_latency_s.p99 < 0.5 * self.freeze_s


class SelfTestReport(Struct):
    accuracy: list[Accuracy]
    stall: Stall
    omission: Omission
    errors: list[str]

    @property
    def is_good(self) -> bool:
        are_accurate = all(accuracy.is_good for accuracy in self.accuracy)
        return are_accurate and self.stall.is_good and self.omission.is_good and not self.errors


def self_test(
    *,
    apis: Sequence[ApiFormat] = STREAMED,
    rate: float = 50.0,
    num_tokens: int = 20,
    duration_s: float = 3.0,
    stall_s: float = 0.3,
    freeze_s: float = 2.0,
) -> SelfTestReport:
    """Run all cases, one after the other, each for about `duration_s`; the last one takes five times `freeze_s`."""
    errors: list[str] = []
    with _reference_server() as url:
        accuracy = [_measure_accuracy(url, api, rate, num_tokens, duration_s, errors) for api in apis]
        stall = _stall(url, rate, num_tokens, duration_s, stall_s, errors)
        omission = _freeze(url, rate, freeze_s, errors)
    return SelfTestReport(accuracy, stall, omission, errors)


# -- the cases ---------------------------------------------------------------------------------------------------------


def _measure_accuracy(
    url: str, api: ApiFormat, rate: float, num_tokens: int, duration_s: float, errors: list[str]
) -> Accuracy:
    plan = _plan(rate, duration_s, num_tokens, first_s=0.02, gap_s=0.01)
    result = _run(Target([url], api, verifies=api is not ApiFormat.CHAT), plan)
    errors += result.errors
    written = _written(url)
    ttft_errors, itl_errors = [], []
    answered = [record for record in result.records if record.outcome is Outcome.OK]
    for record in answered:
        truth = written[record.index]
        assert len(truth.sent_s) == len(record.token_times_s) == num_tokens
        measured_s = record.token_times_s[0] - record.started_s
        ttft_errors.append(abs(measured_s - (truth.sent_s[0] - truth.received_s)))
        itl_errors.append(np.abs(np.diff(record.token_times_s) - np.diff(truth.sent_s)))
    return Accuracy(
        api,
        len(plan.requests),
        len(answered),
        distribution(np.array(ttft_errors)),
        distribution(np.concatenate(itl_errors)) if itl_errors else None,
        distribution(_start_lags(result.records)),
        distribution(np.array(result.lags_s)),
    )


def _stall(url: str, rate: float, num_tokens: int, duration_s: float, stall_s: float, errors: list[str]) -> Stall:
    plan = _plan(rate, duration_s, num_tokens, first_s=0.02, gap_s=0.01)
    target = Target([url], ApiFormat.GENERATE_STREAM, verifies=True)
    result = _run(target, plan, at_s=duration_s / 2, then=lambda: time.sleep(stall_s))
    errors += result.errors
    num_late = int((_start_lags(result.records) > 0.1 * stall_s).sum())
    no_environment = Environment("", "", "", "")
    summary = summarise(plan, measure(result.records), target, no_environment, event_loop_lags_s=result.lags_s)
    return Stall(stall_s, summary.event_loop_lag_s, num_late, summary.notes)


def _freeze(url: str, rate: float, freeze_s: float, errors: list[str]) -> Omission:
    """Stall the same server twice: once in an open loop, once in a closed loop."""
    target = Target([url], ApiFormat.GENERATE_STREAM, verifies=True)
    plan = _plan(rate, 3 * freeze_s, num_tokens=1, first_s=0.002, gap_s=0.0)
    met = _run(target, plan, at_s=freeze_s, then=lambda: _request_freeze(url, freeze_s))
    # However long the stall, at most two of these requests see it, which is less than one in a hundred.
    requests = _plan(rate, NUM_CLOSED / rate, num_tokens=1, first_s=0.002, gap_s=0.0).requests
    closed = Plan(requests, f"closed:{NUM_CLOSED_CLIENTS}", "known schedules", seed=0, num_clients=NUM_CLOSED_CLIENTS)
    omitted = _run(target, closed, at_s=CLOSED_FREEZE_AT_S, then=lambda: _request_freeze(url, freeze_s))
    errors += met.errors + omitted.errors
    return Omission(
        freeze_s,
        distribution(np.array([record.ended_s - record.intended_s for record in met.records])),
        distribution(np.array([record.ended_s - record.started_s for record in omitted.records])),
    )


# -- how ---------------------------------------------------------------------------------------------------------------


def _plan(rate: float, duration_s: float, num_tokens: int, first_s: float, gap_s: float) -> Plan:
    """Even starts, at all offsets within a millisecond."""
    requests = [
        Request(number, number / rate, Schedule(number, first_s, gap_s, seed=number).prompt(), num_tokens)
        for number in range(max(1, int(rate * duration_s)))
    ]
    return Plan(requests, f"constant:{rate:g}", "known schedules", seed=0)


def _run(target: Target, plan: Plan, at_s: float = 0.0, then: Callable[[], object] | None = None) -> ShareResult:
    """Run in this process, whose loop does nothing else except `then` at its time."""
    start_s = now_s() + HEAD_START_S

    async def run() -> ShareResult:
        if then is not None:
            asyncio.get_running_loop().call_later(HEAD_START_S + at_s, then)
        return await Runner(target, plan).run(start_s)

    return uvloop.run(run())


def _request_freeze(url: str, freeze_s: float) -> None:
    """Send the request from another thread, because the loop has to measure."""
    threading.Thread(target=get, args=(url, f"/freeze/{freeze_s}")).start()


def _written(url: str) -> dict[int, Written]:
    answer = get(url, "/written")
    if answer is None:
        raise LoadTestError(f"the reference server at {url} has ended; run the self-test again")
    return msgspec.json.decode(answer[1], type=dict[int, Written])


@contextmanager
def _reference_server() -> Iterator[str]:
    """Start the server in a process of its own: sharing our loop, it would be late whenever we are."""
    command = [sys.executable, "-m", "loadtest.self_test.reference_server"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        if not port:
            raise LoadTestError("the reference server did not start; see its output above")
        yield f"http://127.0.0.1:{port}"  # its stdin is closed afterwards, which ends it


def _start_lags(records: Sequence[Record]) -> Floats:
    return np.array([record.started_s - record.intended_s for record in records])
