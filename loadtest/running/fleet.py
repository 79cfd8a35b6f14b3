"""Run a plan with several client processes that start at the same moment.

One event loop uses one core. Even a single client runs in a child process, so that neither the display nor scraping
delays the measurement.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from loadtest.errors import LoadTestError
from loadtest.planning.plan import Plan, Request
from loadtest.record import STOPPED_BY_USER, Record
from loadtest.running.api_formats import FORMATS_WITH_MODELS
from loadtest.running.clock import now_s
from loadtest.running.fleet_messages import (
    NUM_IN_MESSAGE,
    Failed,
    Finished,
    Prepare,
    Ready,
    Records,
    Report,
    Reported,
    Requests,
    Start,
    Stop,
    decode_report,
    read_message,
    write_message,
)
from loadtest.running.metrics_scraper import Scrape, get, scrape_periodically
from loadtest.running.runner import Progress
from loadtest.target import Target, check_target

PROGRESS_S = 0.25
HEAD_START_S = 0.25  # between the command to start and the start, so that it reaches every process in time
END_TIMEOUT_S = 10.0

OnProgress = Callable[[Progress], bool | None]


class FleetResult(Struct):
    """The result of a run. Lists by process are in the order of the shares."""

    records: list[Record]  # by index
    num_missing: int  # requests whose process died
    lags_s: list[list[float]]  # of each event loop: how late each beat was, every runner.HEARTBEAT_S
    cpu_s: list[float]
    max_rss_bytes: list[int]
    scrapes: list[Scrape]
    errors: list[str]  # of the client itself; a run that has any cannot be trusted
    was_stopped: bool


def run_fleet(
    target: Target,
    shares: Sequence[Plan],
    *,
    sources: Sequence[str] = (),
    warm_up: Sequence[Request] = (),
    on_progress: OnProgress | None = None,
    scrapes: bool = True,
) -> FleetResult:
    """Run each share in a process of its own; return when all have ended.

    `sources` are local addresses to connect from, such as 127.0.0.2, used in turn. `warm_up` requests are sent before
    and not recorded. `on_progress` is called four times a second; it returns True to end the run. SIGINT or SIGTERM in
    the main thread also ends it: requests in flight are cut and what is known is returned; a second signal kills the
    processes. `target.max_connections` is the total of all processes. Raises LoadTestError for what cannot be run.
    """
    check_target(target)
    if target.max_connections is not None:
        if target.max_connections < len(shares):
            raise LoadTestError(
                f"--max-connections {target.max_connections} is below --processes {len(shares)}; each process needs "
                "at least one"
            )
        target = structs.replace(target, max_connections=target.max_connections // len(shares))
    return asyncio.run(_Fleet(target, shares, sources, warm_up, on_progress).run(scrapes))


class _Child:
    """One client process, as the parent sees it."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer
        self.progress = Progress()
        self.records: list[Record] = []
        self.finished: Finished | None = None

    async def read(self) -> Report | None:
        """Return the next report; None if the process is gone."""
        try:
            report: Report = decode_report(await read_message(self.reader))
            return report
        except (EOFError, ConnectionError):
            return None

    def send(self, message: Struct) -> None:
        if not self.writer.is_closing():
            write_message(self.writer, message)


