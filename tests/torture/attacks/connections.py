"""Connections: many that send nothing, and those of ordinary HTTP clients that offer another protocol."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import subprocess
from collections import Counter
from random import Random

from tests.torture.attacks.claims import Claim, Scenario, counts
from tests.torture.attacks.requests import Answer, post_json
from tests.torture.attacks.tenants import BYSTANDER_KEY, memory_mib, serving_tenants
from tests.torture.report import BUILD
from tests.torture.streams import RequestSpec

NUM_IDLE = 5_000
SHORT = RequestSpec("short", "/generate_stream", {"prompt": "a", "max_tokens": 4})
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")

# By default, Java's HttpClient offers an upgrade with each request.
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
        for name, program, ask_with in (("curl", "curl", _curl), ("Java", "javac", _java)):
            statuses[name] = [ask_with(*arguments)] if shutil.which(program) else []
    return [answered(name, found) for name, found in statuses.items()]


def answered(name: str, statuses: list[str]) -> Claim:
    """Return whether a client got 200 only. It is neither kept nor missed for a program that is not installed."""
    demanded = f"{name}: 200"
    if not statuses:
        return Claim(demanded, f"{name}: not run, because it is not installed")
    return Claim(demanded, f"{name}: {counts(Counter(statuses))}", set(statuses) == {"200"})


def _curl(url: str, body: str) -> str:
    command = ["curl", "--http2", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", f"X-API-Key: {BYSTANDER_KEY}"]
    return subprocess.run([*command, "-d", body, url], capture_output=True, text=True, check=False).stdout


def _java(url: str, body: str) -> str:
    source = BUILD / "Ask.java"
    source.write_text(JAVA)
    command = ["java", str(source), url, BYSTANDER_KEY, body]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def idle_connections(seconds: float, chance: Random) -> list[Claim]:
    """Hold open many connections that send nothing, and ask beside them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with serving_tenants("idle", "--model", "sim:instant", "--header-timeout", "300") as server:
        before_mib = sum(memory_mib(server).values())
        num_open, answers = asyncio.run(_ask_beside_idle_connections(server.port))
        more_mib = sum(memory_mib(server).values()) - before_mib
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    statuses = [answer.summary for answer in answers]
    longest_s = max(answer.seconds for answer in answers)
    return [
        Claim(f"{NUM_IDLE:,} open connections", f"{num_open:,} open connections", num_open == NUM_IDLE),
        Claim("each request beside them: 200", counts(Counter(statuses)), set(statuses) == {"200"}),
        Claim("longest <= 0.5 s", f"longest {1000 * longest_s:.0f} ms", longest_s <= 0.5, is_timed=True),
        Claim("memory <= +128 MiB", f"{more_mib:+.0f} MiB", more_mib <= 128),
    ]


async def _ask_beside_idle_connections(port: int) -> tuple[int, list[Answer]]:
    """Return how many idle connections are open after all requests were answered, and the answers."""
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_IDLE)]
    answers = [await post_json(port, BYSTANDER_KEY, SHORT.path, SHORT.body) for _ in range(100)]
    num_open = sum(not reader.at_eof() for reader, _ in idle)
    for _, writer in idle:
        writer.close()
    return num_open, answers


SCENARIOS = [Scenario("upgrade", offered_upgrade), Scenario("idle-connections", idle_connections)]
