"""Run eight kinds of faulty clients, many times each, beside streams of well-behaved ones.

The latency of the streams is compared with the same streams beside as many polite clients that send the same requests,
because a batch with more sequences takes longer in any case.
"""

from __future__ import annotations

import asyncio
import math
import socket
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from resource import getpagesize

import msgspec

from tests.support.raw_sockets import connect, post
from tests.support.server_process import ONE_THREAD, ServerProcess, serving
from tests.torture.hostile_clients import AT_ONCE, FAULTS, Outcome, reset_on_close
from tests.torture.report import Finding, percentile, table
from tests.torture.streams import Connections, End, Reply, RequestSpec, ask

# A pool that is touched completely before anything is timed: the first use of a memory page costs a page fault.
FLAGS = ("--header-timeout", "1", "--body-timeout", "1", "--send-timeout", "2", "--num-kv-blocks", "1024")
WITNESSES = [
    RequestSpec(f"witness {number}", "/generate_stream", {"prompt": prompt, "max_tokens": 120, "ignore_eos": True})
    for number, prompt in enumerate(
        ["What color is the sky?", "Count to nine.", "Tell me a story.", "What is a cat?"] * 2
    )
]
MAX_STEPS_AFTER = 2
MAX_LATENCY_RATIO = 1.2
# Intervals that are needed to judge a 99th percentile. All eight witnesses get a token in the same step, so there are
# an eighth as many steps, of which the longest hundredth decides.
ENOUGH = 16_000
MAX_ROUNDS = 20
MANY = 100  # repetitions of a fault; with fewer, the latency is not judged
MORE = 10  # factor for fast faults, which are over in a second or two


class Witnesses:
    """Well-behaved streams on several connections, each compared with its expected answer."""

    def __init__(self, port: int, expected: list[Reply]) -> None:
        self._connections = Connections(port, keeps_alive=True)
        self._expected = expected
        self.num_whole = 0
        self.lost: list[str] = []
        self._token_times_s: list[list[float]] = []
        self._over_s = math.inf

    async def run(self, until: asyncio.Future[Outcome]) -> Outcome:
        tasks = [asyncio.create_task(self._repeat(number)) for number in range(len(WITNESSES))]
        try:
            outcome = await until
        finally:
            self._over_s = time.monotonic()
            await asyncio.gather(*tasks)
            self._connections.close()
        return outcome

    def intervals_s(self) -> list[float]:
        """Return the times between two tokens while the faulty clients ran."""
        return [
            later - earlier
            for times_s in self._token_times_s
            for earlier, later in pairwise(times_s)
            if later <= self._over_s
        ]

    async def _repeat(self, number: int) -> None:
        while self._over_s == math.inf:
            reply = await ask(self._connections, WITNESSES[number])
            self._token_times_s.append(reply.token_times_s)
            if reply.end is End.WHOLE and reply.answers == self._expected[number].answers:
                self.num_whole += 1
            else:
                self.lost.append(f"{number}: {reply.end} {reply.status} {reply.error}")


