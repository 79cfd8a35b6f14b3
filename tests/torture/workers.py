"""Nine ways for a worker to fail, under live streams: what do their clients notice?

Nothing in servekit helps with it. Signals and limits come from outside, and what only the worker itself can do wrong is
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

from tests.server_process import ServerProcess, serving
from tests.torture.crowd import Crowd, References, Tally, requests, wait_until
from tests.torture.faults.sitecustomize import SIGNALS
from tests.torture.report import BUILD, Finding, percentile

FAULTS_PATH = str(Path(__file__).parent / "faults")

NUM_CLIENTS = 64
# What the worker is doing when it is struck. `loading` means that the struck one replaces one that was killed just now.
MOMENTS = ("streaming", "prefill", "loading", "streaming", "idle", "streaming")
# A worker that hangs while it loads is noticed by this alone.
LOAD_TIMEOUT_S = 12
REPLACED_WITHIN_S = 45

POOLS = {
    # name: (longest context, the server's arguments)
    "roomy": (2048, ("--max-model-len", "2048")),
    "scarce": (128, ("--max-model-len", "128", "--num-kv-blocks", "128", "--block-size", "8")),
}


class Fault(Struct, frozen=True):
    """A way to fail. `is_fatal` is None where the worker may bear it, or may be replaced; both are right."""

    name: str
    strike: Callable[[int, random.Random], None]
    is_fatal: bool | None = True
    lasts_s: float = 2.0  # then a worker that still answers has borne it
    may_be_caught: bool = False  # by a library that is just being imported: those take missing parts as they come


def _signal(number: int) -> Callable[[int, random.Random], None]:
    return lambda pid, chance: os.kill(pid, number)


def planted(*names: str) -> Callable[[int, random.Random], None]:
    return lambda pid, chance: os.kill(pid, SIGNALS[chance.choice(names)])


def _no_more_memory(pid: int, chance: random.Random) -> None:
    """Whatever the worker asks the kernel for from now on, it does not get."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))


