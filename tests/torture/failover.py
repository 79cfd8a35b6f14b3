"""Kill one of two workers that have joined, under many streams: no answer may change, and the pause must be short.

This is what an operator can do by hand: a server without a worker of its own, two workers that join, clients, and
`kill -9`. Each round also runs the same streams without a kill, for comparison.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from functools import partial
from itertools import pairwise

from msgspec import Struct, field

from tests.support.server_process import ONE_THREAD
from tests.torture.crowd import PROMPTS, wait_until
from tests.torture.joined_workers import JoinedWorkers
from tests.torture.report import Finding, percentile
from tests.torture.streams import Connections, Reply, RequestSpec, ask

NUM_TOKENS = 150
TOKENS_BEFORE = 50  # of each stream, before the worker is killed
MAX_PAUSE_S = 0.3


class Kind(Struct, frozen=True):
    """A model, and as many streams as one worker of it can take over without getting much slower."""

    name: str
    model: str
    num_streams: int


# Of the simulated model each sequence takes a part of a step, as on a device. If a step took the same time whatever is
# in it, the router would have no reason to divide the streams.
KINDS = (
    Kind("simulated model, 21 ms a step", "sim:step=15ms,decode=0.2ms,prefill=0.03ms", 64),
    Kind("demo model, one thread each", "demo", 16),
)


def requests(num_streams: int) -> list[RequestSpec]:
    """Return requests whose answers are the same each time."""
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0}
    return [
        RequestSpec(
            f"stream {number}",
            "/generate_stream",
            {"prompt": f"{number}: {PROMPTS[number % len(PROMPTS)]}", "seed": number, **sampling},
        )
        for number in range(num_streams)
    ]


class Pauses(Struct):
    """The longest pause of each stream."""

    undisturbed_s: list[float] = field(default_factory=list)
    after_kill_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


class Streams:
    """Requests that are answered at the same time."""

    def __init__(self, port: int, asked: list[RequestSpec]) -> None:
        self._connections = Connections(port)
        self._num_tokens = [0] * len(asked)
        self._replies = [
            asyncio.create_task(ask(self._connections, each, partial(self._count, number)))
            for number, each in enumerate(asked)
        ]

    def _count(self, number: int, now_s: float) -> None:
        self._num_tokens[number] += 1

    async def wait_until_all_run(self) -> None:
        """Wait until each stream has some tokens. Raises AssertionError if one does not get any."""
        assert await wait_until(lambda: min(self._num_tokens) >= TOKENS_BEFORE, 120), "a stream has no tokens"

    async def end(self) -> list[Reply]:
        return await asyncio.gather(*self._replies)


def longest_pauses_s(replies: list[Reply], since_s: float) -> list[float]:
    """Return the longest time between two tokens of each stream that went on after a moment."""
    found = []
    for reply in replies:
        gaps_s = [after - before for before, after in pairwise(reply.token_times_s) if after > since_s]
        found += [max(gaps_s)] if gaps_s else []
    return found


async def _play(
    service: JoinedWorkers, asked: list[RequestSpec], times: int, chance: random.Random, pauses: Pauses
) -> None:
    for _ in range(2):
        service.start_worker()
    expected: list[list[object]] | None = None
    for number in range(times):
        await service.wait_until_serving(2)
        for is_killed in (False, True):
            streams = Streams(service.server.port, asked)
            await streams.wait_until_all_run()
            since_s = time.monotonic()
            if is_killed:
                victim = chance.choice(service.workers)
                victim.send_signal(signal.SIGKILL)
            replies = await streams.end()
            answers = [[reply.end, reply.error, reply.answers] for reply in replies]
            expected = expected or answers
            num_altered = sum(ours != theirs for ours, theirs in zip(answers, expected, strict=True))
            if num_altered:
                example = next(ours for ours, theirs in zip(answers, expected, strict=True) if ours != theirs)
                pauses.violations.append(f"round {number}: {num_altered} streams differ: {str(example)[:300]}")
            if is_killed:
                pauses.after_kill_s += longest_pauses_s(replies, since_s)
                service.reap(victim)
                service.start_worker()
            else:
                pauses.undisturbed_s += longest_pauses_s(replies, since_s)


def run(times: int, seed: int = 0) -> list[Finding]:
    """Kill a worker `times` times with each model."""
    findings = []
    for kind in KINDS:
        pauses, asked = Pauses(), requests(kind.num_streams)
        flags = ("--model", kind.model, "--worker-restart-timeout", "120")
        name = f"failover-{kind.model.partition(':')[0]}"
        with JoinedWorkers(name, *flags, environment=ONE_THREAD) as service:
            asyncio.run(_play(service, asked, times, random.Random(seed), pauses))
        for violation in pauses.violations:
            print(f"  {kind.name}: {violation}", flush=True)
        what = f"{kind.name}, {kind.num_streams} streams"
        findings += [
            Finding(
                f"{what}: one of two workers killed, streams lost or altered",
                "0",
                f"{len(pauses.violations)} of {times} rounds" if pauses.violations else f"0, in {times} rounds",
                not pauses.violations,
            ),
            Finding(
                f"{what}: longest pause of each stream",
                f"p99 <= {MAX_PAUSE_S:g} s",
                _figures(pauses.after_kill_s),
                percentile(pauses.after_kill_s, 0.99) <= MAX_PAUSE_S,
            ),
            Finding(f"{what}: the same without a kill", "", _figures(pauses.undisturbed_s)),
        ]
        print(f"  {what}: {_figures(pauses.after_kill_s)}; undisturbed {_figures(pauses.undisturbed_s)}", flush=True)
    return findings


def _figures(pauses_s: list[float]) -> str:
    shares = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
    return ", ".join(f"{percentile(pauses_s, share):.2f} s ({name})" for name, share in shares.items())
