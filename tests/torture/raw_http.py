"""Send mutated HTTP requests over real sockets; the server must refuse or answer each of them, and continue.

A valid request with `Connection: close` follows each one. So a mutation that is still a request is answered; if the
server waits for more bytes, the client disconnects after a moment.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from resource import getpagesize
from typing import Any

import uvloop

from tests.support.server_process import ServerProcess, serving
from tests.torture.report import Finding, table

AT_ONCE = 48
PATIENCE_S = 0.2
MAX_MEMORY_MIB = 32
REFUSALS = (501, 503, 505)  # a transfer coding, an overload, a version of HTTP: no failures of the server
LAST = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
QUESTION = {"prompt": "What color is the sky?", "max_tokens": 8, "temperature": 0}

_ANSWER = re.compile(rb"HTTP/1\.1 (\d\d\d) [^\r]*\r\n(.*?)\r\n\r\n", re.DOTALL)
_TOKENS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b":",
    b"\xff",
    b"%00",
    b"%",
    b"?",
    b"#",
    b"/../",
    b"//",
    b"*",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"HTTP/1.1",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT ",
    b"HEAD ",
    b"Content-Length: 99999\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: 5, 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n",
    b"Expect: 100-continue\r\n",
    b"Connection: close\r\n",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Host: \r\n",
    b" folded: value\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"X: " + b"x" * 40_000 + b"\r\n",
    b"a: b\r\n" * 300,
    b"9" * 30,
    b"1e999",
    b"-1",
    b"null",
    b"[" * 200,
    b'"',
    b"{",
    b"\\ud800",
    b"\xf0\x9f\x98\x80",
    b"\xed\xa0\x80",
    b"NaN",
]


def _request(method: str, path: str, body: Any = None, chunked: bool = False) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: torture\r\nAccept: */*\r\n".encode()
    if body is None:
        return head + b"\r\n"
    data = json.dumps(body).encode()
    head += b"Content-Type: application/json\r\n"
    if not chunked:
        return head + b"Content-Length: %d\r\n\r\n" % len(data) + data
    pieces = [data[at : at + 20] for at in range(0, len(data), 20)]
    return (
        head
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
    )


def seeds() -> list[bytes]:
    """Return valid requests: every API, both framings, and several requests on one connection."""
    native = {"prompt": "Hello", "max_tokens": 1}
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    single = [
        _request("GET", "/health"),
        _request("GET", "/v1/models"),
        _request("GET", "/info"),
        _request("GET", "/generate_stream?prompt=Hello&max_tokens=1"),
        _request("OPTIONS", "/generate"),
        _request("POST", "/generate", native),
        _request("POST", "/generate", native, chunked=True),
        _request("POST", "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 1}}),
        _request("POST", "/generate_stream", native),
        _request("POST", "/basic_generate", native),
        _request("POST", "/v1/completions", {"model": "demo", **native}),
        _request("POST", "/v1/chat/completions", chat),
        _request("POST", "/v1/chat/completions", chat | {"stream": True}, chunked=True),
        _request("POST", "/tokenize", {"prompt": "Hello"}),
        _request("POST", "/nowhere", native),
    ]
    return [*single, single[0] + single[1], single[5] + single[0], single[6] + single[5] + single[0]]


def mutate(request: bytes, chance: random.Random) -> bytes:
    """Return the request with a few changes, most of them in the headers."""
    data = bytearray(request)
    head_end = request.find(b"\r\n\r\n") + 4
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        at = chance.randrange(min(head_end, len(data)) if chance.random() < 0.7 else len(data)) if data else 0
        end = at + chance.randint(1, 12)
        match chance.randrange(8):
            case 0:
                data[at:end] = b""
            case 1:
                data[at:at] = chance.randbytes(chance.randint(1, 8))
            case 2:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 3:
                data[at:at] = data[at:end] * chance.randint(1, 20)
            case 4:
                data[at:at] = chance.choice(_TOKENS)
            case 5:
                line = data.rfind(b"\r\n", 0, at) + 2
                data[line:line] = chance.choice(_TOKENS)
            case 6:
                data[at:end] = chance.choice(_TOKENS)
            case 7 if chance.random() < 0.3:
                del data[at:]
    return bytes(data)


def run(cases: int) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with serving("--header-timeout", "1", "--body-timeout", "1", "--send-timeout", "2", log=log) as server:
            return torture(server, cases)


def torture(server: ServerProcess, cases: int, seed: int = 0) -> list[Finding]:
    """Send `cases` mutated requests to a running server."""
    answer = server.client.post("/generate", json=QUESTION).json()["generated_text"]
    _run(server.port, min(cases, 2000), seed + 1)  # warms everything up
    memory, started = _resident_mib(server), time.monotonic()
    statuses, bad = _run(server.port, cases, seed)
    took_s = time.monotonic() - started
    server.wait_until_at_rest()
    memory = _resident_mib(server) - memory
    is_right = server.client.post("/generate", json=QUESTION).json()["generated_text"] == answer
    num_tracebacks = server.log.read_text().count("Traceback")
    summary = ", ".join(f"{status or 'none'}: {number:,}" for status, number in sorted(statuses.items()))
    return [
        Finding(f"{cases:,} mutated requests", "1,000/s", f"{cases / took_s:,.0f}/s", None),
        Finding(
            "mutated requests: answers",
            "no 5xx but 501, 503 and 505, errors in the schema",
            f"{summary} {bad[:2] or ''}",
            not bad,
        ),
        Finding("mutated requests: a good request afterwards", "right", "right" if is_right else "wrong", is_right),
        Finding("mutated requests: tracebacks in the log", "0", str(num_tracebacks), num_tracebacks == 0),
        Finding(
            "mutated requests: memory more than before",
            f"<= {MAX_MEMORY_MIB} MiB",
            f"{memory:.1f} MiB",
            memory <= MAX_MEMORY_MIB,
        ),
    ]


def _run(port: int, cases: int, seed: int) -> tuple[Counter[int], list[str]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_send_all(port, cases, seed))


async def _send_all(port: int, cases: int, seed: int) -> tuple[Counter[int], list[str]]:
    """Return how often each status was the first answer (0: no answer), and the answers that are not allowed."""
    statuses: Counter[int] = Counter()
    bad: list[str] = []
    requests, numbers = seeds(), iter(range(cases))

    async def repeat() -> None:
        for number in numbers:
            chance = random.Random(f"{seed} {number}")
            received = await _exchange(port, mutate(chance.choice(requests), chance) + LAST)
            answers = [(int(found[1]), found[2].lower()) for found in _ANSWER.finditer(received)]
            statuses[answers[0][0] if answers else 0] += 1
            for status, head in answers:
                if (status >= 500 and status not in REFUSALS) or (status >= 400 and b"application/json" not in head):
                    bad.append(f"case {seed} {number}: {status} {head[:200]!r}")

    await asyncio.gather(*(repeat() for _ in range(AT_ONCE)))
    return statuses, bad


async def _exchange(port: int, data: bytes) -> bytes:
    """Return all bytes until the server closes the connection or sends nothing for PATIENCE_S."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    with suppress(OSError):  # includes TimeoutError and connection resets
        writer.write(data)
        while piece := await asyncio.wait_for(reader.read(2**16), PATIENCE_S):
            received += piece
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return received


def _resident_mib(server: ServerProcess) -> float:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * getpagesize() / 2**20


if __name__ == "__main__":
    print(table(run(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)))
