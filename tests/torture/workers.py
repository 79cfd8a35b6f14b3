"""Inject nine kinds of worker failures under live streams, and check what the clients notice.

servekit has no hook for it. Signals and limits come from outside. Faults that only the worker itself can produce are
planted by `faults/sitecustomize.py`, which the server's environment names.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from tests.support.server_process import ServerProcess, serving
from tests.torture.crowd import Crowd, References, Tally, requests, wait_until
from tests.torture.faults.sitecustomize import SIGNALS
from tests.torture.report import BUILD, Finding, percentile

FAULTS_PATH = str(Path(__file__).parent / "faults")

NUM_CLIENTS = 64
# What the worker does when the fault is injected. `loading`: it replaces a worker that was just killed.
MOMENTS = ("streaming", "prefill", "loading", "streaming", "idle", "streaming")
# Only this timeout notices a worker that hangs while it loads.
LOAD_TIMEOUT_S = 12
REPLACED_WITHIN_S = 45

POOLS = {
    # name: (longest context, the server's arguments)
    "roomy": (2048, ("--max-model-len", "2048")),
    "scarce": (128, ("--max-model-len", "128", "--num-kv-blocks", "128", "--block-size", "8")),
}


class Fault(Struct, frozen=True):
    """A kind of failure. `is_fatal` is None if the worker may survive or be replaced; both are right."""

    name: str
    inject: Callable[[int, random.Random], None]
    is_fatal: bool | None = True
    lasts_s: float = 2.0  # a worker that still answers after this time has survived
    may_be_caught: bool = False  # by a library that is being imported: imports often catch exceptions


def _signal(number: int) -> Callable[[int, random.Random], None]:
    return lambda pid, chance: os.kill(pid, number)


def planted(*names: str) -> Callable[[int, random.Random], None]:
    return lambda pid, chance: os.kill(pid, SIGNALS[chance.choice(names)])


def _deny_memory(pid: int, chance: random.Random) -> None:
    """Make every further memory allocation of the worker fail."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))


