"""A server that logs when it sent each token, to check the client's measurements against; it has every API.

Its answers follow a schedule, which the prompt begins with as JSON, and have the text that running/expected_answers.py
computes. It logs when each event was handed to the kernel; on a busy machine that is later than scheduled. It can also
be told to freeze, as servers do that collect garbage or compile a kernel.

    GET /written     when what was sent, by the number in the prompt
    GET /freeze/2    stand still for two seconds, from now on
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import httptools
import msgspec
import uvloop
from msgspec import Struct

from loadtest.running.clock import Timer, now_s
from loadtest.running.expected_answers import expected_text

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Schedule(Struct):
    """When the tokens of an answer are due. Gaps are 0.5 to 1.5 times `gap_s`, drawn with the seed."""

    number: int = -1
    first_s: float = 0.0
    gap_s: float = 0.001
    seed: int = 0

    def times_s(self, num_tokens: int) -> Iterator[float]:
        """Yield the due time of each token, from the arrival of the request."""
        draws = random.Random(self.seed)
        due_s = self.first_s
        for _ in range(num_tokens):
            yield due_s
            due_s += self.gap_s * draws.uniform(0.5, 1.5)

    def prompt(self) -> str:
        return _encode(self).decode()


class Written(Struct):
    """When one answer was sent, on the clock that all processes of a machine share."""

    received_s: float
    sent_s: list[float]


class ReferenceServer:
    """A protocol factory: `loop.create_server(ReferenceServer(loop), …)`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.written: dict[int, Written] = {}
        self._due: list[tuple[float, int, _Connection, bytes, Written]] = []
        self._num_pieces = 0
        self._timer = Timer(loop, self._send_due)

    def __call__(self) -> _Connection:
        return _Connection(self)

    def close(self) -> None:
        self._timer.close()

    def send_at(self, at_s: float, connection: _Connection, piece: bytes, written: Written) -> None:
        self._num_pieces += 1
        heapq.heappush(self._due, (at_s, self._num_pieces, connection, piece, written))
        self._timer.set(self._due[0][0])

    def _send_due(self) -> None:
        while self._due and self._due[0][0] <= now_s():
            _, _, connection, piece, written = heapq.heappop(self._due)
            written.sent_s.append(now_s())
            connection.write(piece)
        if self._due:
            self._timer.set(self._due[0][0])


