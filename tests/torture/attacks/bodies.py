"""Attacks with request bodies: many small things in 8 MB, and 8 MB in small pieces."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from random import Random

from tests.torture.attacks.attacker import Attack, Attacker
from tests.torture.attacks.bystander import HealthProbe
from tests.torture.attacks.claims import Claim, Scenario
from tests.torture.attacks.tenants import ATTACKER_KEY, serving_tenants

MAX_HOLD_S = 0.01
REST_S = 5.0
NUM_BYTES = 8 * 2**20 - 4096  # --max-body-bytes, with room for what is around the items


def _filled(before: str, item: str, after: str) -> Callable[[], bytes]:
    """Return a body of as many items as fit, separated by commas."""
    num_items = NUM_BYTES // (len(item.encode()) + 1)
    return lambda: (before + ",".join([item] * num_items) + after).encode()


def _numbered_keys() -> bytes:
    keys = (f'"{number:07x}":0' for number in range(NUM_BYTES // 12))
    return ('{"prompt":"a",' + ",".join(keys) + "}").encode()


TOOL_CALL = '{"id":"a","type":"function","function":{"name":"a","arguments":"{}"}}'
_CHAT = '{"model":"demo","messages":['

# Name: path, and what makes the body.
SHAPES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "prompts of one token": ("/v1/completions", _filled('{"model":"demo","prompt":[', "[1]", "]}")),
    "prompts of one letter": ("/v1/completions", _filled('{"model":"demo","prompt":[', '"a"', "]}")),
    "token ids": ("/v1/completions", _filled('{"model":"demo","prompt":[', "1", "]}")),
    "one long prompt": ("/generate", lambda: b'{"prompt":"' + b"a " * (NUM_BYTES // 2) + b'"}'),
    "escapes": ("/generate", lambda: b'{"prompt":"' + rb"\u00e9" * (NUM_BYTES // 6) + b'"}'),
    "messages": ("/v1/chat/completions", _filled(_CHAT, '{"role":"user","content":"a"}', "]}")),
    "content parts": (
        "/v1/chat/completions",
        _filled(_CHAT + '{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"),
    ),
    "tool calls": ("/v1/chat/completions", _filled(_CHAT + '{"role":"assistant","tool_calls":[', TOOL_CALL, "]}]}")),
    "a schema": ("/v1/completions", _filled('{"model":"demo","prompt":"a","guided_json":{"enum":[', "{}", "]}}")),
    "arrays in a schema": (
        "/generate",
        _filled('{"prompt":"a","grammar":{"type":"json_schema","value":[', "[]", "]}}"),
    ),
    "choices": ("/generate", _filled('{"prompt":"a","grammar":{"type":"choice","value":[', '"a"', "]}}")),
    "unknown fields": ("/generate", _numbered_keys),
    "biases": ("/generate", _filled('{"prompt":"a","logit_bias":{', '"1":1', "}}")),
    "stop strings": ("/generate", _filled('{"prompt":"a","stop":[', '"a"', "]}")),
    "tokens to detokenize": ("/detokenize", _filled('{"model":"demo","tokens":[', "1", "]}")),
    "text to tokenize": ("/tokenize", lambda: b'{"model":"demo","prompt":"' + b"a " * (NUM_BYTES // 2) + b'"}'),
}


async def _large_body(attacker: Attacker) -> None:
    path, made = SHAPES[attacker.chance.choice(list(SHAPES))]
    await attacker.post(path, made())


async def _many_prompts(attacker: Attacker) -> None:
    path, made = SHAPES["prompts of one token"]
    await attacker.post(path, made())


async def _chunks_of_one_byte(attacker: Attacker) -> None:
    head = attacker.head("/generate", "Transfer-Encoding: chunked")
    piece = b"1\r\na\r\n" * 2**13
    body = [b'b\r\n{"prompt":"\r\n', *[piece] * (NUM_BYTES // 2**13), b'2\r\n"}\r\n0\r\n\r\n']
    await attacker.send(head, *body)


def hold_of_each(seconds: float, chance: Random) -> list[Claim]:
    """Send one body of each shape to a server at rest, and measure how long its event loop does nothing else."""
    times = max(1, round(seconds / 3))
    with serving_tenants("each-body", "--model", "sim:instant") as server:
        at_rest_s, longest_s = asyncio.run(_longest_holds(server.port, times))
    worst = sorted(longest_s, key=lambda name: -longest_s[name])[:5]
    figures = ", ".join(f"{name} {1e3 * longest_s[name]:,.0f}" for name in worst)
    return [
        Claim(
            f"the event loop is held for {1e3 * MAX_HOLD_S:g} ms at most, beyond the longest answer of /health at rest",
            f"{figures} ms (at rest {1e3 * at_rest_s:,.0f} ms)",
            max(longest_s.values()) <= MAX_HOLD_S + at_rest_s,
            is_timed=True,
        )
    ]


async def _longest_holds(port: int, times: int) -> tuple[float, dict[str, float]]:
    """Return the longest answer of /health at rest, and beside one body of each shape."""
    probe, longest_s = HealthProbe(port, interval_s=0.001), dict.fromkeys(SHAPES, 0.0)
    probing = asyncio.create_task(probe.run())
    await asyncio.sleep(1)  # the first answers take longer
    probe.take()
    await asyncio.sleep(REST_S)
    at_rest_s = max(probe.take())
    for name, (path, made) in [*SHAPES.items()] * times:
        body = made()
        await asyncio.sleep(0.1)
        probe.take()
        await asyncio.to_thread(_send, port, path, body)
        await asyncio.sleep(0.1)
        longest_s[name] = max(longest_s[name], *probe.take())
    probing.cancel()
    return at_rest_s, longest_s


def _send(port: int, path: str, body: bytes) -> None:
    """Send a body from a thread, and wait until the server closes the connection."""
    head = (
        f"POST {path} HTTP/1.1\r\nX-API-Key: {ATTACKER_KEY}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, suppress(ConnectionError):
        connection.sendall(head.encode() + body)
        while connection.recv(2**16):
            pass


ATTACKS = [
    Attack(
        "limited-bodies",
        _many_prompts,
        at_once=2,
        limits="max_concurrent_requests = 2\nrequests_per_minute = 30\ntokens_per_minute = 100",
    ),
    Attack("bodies", _large_body, at_once=2),
    Attack("one-byte-chunks", _chunks_of_one_byte),
]
SCENARIOS = [Scenario("each-body", hold_of_each)]
