"""Generate load in a separate process of low priority, so that it does not take the server's cores.

`python -m tests.torture.load` reads an `Offer` from standard input and writes a `Window` for every few seconds to
standard output, each as a line of JSON. A closed loop has a number of clients, each of which sends its next request
after its last answer. An open loop sends requests at a rate, independently of the answers.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct, field

from tests.torture.report import percentile
from tests.torture.streams import Connections, End, Reply, RequestSpec, ask

NICENESS = 10


class Item(Struct, frozen=True):
    """A request, and its expected reply."""

    asked: RequestSpec
    answers: list[Any] | None = None
    status: int = 200
    leaves_after: int | None = None
    weight: float = 1.0


class Offer(Struct, frozen=True):
    """The requests, their rate and the duration. Either `num_clients` or `rate` is set."""

    port: int
    items: list[Item]
    seconds: float
    num_clients: int = 0
    rate: float = 0.0  # requests per second
    patience_s: float = 10.0  # then a client disconnects
    window_s: float = 10.0
    seed: int = 0


class Window(Struct):
    """The requests that ended in a window of time."""

    start_s: float = 0.0
    seconds: float = 0.0
    num_begun: int = 0
    num_right: int = 0
    num_given_up: int = 0  # by clients that waited for `patience_s`
    num_right_tokens: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    wrongs: dict[str, int] = field(default_factory=dict)  # neither right, nor given up, nor refused with 429 or 503
    num_without_retry_after: int = 0
    latency_p50_s: float = 0.0
    latency_p99_s: float = 0.0
    itl_p50_s: float = 0.0
    itl_p99_s: float = 0.0
    lateness_p99_s: float = 0.0  # of the generator
    examples: list[str] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Tokens of right answers per second."""
        return self.num_right_tokens / self.seconds if self.seconds else 0.0

    @property
    def rate(self) -> float:
        return self.num_begun / self.seconds if self.seconds else 0.0


class Generator:
    """Sends requests and counts the replies."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._connections = Connections(offer.port, keeps_alive=True)
        self._chance = random.Random(offer.seed)
        self._weights = [item.weight for item in offer.items]
        self._asking: set[asyncio.Task[None]] = set()
        self._begin_window(time.monotonic())

    async def run(self) -> None:
        """Run until the time is over and all requests have ended; the last line has those that ended afterwards."""
        start_s = time.monotonic()
        reporting = asyncio.create_task(self._report(start_s))
        if self._offer.rate:
            await self._open(start_s)
        else:
            await asyncio.gather(*(self._closed(start_s) for _ in range(self._offer.num_clients)))
        await reporting
        await asyncio.gather(*self._asking)
        self._print(start_s, time.monotonic())

    async def _open(self, start_s: float) -> None:
        due_s = start_s
        while due_s < start_s + self._offer.seconds:
            due_s += self._chance.expovariate(self._offer.rate)
            if (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            self._latenesses_s.append(max(0.0, time.monotonic() - due_s))
            task = asyncio.create_task(self._ask())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _closed(self, start_s: float) -> None:
        while time.monotonic() < start_s + self._offer.seconds:
            await self._ask()

    async def _ask(self) -> None:
        (item,) = self._chance.choices(self._offer.items, self._weights)
        self._window.num_begun += 1
        patience_s = self._offer.patience_s
        reply = await ask(self._connections, item.asked, leaves_after=item.leaves_after, patience_s=patience_s)
        self._count(item, reply)

    def _count(self, item: Item, reply: Reply) -> None:
        window = self._window
        _add(window.statuses, str(reply.status or reply.end))
        if reply.status in (429, 503):
            window.num_without_retry_after += "retry-after" not in reply.headers
            return
        self._gaps_s += [b - a for a, b in pairwise(reply.token_times_s)]
        if reply.end is End.WHOLE:
            self._latencies_s.append(reply.ended_s - reply.started_s)
        if reply.end is End.LEFT:
            window.num_given_up += len(reply.token_times_s) != item.leaves_after
        elif reply.status != item.status or (item.answers is not None and reply.answers != item.answers):
            _add(window.wrongs, f"{item.asked.name}: {reply.end}")
            window.examples.append(
                f"{item.asked.name}: {reply.end} {reply.status} {reply.error} {reply.answers}"[:2000]
            )
        else:
            window.num_right += 1
            window.num_right_tokens += sum(map(len, reply.answers))

    async def _report(self, start_s: float) -> None:
        end_s, begun_s = start_s + self._offer.seconds, start_s
        while begun_s < end_s - 0.5:
            due_s = min(begun_s + self._offer.window_s, end_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            self._print(start_s, now_s)
            self._begin_window(now_s)
            begun_s = due_s

    def _begin_window(self, now_s: float) -> None:
        self._window = Window()
        self._begun_s = now_s
        self._latencies_s: list[float] = []
        self._gaps_s: list[float] = []
        self._latenesses_s: list[float] = []

    def _print(self, start_s: float, now_s: float) -> None:
        window = self._window
        window.start_s, window.seconds = self._begun_s - start_s, now_s - self._begun_s
        window.latency_p50_s, window.latency_p99_s = (percentile(self._latencies_s, share) for share in (0.5, 0.99))
        window.itl_p50_s, window.itl_p99_s = (percentile(self._gaps_s, share) for share in (0.5, 0.99))
        window.lateness_p99_s = percentile(self._latenesses_s, 0.99)
        window.examples = window.examples[:3]
        print(msgspec.json.encode(window).decode(), flush=True)


def _add(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def total(counts: Iterable[dict[str, int]]) -> Counter[str]:
    """Return the sums."""
    return sum(map(Counter, counts), Counter[str]())


def offered(offer: Offer) -> Iterator[Window]:
    """Run the generator and yield its windows; the last one is after the end of the offer."""
    command = ["nice", "-n", str(NICENESS), sys.executable, "-m", "tests.torture.load"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(offer))
        process.stdin.close()
        try:
            for line in process.stdout:
                yield msgspec.json.decode(line, type=Window)
        finally:
            process.kill()
    assert process.returncode == 0, "the load generator failed"


if __name__ == "__main__":
    import uvloop

    uvloop.run(Generator(msgspec.json.decode(sys.stdin.buffer.read(), type=Offer)).run())
