"""Restart servers that share a port, one after the other, under clients that keep connections and that open new ones.

No client repeats a request. So each request that gets no whole answer with status 200 counts as a failure. As HTTP
libraries do, a client reconnects after `Connection: close`, and if it sees that an idle connection was closed.

The last finding is about a server that is alone on its port: how long its drain takes under clients that ask again and
again.
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import signal
import time
from collections import Counter
from contextlib import ExitStack

from msgspec import Struct, field

from tests.support.server_process import ServerProcess, free_port, num_listening, serving
from tests.torture.report import BUILD, Finding, percentile

NUM_SERVERS = 2
MODEL = "sim:step=2ms"
REQUEST_TIMEOUT_S = 30.0
LISTENS_WITHIN_S = 60.0
UNDISTURBED_S = 0.5  # between two restarts
NUM_STUBBORN, DRAINS_WITHIN_S = 200, 5.0

QUESTION = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}


def _request(path: str, body: dict[str, object] | None, connection: str) -> bytes:
    sent = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\nContent-Length: {len(sent)}"
    return head.encode() + b"\r\n\r\n" + sent


class Kind(Struct, frozen=True):
    """One kind of client."""

    name: str
    number: int
    request: bytes
    keeps_alive: bool
    most_pause_s: float = 0.0  # a pause of random length, up to this, follows each answer


KINDS = (
    Kind("keep-alive, no pause", 12, _request("/generate", QUESTION, "keep-alive"), True),
    Kind("keep-alive, streams", 4, _request("/generate_stream", QUESTION, "keep-alive"), True),
    Kind("keep-alive, pauses up to 2 s", 100, _request("/generate", QUESTION, "keep-alive"), True, 2.0),
    Kind("new connections, no pause", 8, _request("/health", None, "close"), False),
    Kind("new connections, pauses up to 20 ms", 8, _request("/generate", QUESTION, "close"), False, 0.02),
)


class Results(Struct):
    """What the clients of one kind got."""

    ends: Counter[str] = field(default_factory=Counter)  # "200", another status, or how the connection failed
    durations_s: list[float] = field(default_factory=list)
    num_reconnects: int = 0  # because the server announced or had done its close


class Client:
    """One client, which asks one thing again and again. It notes every answer, and repeats no request."""

    def __init__(self, port: int, kind: Kind, results: Results, chance: random.Random) -> None:
        self._port = port
        self._kind = kind
        self._results = results
        self._chance = chance
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask_until(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    end = await self._ask()
            except asyncio.IncompleteReadError as error:
                end = "cut" if error.partial else "closed without an answer"
            except OSError as error:  # includes TimeoutError
                end = type(error).__name__
            if end != "200":
                self._close()
            self._results.ends[end] += 1
            self._results.durations_s.append(time.monotonic() - started_s)
            await asyncio.sleep(self._chance.uniform(0.0, self._kind.most_pause_s))
        self._close()

    async def _ask(self) -> str:
        if self._streams is not None and _is_readable(self._streams[1]):
            self._close()
            self._results.num_reconnects += 1
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(self._kind.request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in head:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        if b"\r\nconnection: close" in head:
            self._close()
            self._results.num_reconnects += self._kind.keeps_alive
        return head.split(b" ", 2)[1].decode()

    def _close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _is_readable(writer: asyncio.StreamWriter) -> bool:
    """Return whether the kernel has something for an idle connection: its end, which asyncio may not have read yet."""
    return bool(select.select([writer.get_extra_info("socket")], [], [], 0)[0])


async def _restart_all(times: int, seed: int) -> tuple[dict[str, Results], list[float]]:
    """Replace the oldest server `times` times. Returns the results by kind, and the seconds that each server took."""
    port, chance, is_over = free_port(), random.Random(seed), asyncio.Event()
    results = {kind.name: Results() for kind in KINDS}
    took_s = []
    with ExitStack() as stack:

        async def start(number: int) -> ServerProcess:
            log = BUILD / f"rolling-{number}.log"
            flags = ("--model", MODEL, "--reuse-port", "--log-level", "warning")
            before = num_listening(port)
            server = ServerProcess(*flags, log=log, port=port)
            stack.callback(server.process.wait)
            stack.callback(server.process.kill)
            stack.callback(server.client.close)
            deadline_s = time.monotonic() + LISTENS_WITHIN_S
            while num_listening(port) == before:
                assert time.monotonic() < deadline_s and server.process.poll() is None, log.read_text()
                await asyncio.sleep(0.05)
            return server

        servers = [await start(number) for number in range(NUM_SERVERS)]
        clients = [
            asyncio.create_task(Client(port, kind, results[kind.name], chance).ask_until(is_over))
            for kind in KINDS
            for _ in range(kind.number)
        ]
        for number in range(times):
            await asyncio.sleep(UNDISTURBED_S)
            servers.append(await start(NUM_SERVERS + number))
            took_s.append(await _stop(servers.pop(0)))
        is_over.set()
        await asyncio.gather(*clients)
    return results, took_s


async def _stop(server: ServerProcess) -> float:
    """Return the seconds from the signal to the exit."""
    started_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(server.process.wait, 120)
    assert code == 0, f"exit code {code}: {server.log.read_text()}"
    return time.monotonic() - started_s


async def _drain_alone() -> tuple[Results, float]:
    """Drain a server while clients ask again without a pause. Returns what they got, and the seconds to the exit."""
    kind = Kind("stubborn", NUM_STUBBORN, _request("/generate", QUESTION, "keep-alive"), True)
    results, is_over, chance = Results(), asyncio.Event(), random.Random(0)
    with serving("--model", "sim:instant", "--log-level", "warning", log=BUILD / "rolling-alone.log") as server:
        clients = [
            asyncio.create_task(Client(server.port, kind, results, chance).ask_until(is_over))
            for _ in range(kind.number)
        ]
        await asyncio.sleep(2)
        took_s = await _stop(server)
        is_over.set()
        await asyncio.gather(*clients)
    return results, took_s


def run(times: int, seed: int = 0) -> list[Finding]:
    """Restart a server `times` times, while another one shares its port."""
    by_kind, took_s = asyncio.run(_restart_all(times, seed))
    findings = []
    for name, results in by_kind.items():
        longest = f"{percentile(results.durations_s, 0.99):.2f} s (p99), {max(results.durations_s):.2f} s (longest)"
        findings.append(
            Finding(
                f"{times} restarts, {name}",
                "only 200",
                f"{_counts(results.ends)}; {results.num_reconnects:,} reconnects; {longest}",
                set(results.ends) == {"200"},
            )
        )
    findings.append(Finding("from the signal to the exit", "", f"{max(took_s):.1f} s at most"))
    alone, alone_s = asyncio.run(_drain_alone())
    findings.append(
        Finding(
            f"a server alone on its port, {NUM_STUBBORN} keep-alive clients without a pause: signal to exit",
            f"{DRAINS_WITHIN_S:g} s",
            f"{alone_s:.1f} s; answers: {_counts(alone.ends)}",
            alone_s <= DRAINS_WITHIN_S,
        )
    )
    return findings


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{word} {count:,}" for word, count in counter.most_common()) or "none"
