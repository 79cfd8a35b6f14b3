"""Run one process's share of a plan: start each request when it is due, and record its answer.

Long work is cut into slices, between which the loop receives data: bytes that are received late get a wrong time,
while a request that starts late is reported as late. Answers that nothing waits for are parsed when the loop is idle.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import resource
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct, field

from loadtest.planning.plan import Plan, Request
from loadtest.record import STOPPED_BY_USER, Outcome, Record
from loadtest.running.address import Address, check_sources, resolve
from loadtest.running.api_formats import PATHS
from loadtest.running.clock import Heartbeat, Timer, now_s
from loadtest.running.connection_pool import Pool
from loadtest.running.exchange import Exchange
from loadtest.running.expected_answers import difference
from loadtest.running.query import Query, Turn
from loadtest.target import ApiFormat, Target, check_target

HEARTBEAT_S = 0.01
BEATS_PER_PROGRESS = 25
BEATS_PER_SWEEP = 5  # between checks for timed-out requests
SLICE_S = 0.0005  # of deferrable work in one turn of the loop
MAX_RECENT = 1000  # first tokens in one report
PROBE_TIMEOUT_S = 2.0


class Progress(Struct):
    """How far a share, or a whole run, has come."""

    elapsed_s: float = 0.0
    num_planned: int = 0
    num_begun: int = 0
    num_in_flight: int = 0
    num_ok: int = 0  # of answers that were read
    num_failed: int = 0
    num_skipped: int = 0
    num_tokens: int = 0  # of answers that were read
    first_s: list[float] = field(default_factory=list)  # from intended starts to first bytes, since the last report


class ShareResult(Struct):
    """The result of one client process."""

    records: list[Record]
    lags_s: list[float]  # of its event loop: element i is the delay of the beat due i * HEARTBEAT_S after the start
    cpu_s: float  # of the process, from its beginning
    max_rss_bytes: int
    errors: list[str]  # unexpected exceptions


class _Client:
    """One client of a closed loop. It is free when all requests that were started for it have ended."""

    __slots__ = ("num_open",)

    def __init__(self) -> None:
        self.num_open = 0


class Runner:
    """Runs a share of a plan, once. All callbacks come from the thread of the loop."""

    def __init__(
        self,
        target: Target,
        plan: Plan,
        *,
        model: str | None = None,
        process: int = 0,
        sources: Sequence[str] = (),
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """`target.max_connections` is this process's own. Raises LoadTestError for what cannot be run."""
        check_target(target)
        self._target = target
        self._model = model
        self._followers = {each.follows: each for each in plan.requests if each.follows is not None}
        self._plan = plan
        self._process = process
        self._sources = sources
        self._addresses = [_first_reachable(resolve(url)) for url in target.urls]
        check_sources(sources, self._addresses)
        self.refusal = ""  # the server's message for the first request that it refused
        self._on_progress = on_progress
        self._progress = Progress(num_planned=len(plan.requests))
        self._batches = deque(_batches(plan, target.batch_size if target.api is ApiFormat.GENERATE else 1))
        self._later: list[tuple[float, int, Turn]] = []  # a heap of later turns, by due time
        self._in_flight: dict[Query, None] = {}  # in the order of their starts, and so of their timeouts
        self._unread: deque[Query] = deque()  # ended, not read yet
        self._full: deque[Query] = deque()  # in progress, with much unread
        self._begins_soon = self._reads_soon = False
        self._records: list[Record] = []
        self._to_verify: list[tuple[Record, Turn, str]] = []
        self._with_extra_bytes: set[int] = set()  # requests whose connection brought bytes after the answer
        self._errors: list[str] = []
        self._is_stopped = False
        self._num_beats = 0

    async def run(self, start_s: float) -> ShareResult:
        """Run the whole share from `start_s` on the clock, which should not have passed."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        self._start_s = start_s
        self._end_s = None if self._plan.duration_s is None else start_s + self._plan.duration_s
        self._done = asyncio.Event()
        target = self._target
        self._pool = Pool(
            self._loop,
            self._addresses,
            PATHS[target.api],
            target.api_key,
            self._sources,
            target.max_connections,
            self._note_extra_bytes,
            keep_alive=target.keep_alive,
        )
        self._num_clients_to_begin = self._plan.num_clients
        self._timer = Timer(self._loop, self._begin_due)
        self._heartbeat = Heartbeat(self._loop, start_s, HEARTBEAT_S, self._beat)
        # A full garbage collection visits every object of every stream. With 17,000 streams it took 80 ms, which would
        # falsify every time in between. Connections break their reference cycles when they end, so there is nothing to
        # collect. (`gc.freeze` would exclude only objects from before the run, which are few.)
        gc.disable()
        try:
            self._timer.set(start_s)
            await self._done.wait()
        finally:
            if not self._is_stopped:
                self._heartbeat.stop()
            self._timer.close()
            await self._pool.close()
            self._loop.set_exception_handler(None)
            gc.enable()
        self._verify()
        self._mark_extra_bytes()
        self._report()
        used = resource.getrusage(resource.RUSAGE_SELF)
        return ShareResult(
            sorted(self._records, key=lambda record: record.index),
            self._heartbeat.lags_s,
            used.ru_utime + used.ru_stime,
            used.ru_maxrss * 1024,
            self._errors,
        )

    def stop(self) -> None:
        """End the run now. Requests in flight are cut and recorded as cut by the user; others are not started."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._heartbeat.stop()  # nothing is measured from here on, so long work does no harm
        for query in list(self._in_flight):
            self._pool.cancel(query, Outcome.CUT if query.started_s else Outcome.SKIPPED, STOPPED_BY_USER)
        self._begin_due()

    # -- beginning -----------------------------------------------------------------------------------------------------

    def _begin_due(self) -> None:
        """Start what is due, in order, for a slice of time; then let the loop receive, and continue."""
        self._begins_soon = False
        slice_end_s = now_s() + SLICE_S
        while (due_s := self._next_due_s()) is not None:
            now = now_s()
            if self._is_stopped or (self._end_s is not None and now >= self._end_s):
                self._skip_some(slice_end_s)
                break
            if due_s > now:
                self._timer.set(due_s if self._end_s is None else min(due_s, self._end_s))
                return
            if now >= slice_end_s:
                self._begin_soon()
                return
            self._begin_next(due_s)
        self._check_end()

    def _begin_soon(self) -> None:
        if not self._begins_soon:
            self._begins_soon = True
            self._loop.call_soon(self._begin_due)

    def _next_due_s(self) -> float | None:
        """Return the next due time on the clock; None if only ends are left to wait for."""
        due_s = self._later[0][0] if self._later else None
        if self._batches and self._num_clients_to_begin != 0:
            begins_s = self._start_s
            if self._num_clients_to_begin is None:
                begins_s += max(request.intended_s or 0.0 for request in self._batches[0])
            due_s = begins_s if due_s is None else min(due_s, begins_s)
        return due_s

    def _begin_next(self, due_s: float) -> None:
        if self._later and self._later[0][0] <= due_s:
            _, _, turn = heapq.heappop(self._later)
            self._begin([turn], due_s)
        elif self._num_clients_to_begin is None:
            # A batch is one request, and it does not exist before its last prompt does.
            self._begin([Turn(request, (request.prompt,), None) for request in self._batches.popleft()], due_s)
        else:
            self._num_clients_to_begin -= 1
            self._start_next_of(_Client())

    def _start_next_of(self, client: _Client) -> None:
        """A client of a closed loop sends its next request, if there is any."""
        if not self._batches or self._is_stopped or (self._end_s is not None and now_s() >= self._end_s):
            return
        turns = [Turn(request, (request.prompt,), client) for request in self._batches.popleft()]
        client.num_open = len(turns)
        self._begin(turns, now_s())

    def _begin(self, turns: Sequence[Turn], intended_s: float) -> None:
        keeps_text = self._target.verifies or turns[0].request.index in self._followers
        query = Query(self, self._target, self._model, turns, intended_s, keeps_text)
        self._in_flight[query] = None
        self._progress.num_begun += len(turns)
        self._progress.num_in_flight += len(turns)
        self._pool.send(query)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def on_query_end(self, query: Query) -> None:
        """Read the answer now if a later turn waits for it; otherwise when the loop is idle."""
        del self._in_flight[query]
        turns = query.turns
        self._progress.num_in_flight -= len(turns)
        if any(turn.request.index in self._followers for turn in turns):
            self._record_answers(query)
            self._begin_soon()
        else:
            self._unread.append(query)
            self._read_soon()
        for turn in turns:
            if turn.request.index not in self._followers:
                self._release_client(turn.client)

    def _release_client(self, client: _Client | None) -> None:
        if client is None:
            return
        client.num_open -= 1
        if client.num_open == 0:
            self._start_next_of(client)

    def on_buffer_full(self, query: Query) -> None:
        """Streams that the server serves in step fill up together; reading them all at once would delay their times."""
        self._full.append(query)
        self._read_soon()

    def _read_soon(self) -> None:
        if not self._reads_soon:
            self._reads_soon = True
            self._loop.call_soon(self._read_some)

    def _read_some(self) -> None:
        self._reads_soon = False
        slice_end_s = now_s() + SLICE_S
        while now_s() < slice_end_s:
            if self._full:
                query = self._full.popleft()
                if not query.is_ended:
                    query.read()
            elif self._unread:
                self._record_answers(self._unread.popleft())
            else:
                self._check_end()
                return
        self._read_soon()

    def _check_end(self) -> None:
        if self._in_flight or self._unread or self._later:
            return
        if self._batches:
            if self._next_due_s() is not None:
                return
            self._skip_some(now_s() + SLICE_S)  # in a closed loop whose clients have all stopped
            if self._batches:
                return
        self._done.set()

    def _skip_some(self, until_s: float) -> None:
        """Of a large plan a million requests may be left while answers to earlier ones still come."""
        reason = STOPPED_BY_USER if self._is_stopped else "the run ended"
        while self._batches or self._later:
            if now_s() >= until_s:
                self._begin_soon()
                return
            if self._batches:
                for request in self._batches.popleft():
                    self._skip(request, (request.intended_s or 0.0), reason)
            else:
                due_s, _, turn = heapq.heappop(self._later)
                self._skip(turn.request, due_s - self._start_s, reason)

    def _skip(self, request: Request, intended_s: float, reason: str) -> None:
        """Record the request and its later turns as not started."""
        following: Request | None = request
        while following is not None:
            self._add_record(
                Record(following.index, intended_s, error=reason, process=self._process, group=following.group)
            )
            following = self._followers.get(following.index)

    # -- what became of it ---------------------------------------------------------------------------------------------

    def _record_answers(self, query: Query) -> None:
        """Record the answers of a query, and continue the conversations that it belongs to."""
        self.refusal = self.refusal or query.refusal
        for turn, record, text in zip(query.turns, *query.records(self._start_s, self._process), strict=True):
            self._add_record(record)
            if self._target.verifies and record.outcome is Outcome.OK:
                self._to_verify.append((record, turn, text))
            following = self._followers.get(turn.request.index)
            if following is None:
                continue
            if record.outcome is Outcome.OK and not self._is_stopped:
                history = (*turn.history, text, following.prompt)
                due_s = query.ended_s + following.think_s
                heapq.heappush(self._later, (due_s, following.index, Turn(following, history, turn.client)))
            else:
                reason = STOPPED_BY_USER if self._is_stopped else "the turn before failed"
                self._skip(following, query.ended_s - self._start_s, reason)
                self._release_client(turn.client)

    def _add_record(self, record: Record) -> None:
        self._records.append(record)
        progress = self._progress
        if record.outcome is Outcome.OK:
            progress.num_ok += 1
        elif record.outcome is Outcome.SKIPPED:
            progress.num_skipped += 1
        else:
            progress.num_failed += 1
        progress.num_tokens += record.num_output_tokens

    def _verify(self) -> None:
        """Compare answers after the run: it takes ten microseconds an answer."""
        for record, turn, text in self._to_verify:
            if (error := difference("".join(turn.history), turn.request.max_tokens, text)) is not None:
                record.outcome, record.error = Outcome.WRONG, error
                self._progress.num_ok -= 1
                self._progress.num_failed += 1

    def _note_extra_bytes(self, exchange: Exchange) -> None:
        assert isinstance(exchange, Query)
        self._with_extra_bytes.update(turn.request.index for turn in exchange.turns)

    def _mark_extra_bytes(self) -> None:
        """After the run, as an answer may have been read before more bytes came."""
        for record in self._records:
            if record.index in self._with_extra_bytes and record.outcome is Outcome.OK:
                record.outcome, record.error = Outcome.GARBLED, "bytes after the end"
                self._progress.num_ok -= 1
                self._progress.num_failed += 1

    # -- time ----------------------------------------------------------------------------------------------------------

    def on_first_byte(self, first_s: float) -> None:
        if len(self._progress.first_s) < MAX_RECENT:
            self._progress.first_s.append(first_s)

    def _beat(self) -> None:
        self._num_beats += 1
        if self._num_beats % BEATS_PER_SWEEP == 0:
            self._cancel_timed_out()
        if self._num_beats % BEATS_PER_PROGRESS == 0:
            self._report()

    def _cancel_timed_out(self) -> None:
        oldest_s = now_s() - self._target.timeout_s
        late = []
        for query in self._in_flight:
            if query.begun_s > oldest_s:
                break
            late.append(query)
        for query in late:
            where = "in the middle of" if query.first_s else "before" if query.started_s else "without a connection for"
            self._pool.cancel(query, Outcome.TIMEOUT, f"{where} the answer")

    def _report(self) -> None:
        if self._on_progress is None:
            return
        self._progress.elapsed_s = now_s() - self._start_s
        self._on_progress(self._progress)
        self._progress.first_s.clear()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Keep what asyncio would write to the log."""
        del loop
        message, error = context.get("message", ""), context.get("exception")
        if len(self._errors) < 10:
            self._errors.append(f"{message}: {error!r}" if error is not None else message)


def _batches(plan: Plan, batch_size: int) -> list[list[Request]]:
    """Group neighbours in the plan with the same `max_tokens`, which a body gives once for all its prompts."""
    first_turns = [request for request in plan.requests if request.follows is None]
    if batch_size == 1:
        return [[request] for request in first_turns]
    batches = []
    for _, alike in groupby(first_turns, key=lambda request: request.max_tokens):
        run = list(alike)
        batches += [run[begin : begin + batch_size] for begin in range(0, len(run), batch_size)]
    return batches


def _first_reachable(addresses: Sequence[Address]) -> Address:
    """Return the first address with a server: a name such as localhost may stand for ::1 and 127.0.0.1."""
    if len(addresses) == 1:
        return addresses[0]
    for address in addresses:
        with socket.socket(address.family, socket.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            if probe.connect_ex(address.socket_address) == 0:
                return address
    return addresses[0]