def run(times: int) -> list[Finding]:
    """Run each fault `times` times."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(*FLAGS, log=Path(folder) / "log", environment=ONE_THREAD) as server,
    ):
        expected = asyncio.run(_expected(server))
        asyncio.run(_beside_witnesses(server, "reset", "polite", max(64, times), expected))  # warm-up
        findings = [finding for fault in FAULTS for finding in _torture(server, fault, times, expected)]
        findings += steps_after_disconnect(server, max(3, times // 10))
        num_tracebacks = server.log.read_text().count("Traceback")
        return [*findings, Finding("clients: tracebacks in the log", "0", str(num_tracebacks), num_tracebacks == 0)]


def _torture(server: ServerProcess, fault: str, times: int, expected: list[Reply]) -> list[Finding]:
    found, witnesses = torture(server, fault, times, expected)
    calm, loud = list[float](), witnesses.intervals_s()
    num_each = times if len(loud) >= ENOUGH else MORE * times
    # Alternate, so that a machine that slows down affects both.
    for _ in range(MAX_ROUNDS if times >= MANY else 1):
        if len(calm) < ENOUGH:
            calm += _intervals_s(server, fault, "polite", max(AT_ONCE, num_each // 2), expected)
        if len(loud) < ENOUGH:
            loud += _intervals_s(server, fault, "hostile", num_each, expected)
        if min(len(calm), len(loud)) >= ENOUGH:
            break
    calm_s, loud_s = percentile(calm, 0.99), percentile(loud, 0.99)
    is_judged = min(len(calm), len(loud)) >= ENOUGH
    summary = f"{loud_s / calm_s:.2f}x ({calm_s * 1e3:.1f} -> {loud_s * 1e3:.1f} ms, {len(loud):,} tokens)"
    what = f"{fault} x {times}: others' p99 between tokens, to that beside polite clients"
    is_kept = loud_s <= MAX_LATENCY_RATIO * calm_s if is_judged else None
    return [*found, Finding(what, f"<= {MAX_LATENCY_RATIO}x", summary, is_kept)]


def _intervals_s(server: ServerProcess, fault: str, manner: str, times: int, expected: list[Reply]) -> list[float]:
    witnesses, _ = asyncio.run(_beside_witnesses(server, fault, manner, times, expected))
    return witnesses.intervals_s()


def torture(
    server: ServerProcess, faults: str, times: int, expected: list[Reply] | None = None
) -> tuple[list[Finding], Witnesses]:
    """Run one fault, or several separated by commas at the same time, beside witnesses."""
    expected = expected or asyncio.run(_expected(server))
    server.wait_until_at_rest()
    files, memory = _open_files(server), _resident_mib(server)
    witnesses, outcome = asyncio.run(_beside_witnesses(server, faults, "hostile", times, expected))
    try:
        server.wait_until_at_rest()
        are_back = True
    except AssertionError:
        are_back = False
    time.sleep(0.1)
    files, memory = _open_files(server) - files, _resident_mib(server) - memory
    name = f"{faults} x {times}"
    ended = f"{outcome.num_expected} {''.join(outcome.others[:1])}".strip()
    num_witnessed = len(witnesses.lost) + witnesses.num_whole
    witnessed = f"{len(witnesses.lost)} of {num_witnessed} {''.join(witnesses.lost[:1])}".strip()
    return [
        Finding(f"{name}: ended as they should", str(times * len(faults.split(","))), ended, not outcome.others),
        Finding(f"{name}: all blocks came back", "yes", "yes" if are_back else "no", are_back),
        Finding(f"{name}: other streams lost or altered", "0", witnessed, not witnesses.lost),
        Finding(f"{name}: open files more than before", "<= 2", str(files), files <= 2),
        Finding(f"{name}: memory more than before", "<= 16 MiB", f"{memory:.1f} MiB", memory <= 16),
    ], witnesses


async def _expected(server: ServerProcess) -> list[Reply]:
    connections = Connections(server.port)
    replies = await asyncio.gather(*(ask(connections, asked) for asked in WITNESSES))
    assert all(reply.end is End.WHOLE for reply in replies)
    return replies


async def _beside_witnesses(
    server: ServerProcess, fault: str, manner: str, times: int, expected: list[Reply]
) -> tuple[Witnesses, Outcome]:
    witnesses = Witnesses(server.port, expected)
    attack = asyncio.ensure_future(_attack(server, fault, manner, times))
    return witnesses, await witnesses.run(attack)


async def _attack(server: ServerProcess, fault: str, manner: str, times: int) -> Outcome:
    """Run the clients in a process of the lowest priority, so that they do not take CPU from the server."""
    arguments = [fault, str(server.port), str(times), manner]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.torture.hostile_clients", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return msgspec.json.decode(output, type=Outcome)


def steps_after_disconnect(server: ServerProcess, times: int) -> list[Finding]:
    """Count the steps computed after a disconnect. A lone stream has one token per step, so further ones are wasted."""
    findings = []
    for how in ("reset", "close", "half-close"):
        num_wasted = sorted(_wasted_steps(server, how) for _ in range(times))
        summary = f"median {statistics.median(num_wasted):g}, most {num_wasted[-1]:g}, of {times}"
        is_kept = statistics.median(num_wasted) <= MAX_STEPS_AFTER
        demanded = f"<= {MAX_STEPS_AFTER} (median)"
        findings.append(
            Finding(f"{how}: steps computed after the last token that was read", demanded, summary, is_kept)
        )
    return findings


def _wasted_steps(server: ServerProcess, how: str) -> float:
    before = server.metric("servekit_scheduler_steps_total")
    num_tokens = 0
    with connect(server) as client:
        client.sendall(post("/generate_stream", prompt="Once upon a time", max_tokens=1500, ignore_eos=True))
        while num_tokens < 20:
            num_tokens += client.recv(2**16).count(b"data: ")
        if how == "reset":
            reset_on_close(client)
        if how == "half-close":
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
        server.wait_until_at_rest()
    return server.metric("servekit_scheduler_steps_total") - before - num_tokens


def _open_files(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def _resident_mib(server: ServerProcess) -> float:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * getpagesize() / 2**20


if __name__ == "__main__":
    started = time.monotonic()
    print(table(run(int(sys.argv[1]) if len(sys.argv) > 1 else 500)))
    print(f"{time.monotonic() - started:.0f} s")
