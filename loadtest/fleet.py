"""Several processes that ask together, from one moment on.

One event loop is one core; and even one process is started as a child, so that neither a display nor scraping takes
part in measuring. Parent and child talk over a socket in messages of their own, each a length and msgpack.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import uvloop
from msgspec import Struct, structs

from loadtest.clock import now_s
from loadtest.doors import DOORS_WITH_MODELS
from loadtest.errors import LoadTestError
from loadtest.planned import Plan, Request
from loadtest.record import Record
from loadtest.runner import STOPPED, Progress, Runner, check, warm_up
from loadtest.scrape import Scrape, get, scrape_along
from loadtest.target import Target

PROGRESS_S = 0.25
HEAD_START_S = 0.25  # from the word to the beginning, so that it reaches every process in time
END_TIMEOUT_S = 10.0
NUM_IN_MESSAGE = 500

OnProgress = Callable[[Progress], bool | None]

# -- messages ----------------------------------------------------------------------------------------------------------


class Prepare(Struct, tag=True):
    """To a child: what it will have to do, but for the requests."""

    target: Target
    plan: Plan
    model: str | None
    process: int
    sources: list[str]
    warm_up: list[Request]
    num_requests: int


class Requests(Struct, tag=True):
    requests: list[Request]


class Go(Struct, tag=True):
    start_s: float  # on the clock, which is one for all


class Stop(Struct, tag=True):
    pass


class Ready(Struct, tag=True):
    """From a child."""


class Reported(Struct, tag=True):
    progress: Progress


class Records(Struct, tag=True):
    records: list[Record]


class Finished(Struct, tag=True):
    """All of its records were sent."""

    lags_s: list[float]
    cpu_s: float
    max_rss_bytes: int
    troubles: list[str]


class Failed(Struct, tag=True):
    """It cannot do what it was told."""

    message: str


Order = Prepare | Requests | Go | Stop
Report = Ready | Reported | Records | Finished | Failed

_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(Order).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


def _write(writer: asyncio.StreamWriter, message: Struct) -> None:
    encoded = _encode(message)
    writer.write(len(encoded).to_bytes(8, "big") + encoded)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError (asyncio's IncompleteReadError is one) or ConnectionError if the other side is gone."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(8), "big"))


# -- the parent --------------------------------------------------------------------------------------------------------


class FleetResult(Struct):
    """All that came of a run. Lists by process are in the order of the shares."""

    records: list[Record]  # by index
    num_missing: int  # requests whose process did not live to tell
    lags_s: list[list[float]]  # of each event loop: how late what was due every runner.HEARTBEAT_S was
    cpu_s: list[float]
    max_rss_bytes: list[int]
    scrapes: list[Scrape]
    errors: list[str]  # of the client itself; a run that has any is not to be trusted
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
    """Run each share in a process of its own, and wait for the end of all.

    `sources` are local addresses to come from, such as 127.0.0.2 (a connection in turn from each). `warm_up` is asked
    before, and not written down. `on_progress` is called four times a second; True ends the run. So does SIGINT or
    SIGTERM in the main thread: what is under way is cut, and all that is known is returned; a second one kills.
    `target.max_connections` are all processes' together. Raises LoadTestError for what cannot be run.
    """
    check(target)
    if target.max_connections is not None:
        if target.max_connections < len(shares):
            raise LoadTestError(
                f"max_connections is {target.max_connections} for {len(shares)} processes; each needs at least one"
            )
        target = structs.replace(target, max_connections=target.max_connections // len(shares))
    return asyncio.run(_Fleet(target, shares, sources, warm_up, on_progress).run(scrapes))


class _Child:
    """One process, as the parent knows it."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer
        self.progress = Progress()
        self.records: list[Record] = []
        self.finished: Finished | None = None

    async def read(self) -> Report | None:
        """None is that it is gone."""
        try:
            report: Report = _decode_report(await _read(self.reader))
            return report
        except (EOFError, ConnectionError):
            return None

    def tell(self, message: Struct) -> None:
        if not self.writer.is_closing():
            _write(self.writer, message)


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
                return self._never_begun()
            start_s = now_s() + HEAD_START_S
            for child, is_ready in zip(self._children, ready, strict=True):
                if is_ready:
                    child.tell(Go(start_s))
            return await self._follow(start_s, scrapes)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            await asyncio.gather(*map(_end, self._children))

    async def _prepare_all(self, model: str | None) -> list[bool] | None:
        """Which of them are ready; None if the user stopped it before all were told."""
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
                child.process.kill()  # it may be warming up, which nobody waits for now
        return None

    def _never_begun(self) -> FleetResult:
        """What the children would say who never were told to begin."""
        records = [
            Record(request.index, request.intended_s or 0.0, error=STOPPED, process=place, group=request.group)
            for place, share in enumerate(self._shares)
            for request in share.requests
        ]
        for child in self._children:
            child.finished = Finished([], 0.0, 0, [])
        self._children[0].records = records
        return self._result([])

    async def _prepare(self, place: int, model: str | None) -> bool:
        """Whether the child is ready; if it never will be, why is in the errors. Raises LoadTestError if it says so."""
        child, share = self._children[place], self._shares[place]
        empty = structs.replace(share, requests=[])
        warm_up = list(self._warm_up[place :: len(self._shares)])
        num_requests = len(share.requests)
        child.tell(Prepare(self._target, empty, model, place, self._sources, warm_up, num_requests))
        for begin in range(0, num_requests, NUM_IN_MESSAGE):
            child.tell(Requests(share.requests[begin : begin + NUM_IN_MESSAGE]))
            try:
                await child.writer.drain()
            except ConnectionError:
                break  # which the next read tells, too
        answer = await child.read()
        if isinstance(answer, Failed):
            raise LoadTestError(answer.message)
        return isinstance(answer, Ready)

    async def _follow(self, start_s: float, scrapes: bool) -> FleetResult:
        scraped: list[Scrape] = []
        background = [asyncio.create_task(self._tell_progress(start_s))]
        if scrapes:
            along = scrape_along(self._target.urls[0], self._target.api_key, start_s, scraped)
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
        self._tell(start_s)
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
                self._errors += [f"process {place} of the client: {trouble}" for trouble in message.troubles]
                return
            elif isinstance(message, Failed):
                self._errors.append(f"process {place} of the client: {message.message}")
        code = await child.process.wait()
        num_missing = len(self._shares[place].requests) - len(child.records)
        self._errors.append(f"process {place} of the client ended with {code}; {num_missing} records are missing")

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

    # -- meanwhile -----------------------------------------------------------------------------------------------------

    async def _tell_progress(self, start_s: float) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._tell(start_s)

    def _tell(self, start_s: float) -> None:
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
            child.tell(Stop())
        self._is_stopped = True


