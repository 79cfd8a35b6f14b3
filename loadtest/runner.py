"""One process's share of a run: begins each request when it is due, and writes down what became of it.

Whatever takes long is cut into slices, between which the loop receives what came in: what is received late has a wrong
time, while a start that is late is told as late. Answers that nobody waits for are parsed when there is nothing else.
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

from loadtest.clock import Alarm, Heartbeat, now_s
from loadtest.connection import Address, Exchange, Pool, check_sources, resolve
from loadtest.doors import PATHS
from loadtest.errors import LoadTestError
from loadtest.planned import Plan, Request
from loadtest.query import Query, Turn
from loadtest.record import Outcome, Record
from loadtest.target import Door, Target
from loadtest.verify import difference

HEARTBEAT_S = 0.01
BEATS_PER_PROGRESS = 25
BEATS_PER_SWEEP = 5  # for those whose time is over
SLICE_S = 0.0005  # of work that can wait, in one turn of the loop
MAX_RECENT = 1000  # first tokens in one report
NUM_WARM_UP_CLIENTS = 8
PROBE_TIMEOUT_S = 2.0
STOPPED = "stopped by the user"  # the error of what a user cut, or kept from being begun


class Progress(Struct):
    """Where a share, or a run, has come to."""

    elapsed_s: float = 0.0
    num_planned: int = 0
    num_begun: int = 0
    num_in_flight: int = 0
    num_ok: int = 0  # of answers that were read
    num_failed: int = 0
    num_skipped: int = 0
    num_tokens: int = 0  # likewise
    first_s: list[float] = field(default_factory=list)  # from intended starts to first bytes, since the last report


class ShareResult(Struct):
    """What a process gives back."""

    records: list[Record]
    lags_s: list[float]  # of its event loop: how late that was which was due HEARTBEAT_S * place after the beginning
    cpu_s: float  # of the process, from its beginning
    max_rss_bytes: int
    troubles: list[str]  # exceptions that nobody expected


class _Client:
    """One of a closed loop. It is free when all that it was begun for has ended."""

    __slots__ = ("num_open",)

    def __init__(self) -> None:
        self.num_open = 0


class Runner:
    """Runs a share, once. Everything it is told comes from the loop's own thread."""

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
        """`target.max_connections` are this process's own. Raises LoadTestError for what cannot be run."""
        check(target)
        self._target = target
        self._model = model
        self._followers = {each.follows: each for each in plan.requests if each.follows is not None}
        self._plan = plan
        self._process = process
        self._sources = sources
        self._addresses = [_first_that_answers(resolve(url)) for url in target.urls]
        check_sources(sources, self._addresses)
        self.refusal = ""  # the server's words for the first one that it refused
        self._on_progress = on_progress
        self._progress = Progress(num_planned=len(plan.requests))
        self._batches = deque(_batches(plan, target.batch_size if target.door is Door.GENERATE else 1))
        self._later: list[tuple[float, int, Turn]] = []  # a heap of turns whose people think, by when they ask
        self._in_flight: dict[Query, None] = {}  # in the order of their beginnings, so that of their patience's ends
        self._unread: deque[Query] = deque()  # that have ended
        self._full: deque[Query] = deque()  # that go on
        self._begins_soon = self._reads_soon = False
        self._records: list[Record] = []
        self._to_verify: list[tuple[Record, Turn, str]] = []
        self._with_more: set[int] = set()  # requests whose answers went on after their end
        self._troubles: list[str] = []
        self._is_stopped = False
        self._num_beats = 0

    async def run(self, start_s: float) -> ShareResult:
        """Everything in the plan; the run begins at `start_s` on the clock, which should not have passed."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._trouble)
        self._start_s = start_s
        self._end_s = None if self._plan.duration_s is None else start_s + self._plan.duration_s
        self._done = asyncio.Event()
        target = self._target
        self._pool = Pool(
            self._loop,
            self._addresses,
            PATHS[target.door],
            target.api_key,
            self._sources,
            target.max_connections,
            self._note_more,
        )
        self._num_clients_to_begin = self._plan.num_clients
        self._alarm = Alarm(self._loop, self._begin_due)
        self._heartbeat = Heartbeat(self._loop, start_s, HEARTBEAT_S, self._beat)
        # A collection of all generations looks at every object of every stream. With 17,000 of them it took 80 ms, by
        # which every time in between would be wrong. Connections break their cycles at their end, so nothing is left
        # to collect. (`gc.freeze` would spare it only what was there before the run, which is the least.)
        gc.disable()
        try:
            self._alarm.set(start_s)
            await self._done.wait()
        finally:
            if not self._is_stopped:
                self._heartbeat.stop()
            self._alarm.close()
            await self._pool.close()
            self._loop.set_exception_handler(None)
            gc.enable()
        self._verify()
        self._tell_of_more()
        self._report()
        used = resource.getrusage(resource.RUSAGE_SELF)
        return ShareResult(
            sorted(self._records, key=lambda record: record.index),
            self._heartbeat.lags_s,
            used.ru_utime + used.ru_stime,
            used.ru_maxrss * 1024,
            self._troubles,
        )

    def stop(self) -> None:
        """End it now: what is under way is cut, and told as cut by us; what has not begun never will."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._heartbeat.stop()  # what takes long from here on makes nothing wrong, for nothing is measured any more
        for query in list(self._in_flight):
            self._pool.give_up(query, Outcome.CUT if query.started_s else Outcome.SKIPPED, STOPPED)
        self._begin_due()

    # -- beginning -----------------------------------------------------------------------------------------------------

    def _begin_due(self) -> None:
        """Begin what is due, in order, for a slice of time; then let the loop read, and go on."""
        self._begins_soon = False
        slice_end_s = now_s() + SLICE_S
        while (due_s := self._next_due_s()) is not None:
            now = now_s()
            if self._is_stopped or (self._end_s is not None and now >= self._end_s):
                self._skip_some(slice_end_s)
                break
            if due_s > now:
                self._alarm.set(due_s if self._end_s is None else min(due_s, self._end_s))
                return
            if now >= slice_end_s:
                self._begin_soon()
                return
            self._begin_next(due_s)
        self._look_for_the_end()

    def _begin_soon(self) -> None:
        if not self._begins_soon:
            self._begins_soon = True
            self._loop.call_soon(self._begin_due)

    def _next_due_s(self) -> float | None:
        """On the clock; None if nothing is left to wait for but ends."""
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
            # A batch is one request, and there is no such request before the last of its prompts is there.
            self._begin([Turn(request, (request.prompt,), None) for request in self._batches.popleft()], due_s)
        else:
            self._num_clients_to_begin -= 1
            self._go_on(_Client())

    def _go_on(self, client: _Client) -> None:
        """A client of a closed loop asks something new, if there is any."""
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

    def note_end(self, query: Query) -> None:
        """It is read now only if somebody waits for what it says."""
        del self._in_flight[query]
        turns = query.turns
        self._progress.num_in_flight -= len(turns)
        if any(turn.request.index in self._followers for turn in turns):
            self._note(query)
            self._begin_soon()
        else:
            self._unread.append(query)
            self._read_soon()
        for turn in turns:
            if turn.request.index not in self._followers:
                self._let_go(turn.asker)

    def _let_go(self, client: _Client | None) -> None:
        if client is None:
            return
        client.num_open -= 1
        if client.num_open == 0:
            self._go_on(client)

    def note_full(self, query: Query) -> None:
        """Streams that are served in step fill up in the same moment; read at once, they would hold up their times."""
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
                self._note(self._unread.popleft())
            else:
                self._look_for_the_end()
                return
        self._read_soon()

    def _look_for_the_end(self) -> None:
        if self._in_flight or self._unread or self._later:
            return
        if self._batches:
            if self._next_due_s() is not None:
                return
            self._skip_some(now_s() + SLICE_S)  # in a closed loop whose clients all stopped
            if self._batches:
                return
        self._done.set()

    def _skip_some(self, until_s: float) -> None:
        """Of a large plan a million requests may be left, while answers to those before them still come."""
        reason = STOPPED if self._is_stopped else "the run ended"
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
        """And the turns that would have followed."""
        following: Request | None = request
        while following is not None:
            self._keep(Record(following.index, intended_s, error=reason, process=self._process, group=following.group))
            following = self._followers.get(following.index)

    # -- what became of it ---------------------------------------------------------------------------------------------

    def _note(self, query: Query) -> None:
        """Write it down, and go on with the conversations that it belongs to."""
        self.refusal = self.refusal or query.refusal
        for turn, record, text in zip(query.turns, *query.records(self._start_s, self._process), strict=True):
            self._keep(record)
            if self._target.verifies and record.outcome is Outcome.OK:
                self._to_verify.append((record, turn, text))
            following = self._followers.get(turn.request.index)
            if following is None:
                continue
            if record.outcome is Outcome.OK and not self._is_stopped:
                history = (*turn.history, text, following.prompt)
                due_s = query.ended_s + following.think_s
                heapq.heappush(self._later, (due_s, following.index, Turn(following, history, turn.asker)))
            else:
                reason = STOPPED if self._is_stopped else "the turn before failed"
                self._skip(following, query.ended_s - self._start_s, reason)
                self._let_go(turn.asker)

    def _keep(self, record: Record) -> None:
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
        """After the run: it takes ten microseconds an answer."""
        for record, turn, text in self._to_verify:
            if (error := difference("".join(turn.history), turn.request.max_tokens, text)) is not None:
                record.outcome, record.error = Outcome.WRONG, error
                self._progress.num_ok -= 1
                self._progress.num_failed += 1

    def _note_more(self, exchange: Exchange) -> None:
        assert isinstance(exchange, Query)
        self._with_more.update(turn.request.index for turn in exchange.turns)

    def _tell_of_more(self) -> None:
        """After the run, for the answer may have been read before there was more."""
        for record in self._records:
            if record.index in self._with_more and record.outcome is Outcome.OK:
                record.outcome, record.error = Outcome.GARBLED, "bytes after the end"
                self._progress.num_ok -= 1
                self._progress.num_failed += 1

    # -- time ----------------------------------------------------------------------------------------------------------

    def note_first(self, first_s: float) -> None:
        if len(self._progress.first_s) < MAX_RECENT:
            self._progress.first_s.append(first_s)

    def _beat(self) -> None:
        self._num_beats += 1
        if self._num_beats % BEATS_PER_SWEEP == 0:
            self._give_up_on_late_ones()
        if self._num_beats % BEATS_PER_PROGRESS == 0:
            self._report()

    def _give_up_on_late_ones(self) -> None:
        oldest_s = now_s() - self._target.timeout_s
        late = []
        for query in self._in_flight:
            if query.begun_s > oldest_s:
                break
            late.append(query)
        for query in late:
            where = "in the middle of" if query.first_s else "before" if query.started_s else "without a connection for"
            self._pool.give_up(query, Outcome.TIMEOUT, f"{where} the answer")

    def _report(self) -> None:
        if self._on_progress is None:
            return
        self._progress.elapsed_s = now_s() - self._start_s
        self._on_progress(self._progress)
        self._progress.first_s.clear()

    def _trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What asyncio would write to the log."""
        del loop
        message, error = context.get("message", ""), context.get("exception")
        if len(self._troubles) < 10:
            self._troubles.append(f"{message}: {error!r}" if error is not None else message)


def check(target: Target) -> None:
    """Raise LoadTestError for what contradicts itself."""
    if not target.urls:
        raise LoadTestError("no address is given to ask at; give one such as http://127.0.0.1:8000")
    if target.verifies and target.door is Door.CHAT:
        raise LoadTestError(
            "answers to chats cannot be verified, for what the model is given is up to the server's chat template; "
            "use another door"
        )
    if target.batch_size < 1 or (target.batch_size > 1 and target.door is not Door.GENERATE):
        raise LoadTestError(
            f"the batch size is {target.batch_size}; it must be 1, or more at the door {Door.GENERATE.value}"
        )
    if target.door is Door.GENERATE and "max_tokens" in target.fields:
        raise LoadTestError(
            f"the field max_tokens is {target.fields['max_tokens']}, but the sum that the door {Door.GENERATE.value} "
            "tells of its answers' tokens is held against what the plan asks for; give the workload output=N instead"
        )
    if not target.timeout_s > 0.0:
        raise LoadTestError(f"the timeout is {target.timeout_s:g} s; it must be above 0")
    if target.max_connections is not None and target.max_connections < 1:
        raise LoadTestError(f"max_connections is {target.max_connections}; it must be at least 1")


async def warm_up(
    target: Target, requests: Sequence[Request], model: str | None = None, sources: Sequence[str] = ()
) -> None:
    """Ask these, and write nothing down. Raises LoadTestError if none is answered: the run would not be, either."""
    prompts = [
        Request(number, None, request.prompt, request.max_tokens)
        for number, request in enumerate(requests)
        if request.follows is None
    ]
    if not prompts:
        return
    plan = Plan(prompts, "closed", "warm-up", 0, num_clients=min(len(prompts), NUM_WARM_UP_CLIENTS))
    runner = Runner(target, plan, model=model, sources=sources)
    result = await runner.run(now_s())
    if not any(record.outcome is Outcome.OK for record in result.records):
        first = result.records[0]
        if runner.refusal:
            why = f"the server at {', '.join(target.urls)} says: {runner.refusal}"
        else:
            why = f"is the server up at {', '.join(target.urls)}, and does it have this door?"
        raise LoadTestError(
            f"none of {len(result.records)} requests to warm up was answered: {first.outcome.value}, {first.error}; "
            + why
        )


def _batches(plan: Plan, batch_size: int) -> list[list[Request]]:
    """What is asked together: neighbours in the plan that want equally many tokens, which a body says once."""
    first_turns = [request for request in plan.requests if request.follows is None]
    if batch_size == 1:
        return [[request] for request in first_turns]
    batches = []
    for _, alike in groupby(first_turns, key=lambda request: request.max_tokens):
        run = list(alike)
        batches += [run[begin : begin + batch_size] for begin in range(0, len(run), batch_size)]
    return batches


def _first_that_answers(addresses: Sequence[Address]) -> Address:
    """A name may stand for several addresses of which one has a server, such as localhost for ::1 and 127.0.0.1."""
    if len(addresses) == 1:
        return addresses[0]
    for address in addresses:
        with socket.socket(address.family, socket.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            if probe.connect_ex(address.socket_address) == 0:
                return address
    return addresses[0]
