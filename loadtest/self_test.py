"""How far this client can be believed, on this machine: its times held against those that a server wrote down.

Three claims are put to the test. What is measured is right to within 2 ms at the 99th percentile. A client that stands
still reports it. And a server that stands still is seen by all who meant to ask meanwhile (the coordinated omission of
Tene, "How NOT to measure latency", 2015), of which a closed loop, asked the same way, sees next to nothing.
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

from loadtest.clock import now_s
from loadtest.errors import LoadTestError
from loadtest.known_server import Schedule, Written
from loadtest.planned import Plan, Request
from loadtest.record import Outcome, Record
from loadtest.runner import Runner, ShareResult
from loadtest.scrape import get
from loadtest.statistics import Distribution, Floats, distribution
from loadtest.summary import CLIENT_WAS_LATE, Environment, summarise
from loadtest.target import Door, Target
from loadtest.timeline import measure

MAX_ERROR_S = 0.002  # at the 99th percentile
HEAD_START_S = 0.05
NUM_CLOSED, NUM_CLOSED_CLIENTS = 600, 2
CLOSED_FREEZE_AT_S = 0.1
STREAMED = (Door.GENERATE_STREAM, Door.COMPLETIONS, Door.CHAT, Door.TGI)


class Accuracy(Struct):
    """At one door: the amounts by which what was measured differs from what was written down.

    A first token's time is counted there from when the request had come, and here from when it was begun: so its error
    holds the way there and back, and the making of a connection.
    """

    door: Door
    num_requests: int
    num_answered: int
    ttft_error_s: Distribution | None
    itl_error_s: Distribution | None
    start_lag_s: Distribution | None  # from intended starts to actual ones
    loop_lag_s: Distribution | None

    @property
    def is_good(self) -> bool:
        errors = (self.ttft_error_s, self.itl_error_s)
        are_small = all(error is not None and error.p99 <= MAX_ERROR_S for error in errors)
        return are_small and self.num_answered == self.num_requests


class Stall(Struct):
    """The client stood still for so long, on purpose."""

    stall_s: float
    loop_lag_s: Distribution | None
    num_late_starts: int  # by more than a tenth of the stall
    notes: list[str]  # of the summary

    @property
    def is_good(self) -> bool:
        """And whoever reads the summary is told."""
        is_noted = any(note.startswith(CLIENT_WAS_LATE) for note in self.notes)
        is_seen = self.loop_lag_s is not None and self.loop_lag_s.max >= 0.9 * self.stall_s
        return is_seen and self.num_late_starts > 0 and is_noted


class Omission(Struct):
    """The server stood still for so long. Latencies are to the end of the answer."""

    freeze_s: float
    open_latency_s: Distribution | None  # from intended starts
    closed_latency_s: Distribution | None  # from actual ones, of clients that ask again only when they were answered

    @property
    def is_good(self) -> bool:
        if self.open_latency_s is None or self.closed_latency_s is None:
            return False
        return self.open_latency_s.p99 >= 0.8 * self.freeze_s and self.closed_latency_s.p99 < 0.5 * self.freeze_s


class SelfTestReport(Struct):
    accuracy: list[Accuracy]
    stall: Stall
    omission: Omission
    troubles: list[str]

    @property
    def is_good(self) -> bool:
        are_accurate = all(accuracy.is_good for accuracy in self.accuracy)
        return are_accurate and self.stall.is_good and self.omission.is_good and not self.troubles


def self_test(
    *,
    doors: Sequence[Door] = STREAMED,
    rate: float = 50.0,
    num_tokens: int = 20,
    duration_s: float = 3.0,
    stall_s: float = 0.3,
    freeze_s: float = 2.0,
) -> SelfTestReport:
    """All cases, one after the other, each for about `duration_s`, but the last, which takes five times `freeze_s`."""
    troubles: list[str] = []
    with _known_server() as url:
        accuracy = [_measure_accuracy(url, door, rate, num_tokens, duration_s, troubles) for door in doors]
        stall = _stall(url, rate, num_tokens, duration_s, stall_s, troubles)
        omission = _freeze(url, rate, freeze_s, troubles)
    return SelfTestReport(accuracy, stall, omission, troubles)


# -- the cases ---------------------------------------------------------------------------------------------------------


def _measure_accuracy(
    url: str, door: Door, rate: float, num_tokens: int, duration_s: float, troubles: list[str]
) -> Accuracy:
    plan = _plan(rate, duration_s, num_tokens, first_s=0.02, gap_s=0.01)
    result = _run(Target([url], door, verifies=door is not Door.CHAT), plan)
    troubles += result.troubles
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
        door,
        len(plan.requests),
        len(answered),
        distribution(np.array(ttft_errors)),
        distribution(np.concatenate(itl_errors)) if itl_errors else None,
        distribution(_start_lags(result.records)),
        distribution(np.array(result.lags_s)),
    )


def _stall(url: str, rate: float, num_tokens: int, duration_s: float, stall_s: float, troubles: list[str]) -> Stall:
    plan = _plan(rate, duration_s, num_tokens, first_s=0.02, gap_s=0.01)
    target = Target([url], Door.GENERATE_STREAM, verifies=True)
    result = _run(target, plan, at_s=duration_s / 2, then=lambda: time.sleep(stall_s))
    troubles += result.troubles
    num_late = int((_start_lags(result.records) > 0.1 * stall_s).sum())
    nowhere = Environment("", "", "", "")
    summary = summarise(plan, measure(result.records), target, nowhere, event_loop_lags_s=result.lags_s)
    return Stall(stall_s, summary.event_loop_lag_s, num_late, summary.notes)


def _freeze(url: str, rate: float, freeze_s: float, troubles: list[str]) -> Omission:
    """The same server, frozen twice: met by those who ask on, and by those who wait."""
    target = Target([url], Door.GENERATE_STREAM, verifies=True)
    plan = _plan(rate, 3 * freeze_s, num_tokens=1, first_s=0.002, gap_s=0.0)
    met = _run(target, plan, at_s=freeze_s, then=lambda: _tell_to_freeze(url, freeze_s))
    # However long the freeze, no more than two requests of them all see it, which is less than one in a hundred.
    requests = _plan(rate, NUM_CLOSED / rate, num_tokens=1, first_s=0.002, gap_s=0.0).requests
    closed = Plan(requests, f"closed:{NUM_CLOSED_CLIENTS}", "known schedules", seed=0, num_clients=NUM_CLOSED_CLIENTS)
    omitted = _run(target, closed, at_s=CLOSED_FREEZE_AT_S, then=lambda: _tell_to_freeze(url, freeze_s))
    troubles += met.troubles + omitted.troubles
    return Omission(
        freeze_s,
        distribution(np.array([record.ended_s - record.intended_s for record in met.records])),
        distribution(np.array([record.ended_s - record.started_s for record in omitted.records])),
    )


# -- how ---------------------------------------------------------------------------------------------------------------


def _plan(rate: float, duration_s: float, num_tokens: int, first_s: float, gap_s: float) -> Plan:
    """Evenly, so that a start is at an unlike place of every millisecond."""
    requests = [
        Request(number, number / rate, Schedule(number, first_s, gap_s, seed=number).prompt(), num_tokens)
        for number in range(max(1, int(rate * duration_s)))
    ]
    return Plan(requests, f"constant:{rate:g}", "known schedules", seed=0)


def _run(target: Target, plan: Plan, at_s: float = 0.0, then: Callable[[], object] | None = None) -> ShareResult:
    """In this process, whose loop does nothing else but `then`, at its time."""
    start_s = now_s() + HEAD_START_S

    async def run() -> ShareResult:
        if then is not None:
            asyncio.get_running_loop().call_later(HEAD_START_S + at_s, then)
        return await Runner(target, plan).run(start_s)

    return uvloop.run(run())


def _tell_to_freeze(url: str, freeze_s: float) -> None:
    """Without waiting for it, for the loop that is asked has to measure."""
    threading.Thread(target=get, args=(url, f"/freeze/{freeze_s}")).start()


def _written(url: str) -> dict[int, Written]:
    answer = get(url, "/written")
    if answer is None:
        raise LoadTestError(f"the built-in server at {url} is gone; run the self-test again")
    return msgspec.json.decode(answer[1], type=dict[int, Written])


@contextmanager
def _known_server() -> Iterator[str]:
    """In a process of its own: a server that shares our loop would be late whenever we are."""
    command = [sys.executable, "-m", "loadtest.known_server"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        if not port:
            raise LoadTestError("the built-in server did not start; what it says stands above")
        yield f"http://127.0.0.1:{port}"  # and then its stdin is closed, which ends it


def _start_lags(records: Sequence[Record]) -> Floats:
    return np.array([record.started_s - record.intended_s for record in records])