async def _spawn() -> _Child:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtest.fleet", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            cwd=Path(__file__).parents[1],  # wherever we were started, the child is to find the same package
            # Ctrl-C goes to all of a terminal's session, and would end a child that is just starting; the parent says
            # what is to be done, and a child ends with it.
            start_new_session=True,
        )
    return _Child(process, *await asyncio.open_connection(sock=ours))


async def _end(child: _Child) -> None:
    """It ends by itself when we are gone; one that does not is killed."""
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
    """The name to ask by, where the door has names; None if the server does not tell one."""
    if target.model is not None or target.door not in DOORS_WITH_MODELS:
        return target.model
    answer = get(target.urls[0], "/v1/models", target.api_key)
    if answer is None or answer[0] != 200:
        return None
    try:
        models = msgspec.json.decode(answer[1], type=_Models).data
    except msgspec.DecodeError:
        return None
    return models[0].id if models else None


# -- a child -----------------------------------------------------------------------------------------------------------


async def _obey(own: socket.socket) -> None:
    """Do what the parent says, and end when it is gone."""
    reader, writer = await asyncio.open_connection(sock=own)
    try:
        await _run_share(reader, writer)
    except LoadTestError as error:
        _write(writer, Failed(str(error)))
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # the parent has to know, whatever it is
        _write(writer, Failed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        try:
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            pass


async def _run_share(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    order = _decode_order(await _read(reader))
    assert isinstance(order, Prepare)
    while len(order.plan.requests) < order.num_requests:
        more = _decode_order(await _read(reader))
        assert isinstance(more, Requests)
        order.plan.requests.extend(more.requests)
    await warm_up(order.target, order.warm_up, order.model, order.sources)
    runner = Runner(
        order.target,
        order.plan,
        model=order.model,
        process=order.process,
        sources=order.sources,
        on_progress=lambda progress: _write(writer, Reported(progress)),
    )
    _write(writer, Ready())
    word = _decode_order(await _read(reader))
    assert isinstance(word, Go)
    listening = asyncio.create_task(_listen(reader, runner))
    result = await runner.run(word.start_s)
    listening.cancel()
    for begin in range(0, len(result.records), NUM_IN_MESSAGE):
        _write(writer, Records(result.records[begin : begin + NUM_IN_MESSAGE]))
        await writer.drain()
    _write(writer, Finished(result.lags_s, result.cpu_s, result.max_rss_bytes, result.troubles))


async def _listen(reader: asyncio.StreamReader, runner: Runner) -> None:
    try:
        while not isinstance(_decode_order(await _read(reader)), Stop):
            pass
    except (EOFError, ConnectionError):
        pass  # the parent is gone: there is nobody to measure for
    runner.stop()


def main() -> NoReturn:
    """`python -m loadtest.fleet FD`: for the parent only."""
    # The usual 1024 are for programs that call select(); each stream is a file.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    uvloop.run(_obey(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # nothing is left to do, and taking down 100,000 objects one by one takes seconds


if __name__ == "__main__":
    main()
