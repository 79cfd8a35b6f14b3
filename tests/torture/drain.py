"""Shut down a busy server: accepted requests are answered or get an error event, and new ones are refused."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter

from msgspec import Struct, field

from tests.support.server_process import ServerProcess, serving
from tests.torture.crowd import References, Tally, requests
from tests.torture.report import BUILD, Finding, percentile
from tests.torture.streams import Connections, End, Reply, RequestSpec, ask

NUM_CLIENTS = 16
GENEROUS_S, SHORT_S = 30.0, 0.5
NOTICED_WITHIN_S = 0.2  # requests sent later than this after the signal are new
LONG = RequestSpec("long", "/generate_stream", {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True})
PROBE = RequestSpec("probe", "/generate", {"prompt": "Count", "max_tokens": 1, "logprobs": 0})


class Shutdown(Struct, frozen=True):
    """A way to shut the server down."""

    name: str
    signals: tuple[int, ...]
    shutdown_timeout_s: float
    is_long: bool = False  # answers that cannot be complete in that time

    @property
    def is_immediate(self) -> bool:
        return len(self.signals) > 1

    @property
    def exits_within_s(self) -> float:
        return 2.0 if self.is_immediate else self.shutdown_timeout_s + 5


SHUTDOWNS = (
    Shutdown("SIGTERM, time enough", (signal.SIGTERM,), GENEROUS_S),
    Shutdown(f"SIGTERM, {SHORT_S:g} s left", (signal.SIGTERM,), SHORT_S, is_long=True),
    Shutdown("SIGINT, time enough", (signal.SIGINT,), GENEROUS_S),
    Shutdown("SIGTERM twice", (signal.SIGTERM, signal.SIGTERM), GENEROUS_S, is_long=True),
)


class ShutdownResults(Struct):
    """What happened to the servers that were shut down in one way."""

    ends: Counter[str] = field(default_factory=Counter)  # of requests that were accepted or on their way
    probes: Counter[str] = field(default_factory=Counter)  # requests sent after the signal
    ready: Counter[str] = field(default_factory=Counter)  # what /ready said after the signal
    exit_codes: Counter[int] = field(default_factory=Counter)
    exit_times_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


async def _drain(
    server: ServerProcess, shutdown: Shutdown, references: References, chance: random.Random, results: ShutdownResults
) -> None:
    signalled_s = float("inf")  # when the signal was sent
    connections = Connections(server.port)
    replies: list[tuple[RequestSpec, Reply]] = []

    async def client() -> None:
        while time.monotonic() < signalled_s:
            asked = LONG if shutdown.is_long else chance.choice(references.asked)
            replies.append((asked, await ask(connections, asked)))

    async def probe() -> None:
        while server.process.poll() is None:
            sent_s = time.monotonic()
            reply = await ask(connections, PROBE)
            if sent_s > signalled_s + NOTICED_WITHIN_S:
                results.probes[_describe(reply)] += 1
                if reply.status not in (0, 503) or (reply.status == 503 and "retry-after" not in reply.headers):
                    results.violations.append(f"a new request was answered {reply.status}, {reply.headers}")
                status = await _status_of_ready(server.port)
                results.ready[status] += 1
                if status == "200":
                    results.violations.append("/ready said 200 after the signal")
            await asyncio.sleep(0.05)

    clients = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
    probing = asyncio.create_task(probe())
    await asyncio.sleep(chance.uniform(0.3, 2.5))
    for number in shutdown.signals:
        server.process.send_signal(number)
        signalled_s = min(signalled_s, time.monotonic())
        if shutdown.is_immediate:
            await asyncio.sleep(0.2)
    last_s = time.monotonic() - 0.2 * shutdown.is_immediate
    try:
        code = await asyncio.to_thread(server.process.wait, shutdown.exits_within_s + 20)
    except TimeoutError:
        code = -1
    took_s = time.monotonic() - last_s
    await asyncio.gather(*clients, probing)
    results.exit_codes[code] += 1
    results.exit_times_s.append(took_s)
    if took_s > shutdown.exits_within_s or (code != 0 and not shutdown.is_immediate):
        results.violations.append(f"exit code {code} after {took_s:.1f} s")
    if left := server.started_pids():
        results.violations.append(f"processes {left} outlived their server")
    if "Traceback" in server.log.read_text():
        results.violations.append(f"a traceback in {server.log}")
    _count(shutdown, replies, references, results)


def _count(
    shutdown: Shutdown, replies: list[tuple[RequestSpec, Reply]], references: References, results: ShutdownResults
) -> None:
    tally = Tally()
    for asked, reply in replies:
        if reply.end is End.WHOLE and asked is not LONG:
            word = tally.count(asked, references.answers[asked.name], reply)
        else:
            word = _describe(reply)
        results.ends[word] += 1
        is_fair = reply.end in (End.WHOLE, End.ERROR_EVENT, End.REFUSED, End.UNREACHED) and word not in (
            "wrong",
            "duplicated",
        )
        if not is_fair and not shutdown.is_immediate:
            tokens = len(reply.token_times_s)
            results.violations.append(f"{asked.name}: {word} after {tokens} tokens, status {reply.status}")
    results.violations += tally.examples


def _describe(reply: Reply) -> str:
    code = f" {reply.error['code']}" if reply.error else ""
    status = f" {reply.status}" if reply.end is End.REFUSED else ""
    return f"{reply.end}{status}{code}"


async def _status_of_ready(port: int) -> str:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        line = await reader.readline()
        writer.close()
        return line.split()[1].decode() if line else "unanswered"
    except OSError:
        return "unreached"


def run(times: int, seed: int = 0) -> list[Finding]:
    """Send SIGTERM `times` times, half of them with little time; run the other shutdowns a fifth as often."""
    chance = random.Random(seed)
    references = References()
    with serving(log=BUILD / "drain.log") as server:
        asyncio.run(references.take(server.port, requests(2048)))
    fifth = max(1, times // 5)
    findings = []
    for shutdown, share in zip(SHUTDOWNS, (times - times // 2, max(1, times // 2), fifth, fifth), strict=True):
        results = ShutdownResults()
        for number in range(share):
            log = BUILD / f"drain-{SHUTDOWNS.index(shutdown)}-{number}.log"
            with serving("--shutdown-timeout", str(shutdown.shutdown_timeout_s), log=log) as server:
                asyncio.run(_drain(server, shutdown, references, chance, results))
        findings += _findings(shutdown, share, results)
        print(f"  {shutdown.name}: {dict(results.ends)}", flush=True)
        for violation in results.violations[:10]:
            print(f"    {violation}", flush=True)
    return findings


def _findings(shutdown: Shutdown, share: int, results: ShutdownResults) -> list[Finding]:
    demanded = f"exit within {shutdown.exits_within_s:g} s"
    if not shutdown.is_immediate:
        demanded += ", code 0; whole answers or typed errors, 0 cut; 503 or no connection for new ones"
    codes = ", ".join(f"{code} ({count})" for code, count in results.exit_codes.items())
    measured = (
        f"{share} times; exit code {codes}, after {percentile(results.exit_times_s, 1):.1f} s at most; "
        f"{len(results.violations)} violations"
    )
    return [
        Finding(shutdown.name, demanded, measured, not results.violations),
        Finding(f"{shutdown.name}: requests accepted or in transit", "", _counts(results.ends)),
        Finding(f"{shutdown.name}: requests sent after it", "", _counts(results.probes)),
        Finding(f"{shutdown.name}: /ready after it", "", _counts(results.ready)),
    ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{word} {count:,}" for word, count in counter.most_common()) or "none"
