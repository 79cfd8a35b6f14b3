"""Many clients at once who know what they should be told: every answer is compared with that of a quiet hour."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from tests.torture.report import Finding
from tests.torture.streams import Asked, Connections, End, Reply, ask

PROMPTS = (
    "What color is the sky?",
    "Once upon a time",
    "Count from 3 to 9.",
    "What is the capital of France?",
    "How many legs does a spider have?",
    "What is the opposite of hot?",
    "Tell me a story about a fox.",
    "Tom has a blue hat. What does Tom have?",
    "What comes after Monday?",
    "What is a KV cache?",
    "A small cat and a big dog",
    "Name an animal that lives in the water.",
)


def requests(longest: int, num_each: int = 8) -> list[Asked]:
    """Some of every kind, for a model of so long a context: greedy and seeded streams, batches, chats, a grammar.

    Where the context is short, half of the streams have no `max_tokens` and grow until it is full, while others end by
    themselves: nobody can foresee that, and a small pool of blocks must preempt somebody.
    """
    chance = random.Random(5)
    found = []
    for number in range(num_each):
        prompt = PROMPTS[number % len(PROMPTS)]
        body: dict[str, Any] = {"prompt": prompt, "ignore_eos": True, "temperature": 0}
        bound = {"max_tokens": chance.randrange(60, 200) if longest > 512 else chance.randrange(30, 90)}
        open_end = {} if longest <= 512 and number % 2 else bound
        found.append(Asked(f"greedy {number}", "/generate_stream", body | open_end))
        seeded = {"temperature": 1.0, "seed": number, "top_p": 0.95}
        found.append(Asked(f"seeded {number}", "/generate_stream", body | open_end | seeded))
        if longest <= 512:
            found.append(Asked(f"short {number}", "/generate_stream", body | {"ignore_eos": False}))
        if number % 4 == 0:
            batch = {"n": 2, "temperature": 0.8, "seed": number, "logprobs": 0, "max_tokens": 60}
            found.append(Asked(f"batch {number}", "/generate", body | batch))
            chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 80, "temperature": 0}
            more = {"stream": True, "ignore_eos": True}
            found.append(Asked(f"chat {number}", "/v1/chat/completions", {"model": "demo"} | chat | more))
            digits = {"grammar": {"type": "regex", "value": "[0-9]{60}"}, "max_tokens": 60, "ignore_eos": False}
            found.append(Asked(f"grammar {number}", "/generate_stream", body | digits))
        if number % 4 == 1:
            lengthy = {
                "prompt": f"{number} {' '.join(PROMPTS[:6] if longest <= 512 else PROMPTS * 8)}",
                "max_tokens": 30,
            }
            found.append(Asked(f"long {number}", "/generate_stream", body | lengthy))
    return found


class References:
    """The right answer of each request. Those whose answer depends on their company are left out, and counted."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.asked: list[Asked] = []
        self.num_left_out = 0

    async def take(self, port: int, asked: list[Asked]) -> None:
        """Ask each one beside eight others and then beside all: a tie between two tokens may fall either way."""
        connections = Connections(port)
        narrow = asyncio.Semaphore(8)

        async def beside_few(each: Asked) -> Reply:
            async with narrow:
                return await ask(connections, each)

        first = await asyncio.gather(*map(beside_few, asked))
        second = await asyncio.gather(*(ask(connections, each) for each in asked))
        for each, one, other in zip(asked, first, second, strict=True):
            assert one.end is End.WHOLE, f"{each.name}: {one}"
            if one.answers == other.answers:
                self.answers[each.name] = one.answers
                self.asked.append(each)
        self.num_left_out = len(asked) - len(self.asked)


class Tally:
    """What became of requests."""

    COLUMNS = ("lost", "duplicated", "wrong", "told an error", "refused", "stuck")

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []

    @property
    def num_asked(self) -> int:
        return sum(self.counts.values())

    def judge(self, asked: Asked, expected: list[Any], reply: Reply) -> str:
        """One word for it; `right` is what it should be."""
        word = _word(expected, reply)
        self.counts[word] += 1
        if word != "right" and self.counts[word] <= 3:
            told = f"{asked.name}: {word} ({reply.end}, status {reply.status}, error {reply.error})"
            if word in ("wrong", "duplicated"):
                told += f"; expected {expected}, got {reply.answers}, numbered {reply.indexes}"
            self.examples.append(told)
        return word

    def findings(self) -> list[Finding]:
        """Nothing but right answers is right."""
        counts = [Finding(word, "0", f"{self.counts[word]:,}", self.counts[word] == 0) for word in self.COLUMNS]
        return [Finding("requests", "", f"{self.num_asked:,}"), *counts]


def _word(expected: list[Any], reply: Reply) -> str:
    match reply.end:
        case End.STUCK:
            return "stuck"
        case End.TOLD:
            return "told an error"
        case End.REFUSED | End.UNREACHED:
            return "refused"
        case End.CUT | End.UNANSWERED:
            return "lost"
        case End.GARBLED:
            return "wrong"
    if reply.indexes != list(range(1, len(reply.indexes) + 1)):
        return "duplicated"
    return "right" if reply.answers == expected else "wrong"


class Crowd:
    """Clients in a loop: ask, compare, ask again. While the gate is closed nobody begins."""

    def __init__(self, port: int, references: References, num_clients: int, seed: int) -> None:
        self.tally = Tally()
        self.token_times_s: list[float] = []  # since `forget`
        self.longest_pause_s = 0.0  # of any stream, between two tokens
        self._references = references
        self._connections = Connections(port)
        self._gate = asyncio.Event()
        self._num_active = 0
        self._chance = random.Random(seed)
        self._clients = [asyncio.create_task(self._client()) for _ in range(num_clients)]

    def open(self) -> None:
        self._gate.set()

    async def rest(self, timeout_s: float = 120) -> None:
        """Close the gate and wait until everybody has finished. Raises TimeoutError."""
        self._gate.clear()
        if not await wait_until(lambda: not self._num_active, timeout_s):
            raise TimeoutError(f"{self._num_active} clients still wait after {timeout_s:g} s")

    def forget(self) -> None:
        self.token_times_s.clear()

    async def first_token_after(self, moment_s: float, timeout_s: float = 60) -> float:
        """When it came. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                for time_s in self.token_times_s:
                    if time_s > moment_s:
                        return time_s
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _client(self) -> None:
        while True:
            await self._gate.wait()
            self._num_active += 1
            try:
                asked = self._chance.choice(self._references.asked)
                reply = await ask(self._connections, asked, self._on_token)
            finally:
                self._num_active -= 1
            if self.tally.judge(asked, self._references.answers[asked.name], reply) != "right":
                await asyncio.sleep(0.2)  # a server that refuses is not asked in a tight loop
            times = reply.token_times_s
            self.longest_pause_s = max([self.longest_pause_s, *(b - a for a, b in pairwise(times))])

    def _on_token(self, now_s: float) -> None:
        self.token_times_s.append(now_s)


async def wait_until(is_true: Callable[[], bool], timeout_s: float, pause_s: float = 0.01) -> bool:
    """Whether it became true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(pause_s)
    return True