def _restore_memory(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


FAULTS = (
    Fault("kill -9", _signal(signal.SIGKILL)),
    Fault("SIGSEGV", _signal(signal.SIGSEGV)),
    Fault("SIGSTOP", _signal(signal.SIGSTOP)),
    Fault("exit 0", planted("exit")),
    Fault("exception", planted("raise"), may_be_caught=True),
    # A result of another epoch is dropped; the other kinds end the worker.
    Fault(
        "garbage frame",
        planted("random bytes", "over-long header", "half a frame", "unknown message", "stale result"),
        None,
    ),
    Fault("slow worker", planted("sleep 1 s", "sleep 4 s"), False, lasts_s=5.0),
    Fault("memory limit", _deny_memory, None),
    Fault("GIL held", planted("hold the GIL")),
)


class FaultResults(Struct):
    """What the injected faults did to a server."""

    num_injected: int = 0
    num_replaced: int = 0
    recoveries_s: list[float] = field(default_factory=list)  # from the fault to the first token after it
    detections_s: list[float] = field(default_factory=list)  # from the fault until the server reaped the process
    violations: list[str] = field(default_factory=list)


class ServerEnded(Exception):
    """The server ended, which a worker's failure must not cause."""


class FaultInjector:
    """Injects faults into one server's workers while clients send requests."""

    def __init__(self, server: ServerProcess, crowd: Crowd, seed: int, max_delay_s: float = 1.0) -> None:
        self._server = server
        self._crowd = crowd
        self._chance = random.Random(seed)
        self._max_delay_s = max_delay_s  # before a fault during streaming
        self._num_files = 0

    async def begin(self) -> None:
        """Start the clients when all processes of the server run."""
        await wait_until(lambda: bool(self._server.sandbox_pids()), 20)
        self._num_files = self._server.num_open_files()
        self._crowd.open()

    async def inject(self, fault: Fault, moment: str, results: FaultResults) -> None:
        """Inject the fault at such a moment, and wait until tokens arrive again. Raises ServerEnded."""
        if moment == "loading" and fault.may_be_caught:
            fault = replace(fault, is_fatal=None)
        pid = await self._wait_for_worker(None)
        if moment in ("idle", "prefill"):
            await self._rest(results, f"before {fault.name} while {moment}")
        if moment == "prefill":
            self._crowd.open()
            await asyncio.sleep(self._chance.uniform(0, 0.05))
        elif moment == "streaming":
            await self._wait_for_no_suspects()
            await asyncio.sleep(self._chance.uniform(0, self._max_delay_s))
        elif moment == "loading":
            os.kill(pid, signal.SIGKILL)
            pid = await self._wait_for_worker(pid)
            await asyncio.sleep(self._chance.uniform(0, 2))
        self._crowd.clear_token_times()
        injected_s = time.monotonic()
        fault.inject(pid, self._chance)
        self._crowd.open()
        results.num_injected += 1
        what = f"{fault.name} while {moment} ({results.num_injected})"
        has_ended = await self._watch(fault, pid, injected_s, results)
        results.num_replaced += has_ended
        if has_ended and fault.is_fatal is False:
            results.violations.append(f"{what}: the worker was replaced without need")
        if not has_ended and fault.is_fatal is True:
            results.violations.append(f"{what}: the worker was not replaced within {REPLACED_WITHIN_S} s")
        if not has_ended and fault.inject is _deny_memory:
            _restore_memory(pid)
        back_s = time.monotonic() if not has_ended else await self._time_of_replacement(pid)
        try:
            first_s = await self._crowd.first_token_after(back_s if has_ended else injected_s)
        except TimeoutError:
            self._check_alive()
            results.violations.append(f"{what}: no token within a minute")
            return
        if has_ended:
            results.recoveries_s.append(first_s - injected_s)

    async def _watch(self, fault: Fault, pid: int, injected_s: float, results: FaultResults) -> bool:
        """Return whether the fault ended the worker. It survived if tokens arrive after the duration of the fault."""
        survived_s = injected_s + fault.lasts_s

        def is_decided() -> bool:
            now_s, times_s = time.monotonic(), self._crowd.token_times_s
            flows = bool(times_s) and times_s[-1] > now_s - 0.5
            return _is_gone(pid) or (fault.is_fatal is not True and now_s > survived_s and flows)

        await wait_until(is_decided, REPLACED_WITHIN_S, pause_s=0.002)
        has_ended = _is_gone(pid)
        if has_ended:
            results.detections_s.append(time.monotonic() - injected_s)
        return has_ended

    async def check_at_rest(self, results: FaultResults, when: str) -> None:
        """Check that no block, process or open file of an ended worker is left."""
        await self._rest(results, when)
        expected = sorted(self._server.worker_pids() + self._server.sandbox_pids() + self._server.body_process_pids())
        started = sorted(self._server.started_pids())
        if started != expected or len(self._server.worker_pids()) != 1:
            results.violations.append(f"{when}: processes {started}, of which its children are {expected}")
        num_sandboxes = len(self._server.sandbox_pids())
        if not 1 <= num_sandboxes <= 4:
            allowed = "1 to 4 are allowed: the fork server and at most three idle ones"
            results.violations.append(f"{when}: {num_sandboxes} sandbox processes; {allowed}")
        if not await wait_until(lambda: self._server.num_open_files() <= self._num_files + 5, 5):
            num_files = self._server.num_open_files()
            results.violations.append(f"{when}: {num_files} open files, {self._num_files} at first")

    async def _rest(self, results: FaultResults, when: str) -> None:
        try:
            await self._crowd.rest()
            await asyncio.to_thread(self._server.wait_until_at_rest)
        except (TimeoutError, AssertionError) as error:
            self._check_alive()
            results.violations.append(f"{when}: not at rest: {error!r}")

    async def _wait_for_no_suspects(self) -> None:
        """Wait until no request is suspected of the last crashes: it would rightly be blamed for a third one."""
        await wait_until(lambda: self._server.metric("servekit_num_requests_suspected") == 0, REPLACED_WITHIN_S, 0.1)

    async def _wait_for_worker(self, other_than: int | None) -> int:
        """Return the process id of a worker, once it handles the planted signals."""
        found: list[int] = []

        def is_ready() -> bool:
            self._check_alive()
            found[:] = [pid for pid in self._server.worker_pids() if pid != other_than and handles_planted_signals(pid)]
            return bool(found)

        if not await wait_until(is_ready, REPLACED_WITHIN_S):
            raise ServerEnded(f"no worker within {REPLACED_WITHIN_S} s:\n{_last_lines(self._server.log)}")
        return found[0]

    async def _time_of_replacement(self, pid: int) -> float:
        await self._wait_for_worker(pid)
        return time.monotonic()

    def _check_alive(self) -> None:
        if (code := self._server.process.poll()) is not None:
            raise ServerEnded(f"the server ended with exit code {code}:\n{_last_lines(self._server.log)}")


def handles_planted_signals(pid: int) -> bool:
    """Return whether the process has installed its handlers for planted faults."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return all(caught >> (number - 1) & 1 for number in SIGNALS.values())


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def _last_lines(log: Path, num: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num:])


def serving_with_faults(pool: str, log: Path, *arguments: str) -> AbstractContextManager[ServerProcess]:
    """Start a server whose workers have the planted faults."""
    _, flags = POOLS[pool]
    flags = (*flags, "--load-timeout", str(LOAD_TIMEOUT_S), *arguments)
    return serving(*flags, log=log, environment=fault_environment())


def fault_environment() -> dict[str, str]:
    """Return the environment of a server whose workers have the planted faults."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [FAULTS_PATH, os.environ.get("PYTHONPATH")]))}


async def _torture(
    server: ServerProcess,
    fault: Fault,
    moments: list[str],
    references: References,
    seed: int,
    tally: Tally,
    results: FaultResults,
) -> float:
    """Inject the fault at each of the moments; return the number of preemptions."""
    crowd = Crowd(server.port, references, NUM_CLIENTS, seed)
    crowd.tally = tally
    injector = FaultInjector(server, crowd, seed)
    try:
        await injector.begin()
        for moment in moments:
            try:
                await injector.inject(fault, moment, results)
            except ServerEnded as error:
                results.violations.append(f"{fault.name} while {moment} ({results.num_injected}): {error}")
                return 0.0
        await injector.check_at_rest(results, f"after {fault.name}")
        return server.metric("servekit_num_preemptions_total")
    finally:
        await crowd.stop()


def run(times: int, seed: int = 0, only: str | None = None) -> list[Finding]:
    """Inject each fault `times` times, or only the one named; half of them with scarce KV blocks."""
    tally, recoveries, findings = Tally(), [], []
    num_preemptions, num_left_out = 0.0, 0
    references = {}
    for pool, (longest, _) in POOLS.items():
        references[pool] = References()
        with serving_with_faults(pool, BUILD / f"workers-{pool}.log") as server:
            asyncio.run(references[pool].take(server.port, requests(longest)))
        num_left_out += references[pool].num_left_out
    for number, fault in enumerate(FAULTS):
        if only not in (None, fault.name):
            continue
        results = FaultResults()
        moments = [MOMENTS[index % len(MOMENTS)] for index in range(times)]
        half = times - times // 2
        for pool, share in zip(POOLS, (moments[:half], moments[half:]), strict=True):
            log = BUILD / f"workers-{pool}-{fault.name.replace(' ', '-')}.log"
            with serving_with_faults(pool, log) as server:
                injected = _torture(server, fault, share, references[pool], seed + number, tally, results)
                num_preemptions += asyncio.run(injected)
        print(f"  {fault.name}: {_figures(results)}; so far {dict(tally.counts)}", flush=True)
        for violation in results.violations:
            print(f"    {violation}", flush=True)
        findings.append(Finding(fault.name, f"{times} times, no violation", _figures(results), not results.violations))
        recoveries += results.recoveries_s
    for example in tally.examples:
        print(f"  {example[:2000]}", flush=True)
    return [
        *findings,
        *tally.findings(),
        Finding("requests left out because their answer depends on their company", "", f"{num_left_out}"),
        Finding("preemptions meanwhile", "some", f"{num_preemptions:,.0f}", num_preemptions > 0),
        Finding(
            "recovery, from the fault to the first token of the next worker: p50, p99, longest",
            "",
            ", ".join(f"{percentile(recoveries, share):.1f} s" for share in (0.5, 0.99, 1)),
        ),
    ]


def _figures(results: FaultResults) -> str:
    summary = f"{results.num_injected} times, {results.num_replaced} replaced, {len(results.violations)} violations"
    if results.recoveries_s:
        summary += (
            f"; noticed after {1e3 * percentile(results.detections_s, 0.5):,.0f} ms (p50) and "
            f"{1e3 * percentile(results.detections_s, 0.99):,.0f} ms (p99), tokens again after "
            f"{percentile(results.recoveries_s, 0.5):.1f} s and {percentile(results.recoveries_s, 0.99):.1f} s"
        )
    return summary
