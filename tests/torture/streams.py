"""Send one request over a raw socket, and record each token's arrival and how the answer ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct, field

# A client that receives neither a token nor the end for this long counts as stuck.
STUCK_S = 60.0
# An answer that is sent whole shows nothing of its progress, and may live through the loss of several workers.
WHOLE_STUCK_S = 3 * STUCK_S


class End(StrEnum):
    """How a reply ended."""

    WHOLE = "whole"  # complete by the protocol
    ERROR_EVENT = "error event"  # the last event of a stream is an error of the documented form
    REFUSED = "refused"  # a status other than 200, with a body of the documented form
    CUT = "cut"  # the connection ended in the middle of an answer
    UNANSWERED = "unanswered"  # the connection ended before the answer began
    UNREACHED = "unreached"  # there was no connection
    STUCK = "stuck"  # nothing came for too long
    LEFT = "left"  # the client disconnected
    GARBLED = "garbled"  # the answer does not follow the API


class RequestSpec(Struct, frozen=True):
    """A repeatable request: the same body has the same answer."""

    name: str
    path: str
    body: dict[str, Any]


class Reply(Struct):
    """The reply to a request. `answers` are token ids, or text where the API returns no ids."""

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
    """Connections to one server, with an API key if it needs one; kept-alive connections are used again."""

    def __init__(self, port: int, keeps_alive: bool = False, api_key: str | None = None) -> None:
        self._port = port
        self._keeps_alive = keeps_alive
        self._api_key = api_key
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

    def head(self, asked: RequestSpec, length: int) -> bytes:
        keep = "keep-alive" if self._keeps_alive else "close"
        lines = [f"POST {asked.path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", f"Connection: {keep}"]
        lines += [] if self._api_key is None else [f"X-API-Key: {self._api_key}"]
        return "\r\n".join([*lines, "Content-Type: application/json", "\r\n"]).encode()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()


async def ask(
    connections: Connections,
    asked: RequestSpec,
    on_token: Callable[[float], None] = lambda now_s: None,
    leaves_after: int | None = None,
    patience_s: float = float("inf"),
) -> Reply:
    """Send a request and read its answer, or disconnect after `leaves_after` tokens or `patience_s` seconds."""
    reply = Reply(started_s=time.monotonic())
    gives_up_s = reply.started_s + patience_s
    is_stream = asked.path == "/generate_stream" or asked.body.get("stream", False)
    stuck_s = STUCK_S if is_stream else WHOLE_STUCK_S
    try:
        reader, writer = await connections.take()
    except OSError:
        reply.ended_s = time.monotonic()
        return reply
    is_clean = False
    try:
        async with asyncio.timeout(min(stuck_s, patience_s)) as deadline:

            def token(now_s: float) -> None:
                reply.token_times_s.append(now_s)
                on_token(now_s)
                deadline.reschedule(min(asyncio.get_running_loop().time() + stuck_s, gives_up_s))
                if len(reply.token_times_s) == leaves_after:
                    raise _ClientLeft

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
    except _ClientLeft:
        reply.end = End.LEFT
    except (OSError, EOFError):
        pass  # the reply's end is CUT or UNANSWERED already
    except (ValueError, KeyError, IndexError, TypeError, msgspec.DecodeError) as error:
        reply.end, reply.error = End.GARBLED, {"code": repr(error)}
    finally:
        reply.ended_s = time.monotonic()
        connections.give_back(reader, writer, is_clean)
    return reply


class _ClientLeft(Exception):
    """The client disconnects as planned."""


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
            raise ValueError(f"an error of another form: {body}")
        reply.end = End.REFUSED
        return
    if "tokens" in body:  # with `logprobs`: a list of tokens for each answer, or the list itself for one answer
        lists = body["tokens"] if body["tokens"] and isinstance(body["tokens"][0], list) else [body["tokens"]]
        reply.answers = [[each["id"] for each in tokens] for tokens in lists]
    else:
        reply.answers = [choice["message"]["content"] for choice in body["choices"]]
    reply.end = End.WHOLE
    token(time.monotonic())


async def _read_stream(reader: asyncio.StreamReader, reply: Reply, token: Callable[[float], None]) -> None:
    """Read native or OpenAI events. A stream is complete with its last event and the end of the chunked body."""
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
                continue  # a keep-alive comment, which is no progress
            if has_ended:
                raise ValueError(f"an event after the end: {event!r}")
            if event == b"data: [DONE]":
                has_ended = True
                continue
            event_data = msgspec.json.decode(event[len(b"data: ") :])
            if "error" in event_data:
                reply.error, has_ended = event_data["error"], True
            elif "choices" in event_data:
                is_native, reply.answers = False, [text]
                text += [choice["delta"].get("content") or "" for choice in event_data["choices"]]
                token(now_s)
            else:
                native.append(event_data["token"]["id"])
                reply.indexes.append(event_data["index"])
                has_ended = event_data["generated_text"] is not None
                token(now_s)
    await reader.readexactly(2)
    if not is_native:
        reply.answers = ["".join(text)]
    if has_ended:
        reply.end = End.ERROR_EVENT if reply.error is not None else End.WHOLE


async def close_quietly(writer: asyncio.StreamWriter) -> None:
    """Close the connection and wait until it is closed."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
