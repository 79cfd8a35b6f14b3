"""One request as a client sees it, on a raw socket: each token as it comes, and how the answer ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct, field

# Without a token or an end for so long a client counts as stuck.
STUCK_S = 60.0


class End(StrEnum):
    """How a reply ended."""

    WHOLE = "whole"  # as the protocol says, with all that belongs to it
    TOLD = "told"  # a stream whose last event is an error of the documented shape
    REFUSED = "refused"  # a status other than 200, with a body of the documented shape
    CUT = "cut"  # the connection ended in the middle of an answer
    UNANSWERED = "unanswered"  # the connection ended before the answer began
    UNREACHED = "unreached"  # there was no connection
    STUCK = "stuck"  # nothing came for too long
    LEFT = "left"  # the client itself went away
    GARBLED = "garbled"  # what came is not what the door gives


class Asked(Struct, frozen=True):
    """A request that can be repeated: the same body has the same answer."""

    name: str
    path: str
    body: dict[str, Any]


class Reply(Struct):
    """What came back. `answers` are token ids, or the text where a door tells no ids."""

    end: End = End.UNREACHED
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    indexes: list[int] = field(default_factory=list)  # of a native stream's tokens, as the server numbers them
    answers: list[Any] = field(default_factory=list)
    error: dict[str, Any] | None = None
    started_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0


class Connections:
    """To one server. Those that are kept alive are used again."""

    def __init__(self, port: int, keeps_alive: bool = False) -> None:
        self._port = port
        self._keeps_alive = keeps_alive
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def take(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port)

    def give_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_clean: bool) -> None:
        if self._keeps_alive and is_clean:
            self._idle.append((reader, writer))
        else:
            writer.close()

    def head(self, asked: Asked, length: int) -> bytes:
        keep = "keep-alive" if self._keeps_alive else "close"
        lines = [f"POST {asked.path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", f"Connection: {keep}"]
        return "\r\n".join([*lines, "Content-Type: application/json", "\r\n"]).encode()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()


async def ask(
    connections: Connections,
    asked: Asked,
    on_token: Callable[[float], None] = lambda now_s: None,
    leaves_after: int | None = None,
    patience_s: float = float("inf"),
) -> Reply:
    """Send it and read the answer to its end, or leave after so many tokens or seconds. The reply tells what came."""
    reply = Reply(started_s=time.monotonic())
    gives_up_s = reply.started_s + patience_s
    try:
        reader, writer = await connections.take()
    except OSError:
        reply.ended_s = time.monotonic()
        return reply
    is_clean = False
    try:
        async with asyncio.timeout(min(STUCK_S, patience_s)) as deadline:

            def token(now_s: float) -> None:
                reply.token_times_s.append(now_s)
                on_token(now_s)
                deadline.reschedule(min(asyncio.get_running_loop().time() + STUCK_S, gives_up_s))
                if len(reply.token_times_s) == leaves_after:
                    raise _LeftError

            reply.end = End.UNANSWERED
            body = msgspec.json.encode(asked.body)
            writer.write(connections.head(asked, len(body)) + body)
            await writer.drain()
            await _read_head(reader, reply)
            reply.end = End.CUT
            if reply.headers.get("content-type", "").startswith("text/event-stream"):
                await _read_stream(reader, reply, token)
            else:
                await _read_whole(reader, reply, token)
            is_clean = reply.headers.get("connection") != "close"
    except TimeoutError:
        reply.end = End.LEFT if time.monotonic() > gives_up_s - 0.1 else End.STUCK
    except _LeftError:
        reply.end = End.LEFT
    except (OSError, EOFError):
        pass  # cut, or unanswered
    except (ValueError, KeyError, IndexError, TypeError, msgspec.DecodeError) as error:
        reply.end, reply.error = End.GARBLED, {"code": repr(error)}
    finally:
        reply.ended_s = time.monotonic()
        connections.give_back(reader, writer, is_clean)
    return reply


class _LeftError(Exception):
    """The client has had enough."""


async def _read_head(reader: asyncio.StreamReader, reply: Reply) -> None:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    reply.status = int(lines[0].split()[1])
    for line in filter(None, lines[1:]):
        name, _, value = line.partition(":")
        reply.headers[name.lower()] = value.strip()


async def _read_whole(reader: asyncio.StreamReader, reply: Reply, token: Callable[[float], None]) -> None:
    length = int(reply.headers["content-length"])
    body = msgspec.json.decode(await reader.readexactly(length)) if length else {}
    if reply.status != 200:
        reply.error = body["error"]
        if not {"message", "type", "param", "code"} <= reply.error.keys():
            raise ValueError(f"an error of another shape: {body}")
        reply.end = End.REFUSED
        return
    if "tokens" in body:  # with `logprobs`: one list of tokens for each answer, or just the list for one
        lists = body["tokens"] if body["tokens"] and isinstance(body["tokens"][0], list) else [body["tokens"]]
        reply.answers = [[each["id"] for each in tokens] for tokens in lists]
    else:
        reply.answers = [choice["message"]["content"] for choice in body["choices"]]
    reply.end = End.WHOLE
    token(time.monotonic())


async def _read_stream(reader: asyncio.StreamReader, reply: Reply, token: Callable[[float], None]) -> None:
    """Native events or OpenAI's. A stream is whole with its own last event and the end of the chunked body."""
    is_native, has_ended = True, False
    native: list[int] = []
    text: list[str] = []
    begun = b""
    reply.answers = [native]
    while size := int(await reader.readuntil(b"\r\n"), 16):
        chunk = await reader.readexactly(size + 2)
        now_s = time.monotonic()
        *events, begun = (begun + chunk[:-2]).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: "):
                continue  # a comment, which keeps the connection alive and is nothing to a client that waits
            if has_ended:
                raise ValueError(f"an event behind the end: {event!r}")
            if event == b"data: [DONE]":
                has_ended = True
                continue
            told = msgspec.json.decode(event[len(b"data: ") :])
            if "error" in told:
                reply.error, has_ended = told["error"], True
            elif "choices" in told:
                is_native, reply.answers = False, [text]
                text += [choice["delta"].get("content") or "" for choice in told["choices"]]
                token(now_s)
            else:
                native.append(told["token"]["id"])
                reply.indexes.append(told["index"])
                has_ended = told["generated_text"] is not None
                token(now_s)
    await reader.readexactly(2)
    if not is_native:
        reply.answers = ["".join(text)]
    if has_ended:
        reply.end = End.TOLD if reply.error is not None else End.WHOLE


async def close_quietly(writer: asyncio.StreamWriter) -> None:
    """Close it and wait until that is done."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
