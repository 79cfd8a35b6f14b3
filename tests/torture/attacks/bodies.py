"""Attacks with request bodies: many small things in 8 MB, and 8 MB in small pieces."""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median_high

from tests.torture.attacks.attacker import Attack, Attacker
from tests.torture.attacks.callback_times import Hold, read_holds
from tests.torture.attacks.claims import Claim, Scenario
from tests.torture.attacks.tenants import ATTACKER_KEY, serving_tenants
from tests.torture.report import BUILD

MAX_HOLD_S = 0.01
SETTLE_S = 0.2
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
    "10,000 prompts": (
        "/v1/completions",
        lambda: b'{"model":"demo","prompt":[' + b",".join([b"[1]"] * 10_000) + b"]}",
    ),
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


# Bodies that are served. They are no attacks on the model, so only the event loop is measured beside them.
SERVED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "1,000 prompts of 1,300 tokens": (
        "/v1/completions",
        lambda: (
            '{"model":"demo","max_tokens":1,"prompt":[' + ",".join(["[" + ",".join(["123"] * 1300) + "]"] * 1000) + "]}"
        ).encode(),
    ),
    "a chat in Chinese": (
        "/v1/chat/completions",
        lambda: (_CHAT + '{"role":"user","content":"' + "漢字" * (NUM_BYTES // 6) + '"}]}').encode(),
    ),
    "a rendered chat": (
        "/v1/chat/completions",
        lambda: (_CHAT + '{"role":"assistant","content":"' + "漢字" * (NUM_BYTES // 6) + '"}]}').encode(),
    ),
    "long messages": (
        "/v1/chat/completions",
        _filled(_CHAT, '{"role":"assistant","content":"' + "漢字" * 2500 + '"}', "]}"),
    ),
    "a truncated text": (
        "/v1/completions",
        lambda: b'{"model":"demo","max_tokens":4,"truncate_prompt_tokens":100,"prompt":"' + b"a b " * 2_000_000 + b'"}',
    ),
    "128 answers": ("/v1/completions", lambda: b'{"model":"demo","prompt":"a","n":128,"max_tokens":4}'),
}


# Bodies that are served only with a long context.
LONG_CONTEXT = ("--max-model-len", str(2**18), "--num-kv-blocks", str(2**15))
NUM_LONG = 200_000
_numbers = itertools.count(100)  # so that no prompt begins like one before it
LONG: dict[str, tuple[str, Callable[[], bytes]]] = {
    "200,000 token ids": ("/v1/completions", lambda: _long_prompt(next(_numbers) % 200)),
    "200,000 token ids that are cached": ("/v1/completions", lambda: _long_prompt(0)),
    "a text of 200,000 tokens": (
        "/v1/completions",
        lambda: b'{"model":"demo","max_tokens":1,"prompt":"%d' % next(_numbers) + b" a" * (NUM_LONG - 8) + b'"}',
    ),
}


def _long_prompt(first: int) -> bytes:
    token_ids = b",".join([b"%d" % first, *[b"123"] * (NUM_LONG - 1)])
    return b'{"model":"demo","max_tokens":1,"prompt":[' + token_ids + b"]}"


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
    """Send one body of each shape to a server at rest, and measure how long one callback holds its event loop."""
    times = max(3, round(seconds / 3))
    BUILD.mkdir(parents=True, exist_ok=True)
    file = BUILD / "attack-each-body-holds.txt"
    measured = [sys.executable, "-m", "tests.torture.attacks.callback_times", str(file)]
    model = ("--model", "sim:instant", "--served-model-name", "demo")
    longest: dict[str, Hold] = {}
    for shapes, flags in ((SHAPES | SERVED, ()), (LONG, LONG_CONTEXT)):
        with serving_tenants("each-body", *model, *flags, prefix=measured) as server:
            longest |= _longest_holds(server.port, file, shapes, times)
    for name, hold in longest.items():
        print(f"    {name}: {1e3 * hold.cpu_s:.1f} ms {hold.what}", flush=True)
    worst = sorted(longest, key=lambda name: -longest[name].cpu_s)[:5]
    return [
        Claim(
            f"no callback takes more than {1e3 * MAX_HOLD_S:g} ms of processor time on the event loop",
            ", ".join(f"{name} {1e3 * longest[name].cpu_s:,.1f}" for name in worst) + " ms",
            longest[worst[0]].cpu_s <= MAX_HOLD_S,
            is_timed=True,
        )
    ]


def _longest_holds(
    port: int, file: Path, shapes: dict[str, tuple[str, Callable[[], bytes]]], times: int
) -> dict[str, Hold]:
    """Return the longest callback for one body of each shape.

    Each body is sent some times, and the median counts: a busy machine slows a callback down now and then, but what a
    body itself costs is there each time.
    """
    longest: dict[str, list[Hold]] = {name: [] for name in shapes}
    with file.open() as lines:
        for path in dict.fromkeys(path for path, _ in shapes.values()):
            _send(port, path, b"{}")  # the first request takes longer
        for name, (path, made) in [*shapes.items()] * times:
            body = made()
            time.sleep(SETTLE_S)
            read_holds(lines)
            _send(port, path, body)
            time.sleep(SETTLE_S)
            longest[name].append(max([Hold(0.0, ""), *read_holds(lines)]))
    return {name: median_high(holds) for name, holds in longest.items()}


def _send(port: int, path: str, body: bytes) -> None:
    """Send a body, and wait until the server closes the connection."""
    head = (
        f"POST {path} HTTP/1.1\r\nX-API-Key: {ATTACKER_KEY}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with suppress(ConnectionError):  # the server refuses before it has read everything
            connection.sendall(head.encode() + body)
        with suppress(ConnectionError):
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
