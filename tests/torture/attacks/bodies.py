"""Attacks with request bodies: many small things in 8 MB, and 8 MB in small pieces."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from random import Random
from statistics import median_high
from typing import TextIO

from msgspec import Struct

from tests.torture.attacks.attacker import Attack, Attacker
from tests.torture.attacks.callback_times import Hold, read_holds
from tests.torture.attacks.claims import Claim, Scenario
from tests.torture.attacks.shapes import (
    LONG,
    LONG_CONTEXT,
    NUM_BYTES,
    PREDICTED,
    SERVED,
    SHAPES,
    Shape,
    predictor_models,
    small_shapes,
)
from tests.torture.attacks.tenants import ATTACKER_KEY, serving_tenants
from tests.torture.report import BUILD

MAX_HOLD_S = 0.01
GOAL_S = 0.005
SETTLE_S = 0.2
MIN_TIMES = 3
NUM_NAMED = 5  # shapes in the report


async def _large_body(attacker: Attacker) -> None:
    shape = SHAPES[attacker.chance.choice(list(SHAPES))]
    await attacker.post(shape.path, shape.make(NUM_BYTES), content_type=shape.content_type)


async def _many_prompts(attacker: Attacker) -> None:
    shape = SHAPES["prompts of one token"]
    await attacker.post(shape.path, shape.make(NUM_BYTES))


async def _chunks_of_one_byte(attacker: Attacker) -> None:
    head = attacker.head("/generate", "Transfer-Encoding: chunked")
    piece = b"1\r\na\r\n" * 2**13
    body = [b'b\r\n{"prompt":"\r\n', *[piece] * (NUM_BYTES // 2**13), b'2\r\n"}\r\n0\r\n\r\n']
    await attacker.send(head, *body)


class Holds(Struct):
    """The longest callback beside each time that a body was sent."""

    first: list[Hold]
    again: list[Hold] = []  # the same, if one of the first ones was too long

    @property
    def longest(self) -> Hold:
        return max([*self.first, *self.again])

    @property
    def is_too_long(self) -> bool:
        """Whether the body holds the event loop for too long: both times, so that it was not something else."""
        return min(max(self.first), max(self.again or self.first)).cpu_s > MAX_HOLD_S

    @property
    def summary(self) -> str:
        """All times in milliseconds, the longest first."""
        return " ".join(f"{1e3 * hold.cpu_s:.1f}" for hold in sorted([*self.first, *self.again], reverse=True))


def hold_of_each(seconds: float, chance: Random) -> list[Claim]:
    """Send one body of each shape to a server at rest, and measure how long one callback holds its event loop.

    The longest of all times counts, in processor time of the loop's thread. On a busy machine or with a collection of
    garbage, a callback may take longer once, whatever the body is. So a shape with a longer time than is allowed is
    sent as often again. It misses the demand if a time is too long again; all times are in the report.
    """
    times = max(MIN_TIMES, round(seconds / 3))
    BUILD.mkdir(parents=True, exist_ok=True)
    batches = BUILD / "attack-each-body-batches"
    batches.mkdir(exist_ok=True)
    generating = ("--model", "sim:instant", "--served-model-name", "demo", "--batch-dir", str(batches))
    predicting = ("--models", str(predictor_models(BUILD / "predictors")))
    measured: dict[str, Holds] = {}
    for shapes, flags in (
        (SHAPES | small_shapes() | SERVED, generating),
        (LONG, (*generating, *LONG_CONTEXT)),
        (PREDICTED, predicting),
    ):
        measured |= _holds_of(shapes, flags, times)
    ordered = sorted(measured, key=lambda name: measured[name].longest, reverse=True)
    missed = [name for name in ordered if measured[name].is_too_long]
    named = list(dict.fromkeys([*missed, *ordered[:NUM_NAMED]]))
    medians = {name: median_high(holds.first).cpu_s for name, holds in measured.items()}
    num_over_goal = sum(seconds > GOAL_S for seconds in medians.values())
    return [
        Claim(
            f"no callback takes more than {1e3 * MAX_HOLD_S:g} ms of processor time on the event loop: the longest of "
            "all times, and if one is longer, again the longest of as many",
            ", ".join(f"{name} {measured[name].summary}" for name in named) + " ms",
            not missed,
            is_timed=True,
        ),
        Claim("", f"{num_over_goal} of {len(measured)} shapes over {1e3 * GOAL_S:g} ms at the median"),
    ]


def _holds_of(shapes: dict[str, Shape], flags: tuple[str, ...], times: int) -> dict[str, Holds]:
    """Return the longest callbacks for one body of each shape, for each of the times that it is sent."""
    file = BUILD / "attack-each-body-holds.txt"
    prefix = [sys.executable, "-m", "tests.torture.attacks.callback_times", str(file)]
    with serving_tenants("each-body", *flags, prefix=prefix) as server, file.open() as lines:
        for shape in dict.fromkeys((shape.path, shape.content_type) for shape in shapes.values()):
            _send(server.port, Shape(shape[0], lambda _: b"{}", shape[1]))  # the first request takes longer
        first: dict[str, list[Hold]] = {name: [] for name in shapes}
        for name in [*shapes] * times:
            first[name].append(_longest(server.port, shapes[name], lines))
        measured = {name: Holds(holds) for name, holds in first.items()}
        for name, holds in measured.items():
            if holds.is_too_long:
                holds.again = [_longest(server.port, shapes[name], lines) for _ in range(times)]
            print(f"    {name}: {holds.summary} ms; {holds.longest.what}", flush=True)
    return measured


def _longest(port: int, shape: Shape, lines: TextIO) -> Hold:
    """Send a body, and return the callback that held the event loop for longest meanwhile."""
    read_holds(lines)
    _send(port, shape)
    time.sleep(SETTLE_S)
    return max([Hold(0.0, 0.0, ""), *read_holds(lines)])


def _send(port: int, shape: Shape) -> None:
    """Send a body, and wait until the server closes the connection."""
    body = shape.make(NUM_BYTES)
    head = (
        f"POST {shape.path} HTTP/1.1\r\nX-API-Key: {ATTACKER_KEY}\r\nConnection: close\r\n"
        f"Content-Type: {shape.content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
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
