"""Faults of the server's processes: they are frozen, stopped or killed, or their log is not read."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random

import httpx2

from tests.support.server_process import ServerProcess, free_port
from tests.torture.attacks.claims import Claim, Scenario, counts
from tests.torture.attacks.requests import Answer, post_json
from tests.torture.attacks.tenants import BYSTANDER_KEY, descendants, serving_tenants
from tests.torture.crowd import wait_until
from tests.torture.streams import Connections, End, RequestSpec, ask

FROZEN_S = 13.0  # longer than --step-timeout, --heartbeat-timeout and --sandbox-timeout
LONG = RequestSpec(
    "long", "/generate_stream", {"prompt": "Once upon a time", "max_tokens": 800, "ignore_eos": True, "temperature": 0}
)
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
# All fit into a pipe's 64 KiB together with 413 lines of log; twice as many do not.
NUM_LOGGED = 1000


def freeze(seconds: float, chance: Random) -> list[Claim]:
    """Stop all processes of a busy server together, as `docker pause` does, and continue them."""
    times = max(1, round(seconds * 0.6))

    async def freeze_once(server: ServerProcess) -> str:
        connections = Connections(server.port, api_key=BYSTANDER_KEY)
        (worker,) = server.worker_pids()
        streams = [asyncio.create_task(ask(connections, LONG)) for _ in range(4)]
        await asyncio.sleep(chance.uniform(1, 2))
        frozen = [server.process.pid, *descendants(server.process.pid)]
        try:
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
        replies = await asyncio.gather(*streams)
        if server.worker_pids() != [worker]:
            return "worker replaced"
        return "kept" if all(reply.end is End.WHOLE for reply in replies) else "answers lost"

    with serving_tenants("freeze", "--step-timeout", "10") as server:
        results = [asyncio.run(freeze_once(server)) for _ in range(times)]
    kinds = counts({each: results.count(each) for each in results})
    return [Claim(f"all {times} times the worker and its answers go on", kinds, results == ["kept"] * times)]


def stopped_sandbox(seconds: float, chance: Random) -> list[Claim]:
    """Stop the sandboxes, and then kill each one while it starts. No request is the cause, so none may get a 400."""

    async def chats(port: int, num: int) -> list[Answer]:
        return await asyncio.gather(*(post_json(port, BYSTANDER_KEY, "/v1/chat/completions", CHAT) for _ in range(num)))

    async def stop_and_kill(server: ServerProcess) -> tuple[list[str], list[str], str]:
        await chats(server.port, 1)  # so that a sandbox has started
        for pid in server.sandbox_pids():
            os.kill(pid, signal.SIGSTOP)
        stopped = [answer.summary for answer in await chats(server.port, 4)]
        killed = []
        for _ in range(max(1, round(seconds / 2))):
            await wait_until(lambda: bool(server.sandbox_pids()), 20)
            asking = asyncio.create_task(chats(server.port, 2))
            for pid in server.sandbox_pids():
                os.kill(pid, signal.SIGKILL)
            if await wait_until(lambda: bool(server.sandbox_pids()), 5):
                await asyncio.sleep(chance.uniform(0, 0.2))
                for pid in server.sandbox_pids():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            killed += [answer.summary for answer in await asking]
        await asyncio.sleep(1)
        (last,) = await chats(server.port, 1)
        return stopped, killed, last.summary

    def is_right(summary: str) -> bool:
        return summary[:3] in ("200", "503")

    with serving_tenants("sandbox") as server:
        stopped, killed, last = asyncio.run(stop_and_kill(server))
    return [
        Claim(
            f"{what}: chats get 200 or 503",
            f"{what}: {counts({each: found.count(each) for each in found})}",
            all(map(is_right, found)),
        )
        for what, found in (("stopped", stopped), ("killed", killed), ("afterwards", [last]))
    ]


@contextmanager
def _started(command: str) -> Iterator[tuple[httpx2.Client, subprocess.Popen[bytes]]]:
    """Start a server with a simulated model by a line of shell, in which SERVE is its command."""
    port = free_port()
    line = command.replace("SERVE", f"exec {sys.executable} -m servekit serve --model sim:instant --port {port}")
    process = subprocess.Popen(["/bin/sh", "-c", line], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)
    try:
        yield client, process
    finally:
        client.close()
        process.kill()
        process.communicate()


def _is_ready(client: httpx2.Client, process: subprocess.Popen[bytes]) -> bool:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and process.poll() is None:
        with suppress(httpx2.TransportError):
            if client.get("/ready").status_code == 200:
                return True
        time.sleep(0.05)
    return False


def unread_log(seconds: float, chance: Random) -> list[Claim]:
    """Start a server whose log is a pipe that no process reads."""
    num_answered = 0
    with _started("SERVE") as (client, process):
        assert _is_ready(client, process)
        with suppress(httpx2.TransportError):
            for _ in range(NUM_LOGGED):
                answer = client.post("/generate", json={"prompt": "a", "max_tokens": 1})
                num_answered += answer.status_code == 200
    claim = Claim(f"all {NUM_LOGGED:,} requests answered", f"{num_answered:,} answered", num_answered == NUM_LOGGED)
    return [claim]


STARTS = {
    "stderr closed": "SERVE 2>&-",
    "0, 1 and 2 closed": "SERVE <&- >&- 2>&-",
    "python -OO": "export PYTHONOPTIMIZE=2; SERVE",
}


def odd_starts(seconds: float, chance: Random) -> list[Claim]:
    """Start a server without standard files, and without docstrings."""
    claims = []
    for name, command in STARTS.items():
        with _started(command) as (client, process):
            is_right = _is_ready(client, process)
            if is_right:
                is_right = client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        claims.append(Claim(f"{name}: answers", f"{name}: {'answers' if is_right else 'does not start'}", is_right))
    return claims


SCENARIOS = [
    Scenario("freeze", freeze),
    Scenario("stopped-sandbox", stopped_sandbox),
    Scenario("unread-log", unread_log),
    Scenario("odd-starts", odd_starts),
]
