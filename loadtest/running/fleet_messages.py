"""Messages between the parent and its client processes, over a socket: a length of 8 bytes, then msgpack."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct

from loadtest.planning.plan import Plan, Request
from loadtest.record import Record
from loadtest.running.runner import Progress
from loadtest.target import Target

NUM_IN_MESSAGE = 500  # requests or records


class Prepare(Struct, tag=True):
    """To a child: all that it needs, except for the requests."""

    target: Target
    plan: Plan
    model: str | None
    process: int
    sources: list[str]
    warm_up: list[Request]
    num_requests: int


class Requests(Struct, tag=True):
    """To a child, after Prepare."""

    requests: list[Request]


class Start(Struct, tag=True):
    """To a child: start the share at this time."""

    start_s: float  # on the clock, which is the same for all processes


class Stop(Struct, tag=True):
    """To a child: end the run now."""


class Ready(Struct, tag=True):
    """From a child: it can start."""


class Reported(Struct, tag=True):
    """From a child, four times a second."""

    progress: Progress


class Records(Struct, tag=True):
    """From a child, at the end."""

    records: list[Record]


class Finished(Struct, tag=True):
    """From a child, after all its records."""

    lags_s: list[float]
    cpu_s: float
    max_rss_bytes: int
    errors: list[str]


class Failed(Struct, tag=True):
    """From a child: it cannot carry out a command."""

    message: str


Command = Prepare | Requests | Start | Stop
Report = Ready | Reported | Records | Finished | Failed

_encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def write_message(writer: asyncio.StreamWriter, message: Struct) -> None:
    encoded = _encode(message)
    writer.write(len(encoded).to_bytes(8, "big") + encoded)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError (asyncio.IncompleteReadError is one) or ConnectionError if the other side is gone."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(8), "big"))
