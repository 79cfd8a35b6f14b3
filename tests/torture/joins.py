"""Let workers join, leave and die at random under load, beside strangers, liars and altered connections.

The claims: no answer is lost or altered, no connection without the key gets in, every lie that contradicts a plan ends
its connection, a worker that gets SIGTERM exits with 0, and at the end nothing is left of any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.torture.crowd import PROMPTS, Crowd, References, wait_until
from tests.torture.hostile_workers import ALL_LIES, LIAR, NO_PLAN, RECORDED, STRANGERS, STRAY, Tamperer, lie, record
from tests.torture.joined_workers import JoinedWorkers
from tests.torture.report import Finding
from tests.torture.streams import RequestSpec

MODEL = "sim:step=5ms,decode=0.5ms"  # with many sequences a step takes longer, so the router uses all workers
NUM_CLIENTS = 32
NUM_WORKERS = 3  # that are honest; only one of them is disturbed at a time
CALM_S = 1.5  # between two disturbances of a kind, at least
EXIT_TIMEOUT_S = 40.0
LIE_TIMEOUT_S = 180.0
MAX_MIB = 64.0
STRAY_KINDS = f"liars: results that no step waits for, {len(STRAY)} kinds"
LIE_KINDS = f"liars: answers that cannot be right, and none, {len(ALL_LIES) - len(STRAY)} kinds"
FLAGS = ("--model", MODEL, "--num-kv-blocks", "4096", "--worker-restart-timeout", "120", "--log-level", "info")


def requests() -> References:
    """Return requests of many lengths with their answers, which the simulated model defines."""
    references, reference, chance = References(), NaiveReference(), random.Random(3)
    for number in range(60):
        prompt = f"{number}: {' '.join(chance.sample(PROMPTS, chance.randrange(1, 8)))}"
        length = chance.choice([5, 20, 60, 120])
        asked = RequestSpec(
            f"stream {number}", "/generate_stream", {"prompt": prompt, "max_tokens": length, "ignore_eos": True}
        )
        references.asked.append(asked)
        params = SamplingParams(max_tokens=length)
        references.answers[asked.name] = [reference.output(prompt.encode(), params)]
    return references


class Siege:
    """What happens to one server, and what came of it."""

    def __init__(self, service: JoinedWorkers, seed: int) -> None:
        self.service = service
        self.outcomes: dict[str, Counter[str]] = {}  # by what happened: what came of it, and how often
        self.expected: dict[str, str] = {}  # by what happened
        self.violations: list[str] = []
        self.num_recorded = 0
        self._recorded: list[bytes] = []
        self._chance = random.Random(seed)
        self._address = (service.host, service.port)
        self._wrong_key_file = service.write_key("wrong-key", b"another key" * 4)
        self._has_ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        """Disturb the server for so long, and wait until all that has begun is over."""
        loops = [self._workers(), self._strangers(), self._liars(), self._tampering()]
        running = [asyncio.create_task(each) for each in loops]
        await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        self._has_ended.set()
        await asyncio.gather(*running)
        await asyncio.gather(*self._tasks)

    def _count(self, what: str, outcome: str, expected: str, detail: str = "") -> None:
        self.expected[what] = expected
        self.outcomes.setdefault(what, Counter())[outcome] += 1
        if outcome != expected:
            self.violations.append(f"{what}: {outcome} {detail}".rstrip())

    async def _pause(self, shortest_s: float, longest_s: float) -> None:
        await wait_until(self._has_ended.is_set, self._chance.uniform(shortest_s, longest_s), pause_s=0.05)

    # -- honest workers -----------------------------------------------------------------------------------------------

    async def _workers(self) -> None:
        disturbances: list[Callable[[subprocess.Popen[bytes]], Awaitable[None]]] = [
            self._kill_agent,
            self._kill_model_process,
            self._leave,
            self._leave_impatiently,
            self._stop_for_a_while,
            self._wrong_key,
        ]
        while not self._has_ended.is_set():
            await self._pause(CALM_S, 2 * CALM_S)
            await self.service.wait_until_serving(2)
            for worker in [each for each in self.service.workers if each.poll() is not None]:
                self._count("worker that nobody ended", f"exit code {self.service.reap(worker)}", "none")
            # Of a process that still imports its libraries, a signal has its default effect.
            started = [each for each in self.service.workers if self.service.model_process(each) is not None]
            if started:
                await self._chance.choice(disturbances)(self._chance.choice(started))
            while len(self.service.workers) < NUM_WORKERS:
                self.service.start_worker()

    async def _kill_agent(self, worker: subprocess.Popen[bytes]) -> None:
        worker.kill()
        self.service.reap(worker)
        self._count("worker killed", "killed", "killed")

    async def _kill_model_process(self, worker: subprocess.Popen[bytes]) -> None:
        pid = self.service.model_process(worker)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            is_back = await wait_until(lambda: self.service.model_process(worker) not in (None, pid), EXIT_TIMEOUT_S)
            self._count("model process killed", "joined again" if is_back else "did not join again", "joined again")

    async def _leave(self, worker: subprocess.Popen[bytes], num_signals: int = 1) -> None:
        for _ in range(num_signals):
            worker.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
        has_exited = await wait_until(lambda: worker.poll() is not None, EXIT_TIMEOUT_S)
        what = "SIGTERM" if num_signals == 1 else "SIGTERM twice"
        self._count(what, f"exit code {worker.returncode}" if has_exited else "did not exit", "exit code 0")
        if has_exited:
            self.service.reap(worker)

    async def _leave_impatiently(self, worker: subprocess.Popen[bytes]) -> None:
        await self._leave(worker, num_signals=2)

    async def _stop_for_a_while(self, worker: subprocess.Popen[bytes]) -> None:
        """The server takes it for lost, and it joins again when it goes on."""
        pid = self.service.model_process(worker)
        victim = self._chance.choice([worker.pid, pid or worker.pid])
        os.kill(victim, signal.SIGSTOP)
        await self._pause(1.0, 6.0)
        with contextlib.suppress(ProcessLookupError):  # the agent ends it when the server closes the connection
            os.kill(victim, signal.SIGCONT)
        self._count("worker stopped for 1 to 6 s", "continued", "continued")

    async def _wrong_key(self, _: subprocess.Popen[bytes]) -> None:
        worker = self.service.start_worker(key_file=self._wrong_key_file)
        has_exited = await wait_until(lambda: worker.poll() is not None, EXIT_TIMEOUT_S)
        outcome = f"exit code {worker.returncode}" if has_exited else "did not exit"
        self._count("a worker process with a wrong key", outcome, "exit code 2")
        worker.kill()
        self.service.reap(worker)

    # -- strangers, liars, and a machine between ----------------------------------------------------------------------

    async def _strangers(self) -> None:
        while not self._has_ended.is_set():
            if len(self._recorded) < 10 or self._chance.random() < 0.01:
                with contextlib.suppress(OSError, EOFError, TimeoutError):
                    self._recorded = [*self._recorded[-9:], await record(self._address)]
                    self.num_recorded += 1
            name = self._chance.choice(list(STRANGERS))
            self._start(self._stranger(name))
            await self._pause(0.0, 0.3)

    async def _stranger(self, name: str) -> None:
        is_refused = await STRANGERS[name](self._address, self._chance, self._recorded)
        self._count(name, "refused" if is_refused else "not refused", "refused")

    async def _liars(self) -> None:
        """Each lie once, and then again: one liar at a time."""
        names: list[str] = []
        while not self._has_ended.is_set():
            names = names or self._chance.sample(ALL_LIES, len(ALL_LIES))
            name = names.pop()
            is_stray = name in STRAY
            try:
                async with asyncio.timeout(LIE_TIMEOUT_S):
                    outcome = await lie(self._address, name, self._chance)
            except TimeoutError:
                outcome = "timeout"
            if outcome == NO_PLAN:  # the others had room for all requests
                self._count("liars that got no plan to lie about", "left", "left")
            else:
                kinds, expected = (STRAY_KINDS, "dropped") if is_stray else (LIE_KINDS, "thrown out")
                self._count(kinds, outcome, expected, name)
            await self._pause(CALM_S, 2 * CALM_S)

    async def _tampering(self) -> None:
        while not self._has_ended.is_set():
            await self._pause(3.0, 8.0)
            between = Tamperer(self._address, self._chance)
            await between.start()
            worker = self.service.start_worker(address=f"tcp://127.0.0.1:{between.port}")
            self.service.workers.remove(worker)  # it is none of those that are disturbed
            try:
                if await wait_until(between.has_tampered.is_set, 60):
                    is_noticed = await wait_until(between.both_closed.is_set, 30)
                    outcome = "noticed" if is_noticed else "not noticed"
                    self._count("bytes altered on the way", outcome, "noticed")
            finally:
                worker.kill()
                worker.wait()
                await between.stop()

    def _start(self, what: Awaitable[None]) -> None:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.violations.append(f"the test itself failed: {task.exception()!r}")
        self._tasks.discard(task)


def num_let_in(log: str, num_recorded: int) -> dict[str, int]:
    """Count the workers that the server's log says were accepted, and that should not have been."""
    hosts = Counter(re.findall(r"worker \d+ on (\S+), .* is joining", log))
    own = os.uname().nodename
    return {
        "strangers": sum(number for host, number in hosts.items() if host not in (own, LIAR, RECORDED)),
        "replays": hosts[RECORDED] - num_recorded,
    }


