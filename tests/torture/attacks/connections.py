"""Requests of ordinary HTTP clients that offer another protocol, and must not fail."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from random import Random

from tests.torture.attacks.claims import Claim, Scenario, counts
from tests.torture.attacks.requests import post_json
from tests.torture.attacks.tenants import BYSTANDER_KEY, serving_tenants
from tests.torture.report import BUILD
from tests.torture.streams import RequestSpec

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


SCENARIOS = [Scenario("upgrade", offered_upgrade)]
