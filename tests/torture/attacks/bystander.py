"""Measure what one tenant notices of the others: a few streams, chats, new grammars, and probes of /health."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from msgspec import Struct, field

from tests.torture.attacks.tenants import BYSTANDER_KEY
from tests.torture.crowd import PROMPTS
from tests.torture.streams import Connections, End, Reply, RequestSpec, ask

NUM_PLAIN = 4
NUM_CONSTRAINED = 2
NUM_STREAMS = NUM_PLAIN + NUM_CONSTRAINED
NUM_TOKENS = 100
PROBE_INTERVAL_S = 0.5  # between two chats, and between two new grammars
HEALTH_INTERVAL_S = 0.02
# What the server sends at once is one arrival. Otherwise a hundred tokens that come together after a pause of seconds
# would make this pause the longest of a hundred gaps, and the 99th percentile would not show it.
ONE_ARRIVAL_S = 0.001

# Enough items that the grammar lasts as long as the answer.
SCHEMA = {
    "type": "array",
    "minItems": NUM_TOKENS,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "kind": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
        "required": ["name", "kind", "count"],
        "additionalProperties": False,
    },
}


def _stream_of(number: int, **fields: Any) -> RequestSpec:
    body = {"prompt": PROMPTS[number], "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0, **fields}
    return RequestSpec(f"stream {number}", "/generate_stream", body)


PLAIN = [_stream_of(number) for number in range(NUM_PLAIN)]
CONSTRAINED = [
    _stream_of(number, grammar={"type": "json_schema", "value": SCHEMA}) for number in range(NUM_PLAIN, NUM_STREAMS)
]
STREAMS = [*PLAIN, *CONSTRAINED]
CHAT = RequestSpec(
    "chat",
    "/v1/chat/completions",
    {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0},
)
GRAMMAR = "new grammar"


def new_grammar(number: int) -> RequestSpec:
    """Return a request with a schema that was never sent before."""
    schema = {"enum": [f"{number} apples", "none"]}
    body = {"prompt": "How many?", "max_tokens": 16, "grammar": {"type": "json_schema", "value": schema}}
    return RequestSpec(GRAMMAR, "/generate_stream", body)


class Window(Struct):
    """What was measured in a window of time."""

    gaps_s: list[float] = field(default_factory=list)  # between two arrivals of a plain stream's tokens
    constrained_gaps_s: list[float] = field(default_factory=list)  # the same, of streams with a grammar
    first_tokens_s: list[float] = field(default_factory=list)
    chats_s: list[float] = field(default_factory=list)
    grammars_s: list[float] = field(default_factory=list)
    healths_s: list[float] = field(default_factory=list)
    num_right: int = 0
    others: list[str] = field(default_factory=list)  # refused, cut or wrong

    def gaps_of(self, asked: RequestSpec) -> list[float]:
        """Return the list for the gaps of a stream."""
        return self.constrained_gaps_s if "grammar" in asked.body else self.gaps_s


class Bystander:
    """Well-behaved clients of the tenant `bystander`; use it as a context manager."""

    def __init__(self, port: int) -> None:
        self.window = Window()
        self._connections = Connections(port, keeps_alive=True, api_key=BYSTANDER_KEY)
        self._health = HealthProbe(port)
        self._expected: dict[str, Reply] = {}
        self._last_s: dict[str, float] = {}  # when a stream's last token arrived
        self._asked_s: dict[str, float] = {}  # when a request was sent that has no answer yet

    async def __aenter__(self) -> Bystander:
        for asked in (*STREAMS, CHAT):
            reply = await ask(self._connections, asked)
            assert reply.end is End.WHOLE, reply
            self._expected[asked.name] = reply
        loops = [*(self._stream(asked) for asked in STREAMS), self._health.run()]
        loops += [self._probe(itertools.repeat(CHAT)), self._probe(map(new_grammar, itertools.count()))]
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._connections.close()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def begin_window(self) -> Window:
        """Return what was measured since the last call. What still waits counts with the time that it waited so far."""
        now_s = time.monotonic()
        for name, asked_s in self._asked_s.items():
            self._record(name, now_s - asked_s)
        self.window.healths_s = self._health.take()
        ended, self.window = self.window, Window()
        for asked in STREAMS:
            if asked.name in self._last_s and now_s - self._last_s[asked.name] > ONE_ARRIVAL_S:
                ended.gaps_of(asked).append(now_s - self._last_s[asked.name])
                self._last_s[asked.name] = now_s
        return ended

    def _record(self, name: str, seconds: float) -> None:
        """Record how long a request waited for its answer, or for the first token of its stream."""
        if name == CHAT.name:
            self.window.chats_s.append(seconds)
        elif name == GRAMMAR:
            self.window.grammars_s.append(seconds)
        else:
            self.window.first_tokens_s.append(seconds)

    async def _stream(self, asked: RequestSpec) -> None:
        def on_token(now_s: float) -> None:
            if asked.name in self._asked_s:
                self._record(asked.name, now_s - self._asked_s.pop(asked.name))
            elif now_s - self._last_s[asked.name] > ONE_ARRIVAL_S:
                self.window.gaps_of(asked).append(now_s - self._last_s[asked.name])
            self._last_s[asked.name] = now_s

        while True:
            self._asked_s[asked.name] = time.monotonic()
            reply = await ask(self._connections, asked, on_token)
            self._last_s.pop(asked.name, None)
            await self._count(asked, reply)

    async def _probe(self, requests: Iterable[RequestSpec]) -> None:
        for asked in requests:
            self._asked_s[asked.name] = time.monotonic()
            reply = await ask(self._connections, asked)
            self._record(asked.name, reply.ended_s - self._asked_s.pop(asked.name))
            await self._count(asked, reply)
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _count(self, asked: RequestSpec, reply: Reply) -> None:
        expected = self._expected.get(asked.name)
        if reply.end is End.WHOLE and (expected is None or reply.answers == expected.answers):
            self.window.num_right += 1
        else:
            code = reply.error["code"] if reply.error else reply.end
            self.window.others.append(f"{asked.name}: {reply.status} {code}")
            await asyncio.sleep(0.1)  # no tight loop against a server that refuses


class HealthProbe:
    """Asks /health again and again on one connection: a long answer means that the event loop did not run."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._times_s: list[float] = []
        self._asked_s: float | None = None

    def take(self) -> list[float]:
        """Return the times of the answers since the last call. A missing answer counts with the time so far."""
        taken, self._times_s = self._times_s, []
        return taken if self._asked_s is None else [*taken, time.monotonic() - self._asked_s]

    async def run(self) -> None:
        while True:
            with suppress(OSError, EOFError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    while True:
                        await self._ask(reader, writer)
                        await asyncio.sleep(HEALTH_INTERVAL_S)
                finally:
                    writer.close()
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._asked_s = time.monotonic()
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        lines = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(next(lines).split(b":")[1]))
        self._times_s.append(time.monotonic() - self._asked_s)
        self._asked_s = None
