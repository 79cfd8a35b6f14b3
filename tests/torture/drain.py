"""A server is told to end while it is busy: who was let in is served or told, and nobody new is let in."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter

from msgspec import Struct, field

from tests.server_process import ServerProcess, serving
from tests.torture.crowd import References, Tally, requests
from tests.torture.report import BUILD, Finding, percentile
from tests.torture.streams import Asked, Connections, End, Reply, ask

NUM_CLIENTS = 16
GENEROUS_S, SHORT_S = 30.0, 0.5
NOTICED_WITHIN_S = 0.2  # a request that comes later than so long behind the signal is new
LONG = Asked("long", "/generate_stream", {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True})
PROBE = Asked("probe", "/generate", {"prompt": "Count", "max_tokens": 1, "logprobs": 0})


class Way(Struct, frozen=True):
    """How the server is told to end."""

    name: str
    signals: tuple[int, ...]
    shutdown_timeout_s: float
    is_long: bool = False  # answers that cannot be whole in that time

    @property
    def is_immediate(self) -> bool:
        return len(self.signals) > 1

    @property
    def exits_within_s(self) -> float:
        return 2.0 if self.is_immediate else self.shutdown_timeout_s + 5


WAYS = (
    Way("SIGTERM, time enough", (signal.SIGTERM,), GENEROUS_S),
    Way(f"SIGTERM, {SHORT_S:g} s left", (signal.SIGTERM,), SHORT_S, is_long=True),
    Way("SIGINT, time enough", (signal.SIGINT,), GENEROUS_S),
    Way("SIGTERM twice", (signal.SIGTERM, signal.SIGTERM), GENEROUS_S, is_long=True),
)


class Course(Struct):
    """What was seen of the servers that were ended in one way."""

    ends: Counter[str] = field(default_factory=Counter)  # of requests that were let in, or were on their way
    probes: Counter[str] = field(default_factory=Counter)  # requests sent after the signal
    ready: Counter[str] = field(default_factory=Counter)  # what /ready said after the signal
    exit_codes: Counter[int] = field(default_factory=Counter)
    exit_times_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


async def _drain(
    server: ServerProcess, way: Way, references: References, chance: random.Random, course: Course
) -> None:
    told_s = float("inf")  # when the signal was sent
    connections = Connections(server.port)
    replies: list[tuple[Asked, Reply]] = []

    async def client() -> None:
        while time.monotonic() < told_s:
            asked = LONG if way.is_long else chance.choice(references.asked)
            replies.append((asked, await ask(connections, asked)))

    async def probe() -> None:
        while server.process.poll() is None:
            sent_s = time.monotonic()
            reply = await ask(connections, PROBE)
            if sent_s > told_s + NOTICED_WITHIN_S:
                course.probes[_told(reply)] += 1
                if reply.status not in (0, 503) or (reply.status == 503 and "retry-after" not in reply.headers):
                    course.violations.append(f"a new request was answered {reply.status}, {reply.headers}")
                status = await _status_of_ready(server.port)
                course.ready[status] += 1
                if status == "200":
                    course.violations.append("/ready said 200 after the signal")
            await asyncio.sleep(0.05)

    clients = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
    probing = asyncio.create_task(probe())
    await asyncio.sleep(chance.uniform(0.3, 2.5))
    for number in way.signals:
        server.process.send_signal(number)
        told_s = min(told_s, time.monotonic())
        if way.is_immediate:
            await asyncio.sleep(0.2)
    last_s = time.monotonic() - 0.2 * way.is_immediate
    try:
        code = await asyncio.to_thread(server.process.wait, way.exits_within_s + 20)
    except TimeoutError:
        code = -1
    took_s = time.monotonic() - last_s
    await asyncio.gather(*clients, probing)
    course.exit_codes[code] += 1
    course.exit_times_s.append(took_s)
    if took_s > way.exits_within_s or (code != 0 and not way.is_immediate):
        course.violations.append(f"exit code {code} after {took_s:.1f} s")
    if left := server.started_pids():
        course.violations.append(f"processes {left} outlived their server")
    if "Traceback" in server.log.read_text():
        course.violations.append(f"a traceback in {server.log}")
    _judge(way, replies, references, course)


def _judge(way: Way, replies: list[tuple[Asked, Reply]], references: References, course: Course) -> None:
    tally = Tally()
    for asked, reply in replies:
        if reply.end is End.WHOLE and asked is not LONG:
            word = tally.judge(asked, references.answers[asked.name], reply)
        else:
            word = _told(reply)
        course.ends[word] += 1
        is_fair = reply.end in (End.WHOLE, End.TOLD, End.REFUSED, End.UNREACHED) and word not in ("wrong", "duplicated")
        if not is_fair and not way.is_immediate:
            tokens = len(reply.token_times_s)
            course.violations.append(f"{asked.name}: {word} after {tokens} tokens, status {reply.status}")
    course.violations += tally.examples


def _told(reply: Reply) -> str:
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
    """SIGTERM so often, half of it with little time; the other ways a fifth as often."""
    chance = random.Random(seed)
    references = References()
    with serving(log=BUILD / "drain.log") as server:
        asyncio.run(references.take(server.port, requests(2048)))
    fifth = max(1, times // 5)
    findings = []
    for way, share in zip(WAYS, (times - times // 2, max(1, times // 2), fifth, fifth), strict=True):
        course = Course()
        for number in range(share):
            log = BUILD / f"drain-{WAYS.index(way)}-{number}.log"
            with serving("--shutdown-timeout", str(way.shutdown_timeout_s), log=log) as server:
                asyncio.run(_drain(server, way, references, chance, course))
        findings += _findings(way, share, course)
        print(f"  {way.name}: {dict(course.ends)}", flush=True)
        for violation in course.violations[:10]:
            print(f"    {violation}", flush=True)
    return findings


def _findings(way: Way, share: int, course: Course) -> list[Finding]:
    demanded = f"exit within {way.exits_within_s:g} s"
    if not way.is_immediate:
        demanded += ", code 0; whole answers or typed errors, 0 cut; 503 or no connection for new ones"
    codes = ", ".join(f"{code} ({count})" for code, count in course.exit_codes.items())
    measured = (
        f"{share} times; exit code {codes}, after {percentile(course.exit_times_s, 1):.1f} s at most; "
        f"{len(course.violations)} violations"
    )
    return [
        Finding(way.name, demanded, measured, not course.violations),
        Finding(f"{way.name}: requests let in or on their way", "", _counts(course.ends)),
        Finding(f"{way.name}: requests sent after it", "", _counts(course.probes)),
        Finding(f"{way.name}: /ready after it", "", _counts(course.ready)),
    ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{word} {count:,}" for word, count in counter.most_common()) or "none"