class _Fleet:
    def __init__(
        self,
        target: Target,
        shares: Sequence[Plan],
        sources: Sequence[str],
        warm_up: Sequence[Request],
        on_progress: OnProgress | None,
    ) -> None:
        self._target = target
        self._shares = shares
        self._sources = list(sources)
        self._warm_up = warm_up
        self._on_progress = on_progress
        self._children: list[_Child] = []
        self._first_s: list[float] = []  # since the last report
        self._errors: list[str] = []
        self._is_stopped = False
        self._preparing: asyncio.Future[list[bool]] | None = None
        self._has_begun = False

    async def run(self, scrapes: bool) -> FleetResult:
        loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        for number in signals:
            loop.add_signal_handler(number, self._stop)
        try:
            model = await asyncio.to_thread(_model_of, self._target)
            for _ in self._shares:
                self._children.append(await _spawn())
            ready = await self._prepare_all(model)
            if ready is None:
                return self._result_of_unstarted()
            start_s = now_s() + HEAD_START_S
            for child, is_ready in zip(self._children, ready, strict=True):
                if is_ready:
                    child.send(Start(start_s))
            return await self._follow(start_s, scrapes)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            await asyncio.gather(*map(_end, self._children))

    async def _prepare_all(self, model: str | None) -> list[bool] | None:
        """Return which processes are ready; None if the user stopped the run before it began."""
        if not self._is_stopped:
            places = range(len(self._shares))
            self._preparing = asyncio.gather(*(self._prepare(place, model) for place in places))
            try:
                ready = await self._preparing
            except asyncio.CancelledError:
                if not self._is_stopped:
                    raise
            else:
                if not self._is_stopped:
                    self._has_begun = True
                    return ready
        for child in self._children:
            if child.process.returncode is None:
                child.process.kill()  # it may be warming up, which is pointless now
        return None

    def _result_of_unstarted(self) -> FleetResult:
        """Return the result of a run that was stopped before it began."""
        records = [
            Record(request.index, request.intended_s or 0.0, error=STOPPED_BY_USER, process=place, group=request.group)
            for place, share in enumerate(self._shares)
            for request in share.requests
        ]
        for child in self._children:
            child.finished = Finished([], 0.0, 0, [])
        self._children[0].records = records
        return self._result([])

    async def _prepare(self, place: int, model: str | None) -> bool:
        """Return whether the child is ready.

        If it never will be, `_collect` adds the reason to the errors. Raises LoadTestError if the child reports one.
        """
        child, share = self._children[place], self._shares[place]
        empty = structs.replace(share, requests=[])
        warm_up = list(self._warm_up[place :: len(self._shares)])
        num_requests = len(share.requests)
        child.send(Prepare(self._target, empty, model, place, self._sources, warm_up, num_requests))
        for begin in range(0, num_requests, NUM_IN_MESSAGE):
            child.send(Requests(share.requests[begin : begin + NUM_IN_MESSAGE]))
            try:
                await child.writer.drain()
            except ConnectionError:
                break  # the next read reports it, too
        answer = await child.read()
        if isinstance(answer, Failed):
            raise LoadTestError(answer.message)
        return isinstance(answer, Ready)

    async def _follow(self, start_s: float, scrapes: bool) -> FleetResult:
        scraped: list[Scrape] = []
        background = [asyncio.create_task(self._report_progress_periodically(start_s))]
        if scrapes:
            along = scrape_periodically(self._target.urls[0], self._target.api_key, start_s, scraped)
            background.append(asyncio.create_task(along))
        try:
            await asyncio.gather(*map(self._collect, range(len(self._children))))
        finally:
            for task in background:
                task.cancel()
            results = await asyncio.gather(*background, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        self._report_progress(start_s)
        return self._result(scraped)

    async def _collect(self, place: int) -> None:
        child = self._children[place]
        while (message := await child.read()) is not None:
            if isinstance(message, Reported):
                child.progress = message.progress
                self._first_s += message.progress.first_s
            elif isinstance(message, Records):
                child.records += message.records
            elif isinstance(message, Finished):
                child.finished = message
                self._errors += [f"client process {place}: {error}" for error in message.errors]
                return
            elif isinstance(message, Failed):
                self._errors.append(f"client process {place}: {message.message}")
        code = await child.process.wait()
        num_missing = len(self._shares[place].requests) - len(child.records)
        self._errors.append(f"client process {place} ended with exit code {code}; {num_missing} records are missing")

    def _result(self, scraped: list[Scrape]) -> FleetResult:
        records = sorted((record for child in self._children for record in child.records), key=lambda each: each.index)
        lost = Finished([], 0.0, 0, [])
        ends = [child.finished or lost for child in self._children]
        return FleetResult(
            records=records,
            num_missing=sum(len(share.requests) for share in self._shares) - len(records),
            lags_s=[end.lags_s for end in ends],
            cpu_s=[end.cpu_s for end in ends],
            max_rss_bytes=[end.max_rss_bytes for end in ends],
            scrapes=scraped,
            errors=self._errors,
            was_stopped=self._is_stopped,
        )

    # -- progress ------------------------------------------------------------------------------------------------------

    async def _report_progress_periodically(self, start_s: float) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._report_progress(start_s)

    def _report_progress(self, start_s: float) -> None:
        if self._on_progress is None:
            return
        each = [child.progress for child in self._children]
        first_s, self._first_s = self._first_s, []
        together = Progress(
            elapsed_s=max(0.0, now_s() - start_s),
            num_planned=sum(len(share.requests) for share in self._shares),
            num_begun=sum(progress.num_begun for progress in each),
            num_in_flight=sum(progress.num_in_flight for progress in each),
            num_ok=sum(progress.num_ok for progress in each),
            num_failed=sum(progress.num_failed for progress in each),
            num_skipped=sum(progress.num_skipped for progress in each),
            num_tokens=sum(progress.num_tokens for progress in each),
            first_s=first_s,
        )
        if self._on_progress(together) and not self._is_stopped:
            self._stop()

    def _stop(self) -> None:
        if not self._has_begun:
            self._is_stopped = True
            if self._preparing is not None:
                self._preparing.cancel()
            return
        for child in self._children:
            if self._is_stopped and child.process.returncode is None:
                child.process.kill()
            child.send(Stop())
        self._is_stopped = True


async def _spawn() -> _Child:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "loadtest.running.fleet_process",
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],  # the child must find the same package, whatever the current directory is
            # Ctrl-C goes to the whole session of a terminal and would end a child that is just starting. The parent
            # tells children what to do, and a child ends when its parent does.
            start_new_session=True,
        )
    return _Child(process, *await asyncio.open_connection(sock=ours))


async def _end(child: _Child) -> None:
    """Wait until the child has ended by itself, as it does when its socket closes; kill it after a timeout."""
    child.writer.close()
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await child.process.wait()
    except TimeoutError:
        child.process.kill()
        await child.process.wait()


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


def _model_of(target: Target) -> str | None:
    """Return the model name for requests, if the API has one; None if the server does not list any."""
    if target.model is not None or target.api not in FORMATS_WITH_MODELS:
        return target.model
    answer = get(target.urls[0], "/v1/models", target.api_key)
    if answer is None or answer[0] != 200:
        return None
    try:
        models = msgspec.json.decode(answer[1], type=_Models).data
    except msgspec.DecodeError:
        return None
    return models[0].id if models else None
