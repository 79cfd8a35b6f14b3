"""Run jobs with untrusted input of clients, in processes that are killed when a job takes too long.

Chat templates are programs and grammars can be enormous, so neither is processed in the server's own process.
`JobScheduler` decides which job runs when. Each running job has a process of its own, which is used again if the job
was quick. A job is refused if it used up its processor time or its memory. If its process was stopped or killed from
outside, the job is not at fault, and runs once more.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import time

from servekit.aio.pause_tolerant_timer import PauseTolerantTimer
from servekit.aio.slices import text_of
from servekit.errors import InternalError, InvalidRequest, QueueFull, SandboxUnavailable, ServekitError, shutting_down
from servekit.sandbox.forked_process import (
    MAX_OUTCOME_BYTES,
    ForkedProcess,
    ForkServer,
    OutcomeTooLarge,
    ProcessLost,
)
from servekit.sandbox.job_scheduler import JobScheduler, JobTicket, Lane
from servekit.sandbox.jobs import CompileGrammar, Done, DoneLong, Job, Outcome, Refused, encode_job
from servekit.sandbox.outcome_cache import OutcomeCache

log = logging.getLogger("servekit")

NUM_QUICK, NUM_SLOW = 3, 2  # processes
QUANTUM_S = 0.05  # processor time in the quick lane: the limit for compiling a grammar; almost all jobs take less
POLL_INTERVAL_S = 0.025  # how often the server reads how much processor time a job has used
MAX_LOOK_S = 0.25  # longest time that counts between two readings, because server and job may have been paused
MAX_WAITING = 512
MAX_WAIT_S = 10.0
MAX_JOB_BYTES = 2**24  # larger than any job from the largest body that the server reads by default
MAX_BYTES = 2**26  # of all jobs that wait or run
MAX_CACHE_BYTES = 2**25
MAX_CACHED_JOB_BYTES = 2**18  # a digest of a larger job would hold the event loop; such jobs always run
REFUSAL_TTL_S = 300.0  # in the cache; on a busy machine a job can take more processor time than later
MAX_ATTEMPTS = 2
# A job that gets less than a thirtieth of a core is ended, so that each request is answered in bounded time. Because of
# its low priority, a job in the slow lane gets a twentieth while two other processes compute all the time.
MAX_SLOWDOWN = 30.0
MAX_REUSED_BYTES = 2**20  # a process that handled more is not used again, because its memory is limited


class _Job:
    """One job, and the number of requests that wait for its outcome."""

    def __init__(self, pieces: list[bytes | bytearray], ticket: JobTicket, loop: asyncio.AbstractEventLoop) -> None:
        self.pieces = pieces
        self.ticket = ticket
        self.num_waiters = 0
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        # Retrieve the exception. Otherwise asyncio logs it when no request waits for it.
        self.outcome.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.waiting: PauseTolerantTimer | None = None  # the timer that ends the wait for a place


class Sandbox:
    """Runs jobs of many tenants. `arguments` are those of `python -m servekit.sandbox.fork_server`."""

    def __init__(self, arguments: list[str], timeout_s: float, memory_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._fork_server = ForkServer(arguments, memory_bytes)
        self._scheduler = JobScheduler(NUM_QUICK, NUM_SLOW, MAX_WAITING, MAX_BYTES)
        self._cache = OutcomeCache(MAX_CACHE_BYTES)
        self._jobs: dict[JobTicket, _Job] = {}  # jobs that wait or run
        self._shared: dict[tuple[str, bytes], _Job] = {}  # those of them that an equal job of the tenant may join
        self._tasks: set[asyncio.Task[None]] = set()  # one for each running job
        self._idle: list[ForkedProcess] = []
        self._is_stopped = False

    async def start(self) -> None:
        """Start the process that forks the others, before the first job needs it. Raises ProcessLost or OSError."""
        await self._fork_server.start()

    async def run(self, job: Job, param: str, tenant: str) -> str:
        """Return the result of a job of a tenant.

        Raises InvalidRequest about `param` if the job's input is invalid, or if the job exceeds its time or memory;
        QueueFull if too many jobs wait, or too many of this tenant; SandboxUnavailable if its process failed twice.
        """
        outcome = await self._outcome(job, param, tenant)
        match outcome:
            case Done():
                return outcome.text
            case DoneLong():
                return await text_of(outcome.utf8)
            case Refused():
                raise InvalidRequest(f"{param}: {outcome.message}", param=param, code=outcome.code)

    def cancel_all(self) -> None:
        """Fail waiting and future jobs: the server is shutting down."""
        self._is_stopped = True
        for job in self._jobs.values():
            _fail(job, shutting_down())
        self._fork_server.kill()

    async def stop(self) -> None:
        """Fail all jobs and end all processes."""
        self.cancel_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._idle:
            process.channel.close()
        self._idle.clear()
        await self._fork_server.stop()

    # -- before a job has a place -------------------------------------------------------------------------------------

    async def _outcome(self, job: Job, param: str, tenant: str) -> Outcome:
        self._check_room(tenant, 0)
        pieces = await _encode(job, param)
        num_bytes = sum(map(len, pieces))
        digest = _digest(pieces) if num_bytes <= MAX_CACHED_JOB_BYTES else None
        if digest is not None and (known := self._cache.get(tenant, digest, time.monotonic())) is not None:
            return known
        running = None if digest is None else self._shared.get((tenant, digest))
        if running is None or running.outcome.done():
            running = self._add(pieces, num_bytes, tenant)
            if digest is not None:
                self._share(running, job, tenant, digest)
        running.num_waiters += 1
        try:
            return await asyncio.shield(running.outcome)
        finally:
            running.num_waiters -= 1
            if running.num_waiters == 0 and not running.outcome.done():
                running.outcome.cancel()  # the job's task ends its process
                self._stop_waiting(running)

    def _add(self, pieces: list[bytes | bytearray], num_bytes: int, tenant: str) -> _Job:
        self._check_room(tenant, num_bytes)
        job = _Job(pieces, JobTicket(tenant, num_bytes), asyncio.get_running_loop())
        self._jobs[job.ticket] = job
        self._scheduler.add(job.ticket)
        self._limit_wait(job)
        self._start_jobs()
        return job

    def _check_room(self, tenant: str, num_bytes: int) -> None:
        if self._is_stopped:
            raise shutting_down()
        if not self._scheduler.has_room(tenant, num_bytes):
            raise QueueFull(
                f"the queue for chat templates and grammars has {self._scheduler.num_waiting} jobs, and with the "
                f"running ones {self._scheduler.num_bytes} bytes; the limits are {MAX_WAITING} jobs and {MAX_BYTES} "
                "bytes, and one tenant may have as much as stays free. Please try again later.",
                retry_after_s=1,
            )

    def _share(self, running: _Job, job: Job, tenant: str, digest: bytes) -> None:
        """Let equal jobs of the tenant join this one, and cache its outcome.

        Equal jobs of other tenants do not join, because they would wait for this tenant's turn.
        """
        self._shared[tenant, digest] = running

        def remember(future: asyncio.Future[Outcome]) -> None:
            if self._shared.get((tenant, digest)) is running:
                del self._shared[tenant, digest]
            if future.cancelled() or future.exception() is not None:
                return
            outcome = future.result()
            if isinstance(outcome, Refused):
                self._cache.put(tenant, digest, outcome, time.monotonic() + REFUSAL_TTL_S)
            elif isinstance(outcome, Done) and isinstance(job, CompileGrammar):  # equal conversations are rare
                self._cache.put(tenant, digest, outcome, float("inf"))

        running.outcome.add_done_callback(remember)

    def _limit_wait(self, job: _Job) -> None:
        def expire() -> None:
            _fail(
                job,
                QueueFull(
                    f"the chat template or grammar waited {MAX_WAIT_S:g} s for others, which is the limit. Please "
                    "try again later.",
                    retry_after_s=5,
                ),
            )
            self._stop_waiting(job)

        job.waiting = PauseTolerantTimer(MAX_WAIT_S, expire)

    def _stop_waiting(self, job: _Job) -> None:
        """Remove a job that no request waits for, unless it runs. In that case its task removes it."""
        if job.waiting is not None:
            job.waiting.cancel()
            job.waiting = None
            self._remove(job)

    def _remove(self, job: _Job) -> None:
        del self._jobs[job.ticket]
        self._scheduler.remove(job.ticket, time.monotonic())
        self._start_jobs()

    def _start_jobs(self) -> None:
        """Start the jobs that have a place."""
        while (ticket := self._scheduler.start_next(time.monotonic())) is not None:
            job = self._jobs[ticket]
            assert job.waiting is not None
            job.waiting.cancel()
            job.waiting = None
            task = asyncio.create_task(self._run(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # -- while a job has a place ---------------------------------------------------------------------------------------

    async def _run(self, job: _Job) -> None:
        """Run a job that has just got a place, and give its place back, whatever happens."""
        must_begin_again = False
        try:
            outcome = await self._attempts(job)
            if not job.outcome.done():
                if outcome is None:
                    must_begin_again = True
                else:
                    job.outcome.set_result(outcome)
        except ServekitError as error:
            _fail(job, error)
        except Exception as error:
            log.exception("a bug in servekit failed a chat template or grammar")
            _fail(job, InternalError(f"internal error ({type(error).__name__}); the server's log has the details"))
        finally:
            if must_begin_again:
                self._scheduler.requeue_in_slow_lane(job.ticket, time.monotonic())
                self._limit_wait(job)
                self._start_jobs()
            else:
                job.outcome.cancel()  # if it is not done, this task was cancelled
                self._remove(job)

    async def _attempts(self, job: _Job) -> Outcome | None:
        """Return the job's outcome; None if no request waits for it, or if it must begin again in the slow lane."""
        reason = ""
        for attempt in range(MAX_ATTEMPTS):
            try:
                process = (self._take_idle() if attempt == 0 else None) or await self._fork_server.fork()
                return await self._attempt(job, process)
            except (ProcessLost, OSError) as error:  # OSError: no descriptor, process or memory was left
                if job.outcome.done():
                    return None
                reason = str(error)
                log.warning("a sandbox process failed: %s", reason)
        raise SandboxUnavailable(
            f"the process that renders chats and compiles grammars failed {MAX_ATTEMPTS} times ({reason}). Please try "
            "again later.",
            retry_after_s=1,
        )

    def _take_idle(self) -> ForkedProcess | None:
        while self._idle:
            process = self._idle.pop()
            if not process.is_lost:
                return process
            process.channel.close()
        return None

    async def _attempt(self, job: _Job, process: ForkedProcess) -> Outcome | None:
        """Run a job in a process, and end the process unless another job may use it. Raises ProcessLost."""
        is_ended, is_reusable = False, False
        if job.ticket.lane is Lane.SLOW:
            process.lower_priority()
        running = asyncio.create_task(process.run(job.pieces))
        try:
            outcome = await self._watch(job, process, running)
            if running.done() and job.ticket.lane is Lane.QUICK:
                is_reusable = job.ticket.num_bytes + _num_bytes(running.result()) <= MAX_REUSED_BYTES
            return outcome
        except OutcomeTooLarge:
            return Refused(f"the result is larger than {MAX_OUTCOME_BYTES} bytes, which is the limit; make it shorter")
        except (EOFError, OSError):
            is_ended = True
            exit_code = await self._fork_server.end(process, is_exiting=True)
            # SIGKILL comes from the kernel for lack of memory, or from an operator.
            if exit_code is None or exit_code == -signal.SIGKILL:
                raise ProcessLost("it was killed") from None
            return Refused(
                "it is nested too deeply, or takes more memory than a request may have (sandbox_memory_bytes); make it "
                "simpler"
            )
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if is_reusable:
                self._idle.append(process)
            elif not is_ended:
                await self._fork_server.end(process)

    async def _watch(self, job: _Job, process: ForkedProcess, running: asyncio.Task[Outcome]) -> Outcome | None:
        """Wait for the outcome, and read the job's processor time at each interval.

        The quantum and the limit are processor time. Wall time depends on the load of the machine: on a busy machine,
        all jobs would end in the slow lane. Returns None if no request waits any more, or if the job must begin again
        in the slow lane.
        """
        looked_s, running_s, stalled_s = time.monotonic(), 0.0, 0.0
        before_s = used_s = process.cpu_s()
        while True:
            await asyncio.wait((running, job.outcome), timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            if job.outcome.done():
                return None
            now_s, last_s, used_s = time.monotonic(), used_s, process.cpu_s()
            if used_s - before_s >= self._timeout_s:
                return Refused(
                    f"not done within {self._timeout_s:g} s of processor time (sandbox_timeout); make it simpler"
                )
            passed_s, looked_s = min(now_s - looked_s, MAX_LOOK_S), now_s
            running_s += passed_s
            stalled_s = 0.0 if used_s > last_s else stalled_s + passed_s
            if stalled_s >= self._timeout_s:
                raise ProcessLost(f"it got no processor time for {self._timeout_s:g} s")
            if running_s >= self._timeout_s * MAX_SLOWDOWN:
                raise SandboxUnavailable(
                    f"the server is too busy: this chat template or grammar got {used_s - before_s:.1f} s of processor "
                    f"time in {running_s:.1f} s, and needs a thirtieth of a core. Please try again later.",
                    retry_after_s=5,
                )
            if job.ticket.lane is Lane.QUICK and used_s - before_s >= QUANTUM_S:
                if not self._scheduler.is_slow_place_free_for(job.ticket):
                    return None
                self._scheduler.move_to_slow_lane(job.ticket, now_s)
                process.lower_priority()
                self._start_jobs()


async def _encode(job: Job, param: str) -> list[bytes | bytearray]:
    """Encode a job in pieces. Raises InvalidRequest about `param`."""
    pieces: list[bytes | bytearray] = []
    num_bytes = 0
    try:
        for piece in encode_job(job):
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > MAX_JOB_BYTES:
                raise InvalidRequest(
                    f"{param}: it has more than {MAX_JOB_BYTES} bytes, which is the limit; make it shorter", param=param
                )
            if len(pieces) > 1:
                await asyncio.sleep(0)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None
    return pieces


def _digest(pieces: list[bytes | bytearray]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _num_bytes(outcome: Outcome) -> int:
    match outcome:
        case Done():
            return len(outcome.text)
        case DoneLong():
            return len(outcome.utf8)
        case Refused():
            return len(outcome.message)


def _fail(job: _Job, error: ServekitError) -> None:
    if not job.outcome.done():
        job.outcome.set_exception(error)