async def _siege(service: JoinedWorkers, seconds: float, seed: int) -> tuple[Siege, Crowd, list[Finding]]:
    for _ in range(NUM_WORKERS):
        service.start_worker()
    await service.wait_until_serving(NUM_WORKERS)
    crowd = Crowd(service.server.port, requests(), NUM_CLIENTS, seed)
    crowd.open()
    await asyncio.sleep(3.0)
    memory_mib, num_files = service.server.resident_mib(), service.server.num_open_files()
    siege = Siege(service, seed)
    started_s = time.monotonic()
    try:
        await siege.run(seconds)
        await crowd.rest()
        await asyncio.to_thread(service.server.wait_until_at_rest)
        await service.wait_until_serving(NUM_WORKERS)
    finally:
        await crowd.stop()
    print(f"  {time.monotonic() - started_s:.0f} s of siege", flush=True)
    more_mib = service.server.resident_mib() - memory_mib
    has_few_files = await wait_until(lambda: service.server.num_open_files() <= num_files + 5, 60, pause_s=0.5)
    faults = service.server.metric("servekit_accounting_faults_total")
    losses = service.server.metric("servekit_worker_restarts_total")
    return (
        siege,
        crowd,
        [
            Finding("workers lost or left meanwhile", "", f"{losses:,.0f}"),
            Finding("longest pause of any stream", "", f"{crowd.longest_pause_s:.1f} s"),
            Finding("KV blocks or slots that were not accounted for", "0", f"{faults:.0f}", faults == 0),
            Finding(
                "open files of the server, at the end",
                "as before",
                f"{service.server.num_open_files()}, {num_files} before",
                has_few_files,
            ),
            Finding(
                "memory of the server, more than before",
                f"<= {MAX_MIB:g} MiB",
                f"{more_mib:.0f} MiB",
                more_mib <= MAX_MIB,
            ),
        ],
    )