def _memory_again(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


FAULTS = (
    Fault("kill -9", _signal(signal.SIGKILL)),
    Fault("SIGSEGV", _signal(signal.SIGSEGV)),
    Fault("SIGSTOP", _signal(signal.SIGSTOP)),
    Fault("exit 0", planted("exit")),
    Fault("exception", planted("raise"), may_be_caught=True),
    # A result of another epoch is dropped; the others are the end of a worker.
    Fault(
        "garbage frame",
        planted("random bytes", "over-long header", "half a frame", "unknown message", "stale result"),
        None,
    ),
    Fault("slow worker", planted("sleep 1 s", "sleep 4 s"), False, lasts_s=5.0),
    Fault("memory limit", _no_more_memory, None),
    Fault("GIL held", planted("hold the GIL")),
)


class Wounds(Struct):
    """What striking a server did to it."""

    num_struck: int = 0
    num_replaced: int = 0
    recoveries_s: list[float] = field(default_factory=list)  # from the strike to the first token after it
    detections_s: list[float] = field(default_factory=list)  # from the strike to the server's reaping the process
    violations: list[str] = field(default_factory=list)


class ServerEndedError(Exception):
    """It should have outlived its worker."""


class Torturer:
    """Strikes one server's workers while a crowd asks it."""

    def __init__(self, server: ServerProcess, crowd: Crowd, seed: int, most_patience_s: float = 1.0) -> None:
        self._server = server
        self._crowd = crowd
        self._chance = random.Random(seed)
        self._most_patience_s = most_patience_s  # before it strikes those who stream
        self._num_files = 0

    async def begin(self) -> None:
        """Let the crowd in, once all is there that belongs to a server."""
        await wait_until(lambda: len(self._server.sandbox_pids()) == 2, 20)
        self._num_files = self._server.num_open_files()
        self._crowd.open()

    async def strike(self, fault: Fault, moment: str, wounds: Wounds) -> None:
        """Once, at such a moment, and wait until tokens flow again. Raises ServerEndedError."""
        if moment == "loading" and fault.may_be_caught:
            fault = replace(fault, is_fatal=None)
        pid = await self._wait_for_worker(None)
        if moment in ("idle", "prefill"):
            await self._rest(wounds, f"before {fault.name} while {moment}")
        if moment == "prefill":
            self._crowd.open()
            await asyncio.sleep(self._chance.uniform(0, 0.05))
        elif moment == "streaming":
            await asyncio.sleep(self._chance.uniform(0, self._most_patience_s))
        elif moment == "loading":
            os.kill(pid, signal.SIGKILL)
            pid = await self._wait_for_worker(pid)
            await asyncio.sleep(self._chance.uniform(0, 2))
        self._crowd.forget()
        struck_s = time.monotonic()
        fault.strike(pid, self._chance)
        self._crowd.open()
        wounds.num_struck += 1
        what = f"{fault.name} while {moment} ({wounds.num_struck})"
        has_ended = await self._watch(fault, pid, struck_s, wounds)
        wounds.num_replaced += has_ended
        if has_ended and fault.is_fatal is False:
            wounds.violations.append(f"{what}: the worker was replaced, which was not called for")
        if not has_ended and fault.is_fatal is True:
            wounds.violations.append(f"{what}: the worker was not replaced within {REPLACED_WITHIN_S} s")
        if not has_ended and fault.strike is _no_more_memory:
            _memory_again(pid)
        back_s = time.monotonic() if not has_ended else await self._first_sight_of_another(pid)
        try:
            first_s = await self._crowd.first_token_after(back_s if has_ended else struck_s)
        except TimeoutError:
            self._check_alive()
            wounds.violations.append(f"{what}: no token within a minute")
            return
        if has_ended:
            wounds.recoveries_s.append(first_s - struck_s)

    async def _watch(self, fault: Fault, pid: int, struck_s: float, wounds: Wounds) -> bool:
        """Whether the worker ended of it. It bore it if tokens flow behind the time that the fault takes."""
        borne_s = struck_s + fault.lasts_s

        def is_decided() -> bool:
            now_s, times_s = time.monotonic(), self._crowd.token_times_s
            flows = bool(times_s) and times_s[-1] > now_s - 0.5
            return _is_gone(pid) or (fault.is_fatal is not True and now_s > borne_s and flows)

        await wait_until(is_decided, REPLACED_WITHIN_S, pause_s=0.002)
        has_ended = _is_gone(pid)
        if has_ended:
            wounds.detections_s.append(time.monotonic() - struck_s)
        return has_ended

    async def check_at_rest(self, wounds: Wounds, when: str) -> None:
        """Nothing may be left of what was struck: no block, no process, no open file."""
        await self._rest(wounds, when)
        expected = sorted(self._server.worker_pids() + self._server.sandbox_pids())
        started = sorted(self._server.started_pids())
        if started != expected or len(self._server.worker_pids()) != 1 or len(self._server.sandbox_pids()) != 2:
            wounds.violations.append(f"{when}: processes {started}, of which its children are {expected}")
        if not await wait_until(lambda: self._server.num_open_files() <= self._num_files + 2, 5):
            num_files = self._server.num_open_files()
            wounds.violations.append(f"{when}: {num_files} open files, {self._num_files} at first")

    async def _rest(self, wounds: Wounds, when: str) -> None:
        try:
            await self._crowd.rest()
            await asyncio.to_thread(self._server.wait_until_at_rest)
        except (TimeoutError, AssertionError) as error:
            self._check_alive()
            wounds.violations.append(f"{when}: not at rest: {error!r}")

    async def _wait_for_worker(self, other_than: int | None) -> int:
        """Its process id, once it has got as far as to be struck."""
        found: list[int] = []

        def is_there() -> bool:
            self._check_alive()
            found[:] = [pid for pid in self._server.worker_pids() if pid != other_than and can_be_struck(pid)]
            return bool(found)

        if not await wait_until(is_there, REPLACED_WITHIN_S):
            raise ServerEndedError(f"no worker within {REPLACED_WITHIN_S} s:\n{_last_lines(self._server.log)}")
        return found[0]

    async def _first_sight_of_another(self, pid: int) -> float:
        await self._wait_for_worker(pid)
        return time.monotonic()

    def _check_alive(self) -> None:
        if (code := self._server.process.poll()) is not None:
            raise ServerEndedError(f"the server ended with exit code {code}:\n{_last_lines(self._server.log)}")


def can_be_struck(pid: int) -> bool:
    """Whether it has come far enough to handle the signals that plant faults."""
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


def tortured(pool: str, log: Path, *arguments: str) -> AbstractContextManager[ServerProcess]:
    """A server whose workers can be struck."""
    _, flags = POOLS[pool]
    flags = (*flags, "--load-timeout", str(LOAD_TIMEOUT_S), *arguments)
    return serving(*flags, log=log, environment=with_faults())


def with_faults() -> dict[str, str]:
    """The environment of a server whose workers have planted faults."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [FAULTS_PATH, os.environ.get("PYTHONPATH")]))}


async def _torture(
    server: ServerProcess,
    fault: Fault,
    moments: list[str],
    references: References,
    seed: int,
    tally: Tally,
    wounds: Wounds,
) -> float:
    """Strike at each of the moments; returns how many preemptions there were."""
    crowd = Crowd(server.port, references, NUM_CLIENTS, seed)
    crowd.tally = tally
    torturer = Torturer(server, crowd, seed)
    try:
        await torturer.begin()
        for moment in moments:
            try:
                await torturer.strike(fault, moment, wounds)
            except ServerEndedError as error:
                wounds.violations.append(f"{fault.name} while {moment} ({wounds.num_struck}): {error}")
                return 0.0
        await torturer.check_at_rest(wounds, f"after {fault.name}")
        return server.metric("servekit_num_preemptions_total")
    finally:
        await crowd.stop()


def run(times: int, seed: int = 0, only: str | None = None) -> list[Finding]:
    """Each fault so often, or only one of them; half of it where KV blocks are scarce."""
    tally, recoveries, findings = Tally(), [], []
    num_preemptions, num_left_out = 0.0, 0
    references = {}
    for pool, (longest, _) in POOLS.items():
        references[pool] = References()
        with tortured(pool, BUILD / f"workers-{pool}.log") as server:
            asyncio.run(references[pool].take(server.port, requests(longest)))
        num_left_out += references[pool].num_left_out
    for number, fault in enumerate(FAULTS):
        if only not in (None, fault.name):
            continue
        wounds = Wounds()
        moments = [MOMENTS[index % len(MOMENTS)] for index in range(times)]
        half = times - times // 2
        for pool, share in zip(POOLS, (moments[:half], moments[half:]), strict=True):
            log = BUILD / f"workers-{pool}-{fault.name.replace(' ', '-')}.log"
            with tortured(pool, log) as server:
                struck = _torture(server, fault, share, references[pool], seed + number, tally, wounds)
                num_preemptions += asyncio.run(struck)
        print(f"  {fault.name}: {_figures(wounds)}; so far {dict(tally.counts)}", flush=True)
        for violation in wounds.violations:
            print(f"    {violation}", flush=True)
        findings.append(Finding(fault.name, f"{times} times, no violation", _figures(wounds), not wounds.violations))
        recoveries += wounds.recoveries_s
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


def _figures(wounds: Wounds) -> str:
    told = f"{wounds.num_struck} times, {wounds.num_replaced} replaced, {len(wounds.violations)} violations"
    if wounds.recoveries_s:
        told += (
            f"; noticed after {1e3 * percentile(wounds.detections_s, 0.5):,.0f} ms (p50) and "
            f"{1e3 * percentile(wounds.detections_s, 0.99):,.0f} ms (p99), tokens again after "
            f"{percentile(wounds.recoveries_s, 0.5):.1f} s and {percentile(wounds.recoveries_s, 0.99):.1f} s"
        )
    return told
