"""Run one attack in a process of the lowest priority, so that it takes no CPU that the server could use.

`python -m tests.torture.attacks.attacker NAME PORT SEED` reads commands from standard input, a line each: `attack` or
`control` begins, `rest` ends all requests and writes how many of them had which status. It first writes `ready`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal

import msgspec
from msgspec import Struct

from tests.support.server_process import ServerProcess
from tests.torture.attacks.tenants import ATTACKER_KEY, serving_tenants

KEPT_BYTES = 2**16  # of what is read after the status line
PAUSE_S = 0.05  # after a refusal, so that the attack does not only measure the cost of refusals


class Attacker:
    """A client of the tenant `attacker`. It reads its answers and counts their statuses."""

    def __init__(self, port: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.statuses: Counter[str] = Counter()
        self._port = port
        self._numbers = itertools.count(seed * 1000)

    def number(self) -> int:
        """Return a number that this process has not used before, to make a request that no cache knows."""
        return next(self._numbers)

    async def post(
        self, path: str, body: dict[str, Any] | bytes, *headers: str, content_type: str = "application/json"
    ) -> int:
        """Send a request on a new connection, read the whole answer, and return its status."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self.send(
            self.head(path, f"Content-Length: {len(data)}", *headers, content_type=content_type), data
        )

    def head(self, path: str, *headers: str, content_type: str = "application/json", method: str = "POST") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"X-API-Key: {ATTACKER_KEY}", "Connection: close"]
        return "\r\n".join([*lines, f"Content-Type: {content_type}", *headers, "\r\n"]).encode()

    async def send(self, *pieces: bytes) -> int:
        """Send bytes on a new connection, read until the server closes it, and return the first answer's status."""
        status, _ = await self.exchange(*pieces)
        return status

    async def exchange(self, *pieces: bytes) -> tuple[int, bytes]:
        """Do the same as `send`, and return also the beginning of what was read after the status line."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        status, has_ended, answer = 0, False, b""
        try:
            with suppress(ConnectionError):  # the server refuses before it has read everything
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            with suppress(ConnectionError):
                line = await reader.readline()
                status = int(line.split()[1]) if line else 0
                while piece := await reader.read(2**16):
                    answer += piece[: KEPT_BYTES - len(answer)]
            has_ended = True
        finally:
            writer.transport.abort()
            self.statuses[str(status or "none") if has_ended else "unfinished"] += 1
        if status in (0, 429, 503):
            await asyncio.sleep(PAUSE_S)
        return status, answer


Strike = Callable[[Attacker], Awaitable[object]]


class Attack(Struct, frozen=True):
    """What one tenant does again and again, on `at_once` connections, while a bystander is measured.

    In the control windows the attacker does nothing, or `control`: what costs the model as much and is no attack.
    """

    name: str
    strike: Strike
    at_once: int = 1
    control: Strike | None = None
    control_at_once: int = 1
    flags: tuple[str, ...] = ()
    # A context with further flags, in which the files and servers that these flags name exist.
    makes_flags: Callable[[], AbstractContextManager[tuple[str, ...]]] | None = None
    limits: str = ""  # of the attacker's key, as lines of TOML

    @contextmanager
    def serving(self) -> Iterator[ServerProcess]:
        """Yield the server that is attacked."""
        with (
            nullcontext(()) if self.makes_flags is None else self.makes_flags() as more,
            serving_tenants(self.name, *self.flags, *more, limits=self.limits) as server,
        ):
            yield server


async def _repeat(strike: Strike, attacker: Attacker) -> None:
    while True:
        with suppress(ConnectionError):
            await strike(attacker)


async def _run(attack: Attack, port: int, seed: int) -> None:
    attacker = Attacker(port, seed)
    print("ready", flush=True)
    tasks: list[asyncio.Task[None]] = []
    while command := await asyncio.to_thread(sys.stdin.readline):
        if command.strip() == "rest":
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
            print(msgspec.json.encode(attacker.statuses).decode(), flush=True)
            attacker.statuses.clear()
            tasks = []
        elif command.strip() == "attack":
            tasks = [asyncio.create_task(_repeat(attack.strike, attacker)) for _ in range(attack.at_once)]
        elif attack.control is not None:
            tasks = [asyncio.create_task(_repeat(attack.control, attacker)) for _ in range(attack.control_at_once)]


class AttackerProcess:
    """The process, from the outside. Use it as a context manager, which ends it."""

    def __init__(self, name: str, port: int, seed: int) -> None:
        self._arguments = [name, str(port), str(seed)]

    async def __aenter__(self) -> AttackerProcess:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.torture.attacks.attacker",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"ready\n", "the attacker's process failed"
        return self

    async def __aexit__(self, *exception: object) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def begin(self, manner: Literal["attack", "control"]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{manner}\n".encode())

    async def rest(self) -> Counter[str]:
        """End all requests; return how many were answered with which status since `begin`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"rest\n")
        line = await self._process.stdout.readline()
        assert line, "the attacker's process failed"
        return Counter(msgspec.json.decode(line, type=dict[str, int]))


def main() -> None:
    from tests.torture.attacks.catalogue import ATTACKS

    os.nice(19)
    name, port, seed = sys.argv[1:]
    asyncio.run(_run(ATTACKS[name], int(port), int(seed)))


if __name__ == "__main__":
    main()