class _Connection(asyncio.Protocol):
    def __init__(self, server: ReferenceServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = ""
        self._body = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url.decode(), b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        received_s = now_s()
        if self._path == "/written":
            self._reply(_encode(self._server.written))
        elif self._path == "/v1/models":
            self._reply(b'{"object":"list","data":[{"id":"known"}]}')
        elif self._path == "/metrics":
            kind = b"# TYPE servekit_num_requests_running gauge\n"
            self._reply(kind + b"servekit_num_requests_running %d\n" % len(self._server.written))
        elif self._path.startswith("/freeze/"):
            self._reply(b"{}")
            self._server.loop.call_soon(time.sleep, float(self._path.removeprefix("/freeze/")))
        elif self._body:
            self._answer(_decode(self._body), received_s)
        else:
            self._reply(b"{}", b"404 Not Found")  # such as /info, which not every server has

    def write(self, piece: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(piece)

    def _reply(self, body: bytes, status: bytes = b"200 OK") -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self.write(head + body)

    def _answer(self, asked: dict[str, Any], received_s: float) -> None:
        if "prompts" in asked:
            self._answer_batch(asked["prompts"], asked["max_tokens"], received_s)
            return
        prompt, num_tokens, pieces = _pieces_for(self._path, asked)
        schedule = _schedule_of(prompt)
        written = self._server.written[schedule.number] = Written(received_s, [])
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        for due_s, piece in zip(schedule.times_s(num_tokens), pieces, strict=True):
            self._server.send_at(received_s + due_s, self, head + piece, written)
            head = b""

    def _answer_batch(self, prompts: list[str], num_tokens: int, received_s: float) -> None:
        """Send the reply when the last token of the slowest answer is due."""
        schedules = [_schedule_of(prompt) for prompt in prompts]
        latest_s = max(due_s for schedule in schedules for due_s in schedule.times_s(num_tokens))
        num_prompt_tokens, num_output_tokens = sum(map(len, prompts)), num_tokens * len(prompts)
        body = _encode(
            {
                "id": "gen",
                "generated_texts": [expected_text(prompt, num_tokens) for prompt in prompts],
                "finish_reasons": ["length"] * len(prompts),
                "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens},
            }
        )
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        written = Written(received_s, [])
        for schedule in schedules:
            self._server.written[schedule.number] = written
        self._server.send_at(received_s + latest_s, self, head + body, written)


def _schedule_of(prompt: str) -> Schedule:
    try:
        schedule, _ = json.JSONDecoder().raw_decode(prompt)
        return msgspec.convert(schedule, Schedule)
    except (ValueError, msgspec.ValidationError):
        return Schedule()


def _pieces_for(path: str, asked: dict[str, Any]) -> tuple[str, int, list[bytes]]:
    """Return the prompt, the number of tokens, and what is sent for each of them."""
    if "inputs" in asked:
        prompt, num_tokens = asked["inputs"], asked["parameters"]["max_new_tokens"]
        events = _tgi(prompt, expected_text(prompt, num_tokens))
    elif "messages" in asked:
        prompt, num_tokens = "".join(message["content"] for message in asked["messages"]), asked["max_tokens"]
        events = _openai(prompt, expected_text(prompt, num_tokens), is_chat=True)
    elif path == "/v1/completions":
        prompt, num_tokens = asked["prompt"], asked["max_tokens"]
        events = _openai(prompt, expected_text(prompt, num_tokens), is_chat=False)
    else:
        prompt, num_tokens = asked["prompt"], asked["max_tokens"]
        events = _native(prompt, expected_text(prompt, num_tokens))
    pieces = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    pieces[-1] += b"0\r\n\r\n"
    return prompt, num_tokens, pieces


def _event(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _native(prompt: str, text: str) -> Iterator[bytes]:
    for index, character in enumerate(text, 1):
        token = {"id": ord(character), "text": character, "special": False, "logprob": None}
        event = {"index": index, "token": token, "generated_text": None, "details": None}
        if index == len(text):
            usage = {"prompt_tokens": len(prompt.encode()), "completion_tokens": index}
            event |= {"generated_text": text, "id": "gen", "finish_reason": "length", "usage": usage}
        yield _event(event)


def _tgi(prompt: str, text: str) -> Iterator[bytes]:
    for index, character in enumerate(text, 1):
        token = {"id": ord(character), "text": character, "special": False, "logprob": -1.0}
        event: dict[str, Any] = {"index": index, "token": token, "generated_text": None, "details": None}
        if index == len(text):
            details = {"finish_reason": "length", "generated_tokens": index, "input_length": len(prompt.encode())}
            event |= {"generated_text": text, "details": details}
        yield _event(event)


def _openai(prompt: str, text: str, is_chat: bool) -> Iterator[bytes]:
    head = {"id": "cmpl", "object": "chat.completion.chunk" if is_chat else "text_completion", "model": "known"}
    for index, character in enumerate(text, 1):
        said = {"delta": {"content": character}} if is_chat else {"text": character}
        finish_reason = "length" if index == len(text) else None
        events = _event(head | {"choices": [{"index": 0, **said, "finish_reason": finish_reason}]})
        if is_chat and index == 1:
            events = _event(head | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}) + events
        if index == len(text):
            usage = {"prompt_tokens": len(prompt.encode()), "completion_tokens": index}
            events += _event(head | {"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        yield events


async def serve_until_eof() -> None:
    """Print the port on stdout; end when stdin is closed, that is, with the parent."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(ReferenceServer(loop), "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()


if __name__ == "__main__":
    uvloop.run(serve_until_eof())