def run(minutes: float, seed: int = 0) -> list[Finding]:
    """Disturb a server with joined workers for so many minutes."""
    with JoinedWorkers("joins", *FLAGS) as service:
        siege, crowd, at_end = asyncio.run(_siege(service, 60 * minutes, seed))
        log = service.server.log.read_text()
    findings = _by_event(siege)
    for who, number in num_let_in(log, siege.num_recorded).items():
        findings.append(Finding(f"{who} that were let in", "0", f"{number}", number == 0))
    num_tracebacks = log.count("Traceback")
    for line in (*siege.violations[:20], *crowd.tally.examples):
        print(f"  {line[:500]}", flush=True)
    return [
        *findings,
        *crowd.tally.findings(),
        *at_end,
        Finding("tracebacks in the server's log", "0", f"{num_tracebacks}", num_tracebacks == 0),
    ]


def _by_event(siege: Siege) -> list[Finding]:
    """Return a finding for each kind of event."""
    return [
        Finding(
            what,
            "" if expected in ("killed", "continued", "left") else f"{expected} each time",
            ", ".join(f"{outcome} {number:,}" for outcome, number in siege.outcomes[what].most_common()),
            siege.outcomes[what].keys() == {expected},
        )
        for what, expected in sorted(siege.expected.items())
    ]
