"""Requests of ordinary HTTP clients that must not fail: an offered upgrade, and connections kept through a restart."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from collections import Counter
from random import Random

from tests.support.server_process import ServerProcess, free_port, num_listening
from tests.torture.attacks.claims import Claim, Scenario, counts
from tests.torture.attacks.requests import post_json
from tests.torture.attacks.tenants import BYSTANDER_KEY, serving_tenants
from tests.torture.crowd import wait_until
from tests.torture.report import BUILD
from tests.torture.streams import Connections, End, RequestSpec, ask

SHORT = RequestSpec("short", "/generate_stream", {"prompt": "a", "max_tokens": 4})
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
NUM_RESTARTS = 4
NUM_KEPT_ALIVE = 20

# Java's HttpClient offers an upgrade with each request unless it is told not to.
JAVA = """
import java.net.URI;
import java.net.http.*;
public class Ask {
    public static void main(String[] arguments) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(arguments[0])).header("X-API-Key", arguments[1])
            .POST(HttpRequest.BodyPublishers.ofString(arguments[2])).build();
        System.out.print(HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).statusCode());
    }
}
"""


def offered_upgrade(seconds: float, chance: Random) -> list[Claim]:
    """Offer HTTP/2 with each request, as Java's HttpClient and `curl --http2` do, and expect an answer in HTTP/1.1."""
    with serving_tenants("upgrade", "--model", "sim:instant") as server:

        async def raw() -> list[str]:
            answers = [
                await post_json(server.port, BYSTANDER_KEY, SHORT.path, SHORT.body, *UPGRADE, "Connection: close")
                for _ in range(5)
            ]
            return [answer.summary for answer in answers]

        statuses = {"raw": asyncio.run(raw())}
        arguments = (f"{server.url}{SHORT.path}", json.dumps(SHORT.body))
        statuses |= {name: [ask_with(*arguments)] for name, ask_with in (("curl", _curl), ("Java", _java))}
    return [
        Claim(
            f"{name}: 200",
            f"{name}: {counts({each: found.count(each) for each in found})}",
            all(each in ("200", "not installed") for each in found),
        )
        for name, found in statuses.items()
    ]


def _curl(url: str, body: str) -> str:
    if not shutil.which("curl"):
        return "not installed"
    command = ["curl", "--http2", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", f"X-API-Key: {BYSTANDER_KEY}"]
    return subprocess.run([*command, "-d", body, url], capture_output=True, text=True, check=False).stdout


def _java(url: str, body: str) -> str:
    if not shutil.which("javac"):
        return "not installed"
    source = BUILD / "Ask.java"
    source.write_text(JAVA)
    command = ["java", str(source), url, BYSTANDER_KEY, body]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


class _Pool:
    """Clients that send requests in a loop, on kept-alive connections or on a new one each."""

    def __init__(self, port: int, keeps_alive: bool) -> None:
        self.ends: Counter[str] = Counter()
        self._connections = Connections(port, keeps_alive=keeps_alive)

    async def client(self) -> None:
        while True:
            reply = await ask(self._connections, SHORT)
            if reply.end is End.REFUSED:
                self.ends[f"{reply.status}"] += 1
                await asyncio.sleep(0.01)
            else:
                self.ends["200" if reply.end is End.WHOLE else str(reply.end)] += 1


def rolling_restart(seconds: float, chance: Random) -> list[Claim]:
    """Replace servers that share a port, one after the other, while clients send requests without pause."""
    port = free_port()

    def start(number: int) -> ServerProcess:
        log = BUILD / f"attack-rolling-{number}.log"
        return ServerProcess("--model", "sim:instant", "--reuse-port", log=log, port=port)

    async def restart_all() -> dict[str, Counter[str]]:
        running = [start(0), start(1)]
        pools = {"kept alive": _Pool(port, keeps_alive=True), "new connections": _Pool(port, keeps_alive=False)}
        try:
            await _wait_until_listening(port, 2)
            tasks = [asyncio.create_task(pools["kept alive"].client()) for _ in range(NUM_KEPT_ALIVE)]
            tasks += [asyncio.create_task(pools["new connections"].client()) for _ in range(NUM_KEPT_ALIVE // 4)]
            for number in range(NUM_RESTARTS):
                await asyncio.sleep(seconds / 4)
                running.append(start(2 + number))
                await _wait_until_listening(port, 3)
                ending = running.pop(0)
                ending.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(ending.process.wait, 60)
                ending.client.close()
            await asyncio.sleep(1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for server in running:
                server.client.close()
                server.process.kill()
                server.process.wait()
        return {name: pool.ends for name, pool in pools.items()}

    return [
        Claim(f"{name}: only 200", f"{name}: {counts(ends)}", ends.keys() == {"200"})
        for name, ends in asyncio.run(restart_all()).items()
    ]


async def _wait_until_listening(port: int, num: int) -> None:
    """Wait until so many servers share the port. They listen when their model is loaded."""
    assert await wait_until(lambda: num_listening(port) == num, 60), f"{num_listening(port)} servers listen, not {num}"


SCENARIOS = [Scenario("upgrade", offered_upgrade), Scenario("rolling-restart", rolling_restart)]
