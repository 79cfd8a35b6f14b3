"""Run many clients at once that know the expected answers: each answer is compared with one from an idle server."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from tests.torture.report import Finding
from tests.torture.streams import Connections, End, Reply, RequestSpec, ask

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


def requests(longest: int, num_each: int = 8) -> list[RequestSpec]:
    """Return requests for a context of `longest` tokens: greedy and seeded streams, batches, chats, grammars.

    With a short context, half of the streams have no `max_tokens` and grow until the context is full, while others end
    earlier. The scheduler cannot predict that, so a small pool of blocks must preempt sequences.
    """
    chance = random.Random(5)
    found = []
    for number in range(num_each):
        prompt = PROMPTS[number % len(PROMPTS)]
        body: dict[str, Any] = {"prompt": prompt, "ignore_eos": True, "temperature": 0}
        bound = {"max_tokens": chance.randrange(60, 200) if longest > 512 else chance.randrange(30, 90)}
        open_end = {} if longest <= 512 and number % 2 else bound
        found.append(RequestSpec(f"greedy {number}", "/generate_stream", body | open_end))
        seeded = {"temperature": 1.0, "seed": number, "top_p": 0.95}
        found.append(RequestSpec(f"seeded {number}", "/generate_stream", body | open_end | seeded))
        if longest <= 512:
            found.append(RequestSpec(f"short {number}", "/generate_stream", body | {"ignore_eos": False}))
        if number % 4 == 0:
            batch = {"n": 2, "temperature": 0.8, "seed": number, "logprobs": 0, "max_tokens": 60}
            found.append(RequestSpec(f"batch {number}", "/generate", body | batch))
            chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 80, "temperature": 0}
            more = {"stream": True, "ignore_eos": True}
            found.append(RequestSpec(f"chat {number}", "/v1/chat/completions", {"model": "demo"} | chat | more))
            digits = {"grammar": {"type": "regex", "value": "[0-9]{60}"}, "max_tokens": 60, "ignore_eos": False}
            found.append(RequestSpec(f"grammar {number}", "/generate_stream", body | digits))
        if number % 4 == 1:
            lengthy = {
                "prompt": f"{number} {' '.join(PROMPTS[:6] if longest <= 512 else PROMPTS * 8)}",
                "max_tokens": 30,
            }
            found.append(RequestSpec(f"long {number}", "/generate_stream", body | lengthy))
    return found


class References:
    """The right answer of each request. Requests whose answer depends on the batch are left out and counted."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.asked: list[RequestSpec] = []
        self.num_left_out = 0

    async def take(self, port: int, asked: list[RequestSpec]) -> None:
        """Send each request with seven others and then with all: a tie between two tokens can have either result."""
        connections = Connections(port)
        narrow = asyncio.Semaphore(8)

        async def with_few(each: RequestSpec) -> Reply:
            async with narrow:
                return await ask(connections, each)

        first = await asyncio.gather(*map(with_few, asked))
        second = await asyncio.gather(*(ask(connections, each) for each in asked))
        for each, one, other in zip(asked, first, second, strict=True):
            assert one.end is End.WHOLE, f"{each.name}: {one}"
            if one.answers == other.answers:
                self.answers[each.name] = one.answers
                self.asked.append(each)
        self.num_left_out = len(asked) - len(self.asked)


class Tally:
    """Counts of how requests ended."""

    COLUMNS = ("lost", "duplicated", "wrong", "answered with an error", "refused", "stuck")

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []

    @property
    def num_asked(self) -> int:
        return sum(self.counts.values())

    def count(self, asked: RequestSpec, expected: list[Any], reply: Reply) -> str:
        """Count a reply and return a word for it; `right` is the expected one."""
        word = _word(expected, reply)
        self.counts[word] += 1
        if word != "right" and self.counts[word] <= 3:
            summary = f"{asked.name}: {word} ({reply.end}, status {reply.status}, error {reply.error})"
            if word in ("wrong", "duplicated"):
                summary += f"; expected {expected}, got {reply.answers}, numbered {reply.indexes}"
            self.examples.append(summary)
        return word

    def findings(self) -> list[Finding]:
        """Return a finding for each kind of wrong answer; each must be 0."""
        counts = [Finding(word, "0", f"{self.counts[word]:,}", self.counts[word] == 0) for word in self.COLUMNS]
        return [Finding("requests", "", f"{self.num_asked:,}"), *counts]


def _word(expected: list[Any], reply: Reply) -> str:
    match reply.end:
        case End.STUCK:
            return "stuck"
        case End.ERROR_EVENT:
            return "answered with an error"
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
    """Clients that send requests in a loop and compare the answers. While the gate is closed, no client starts one."""

    def __init__(self, port: int, references: References, num_clients: int, seed: int) -> None:
        self.tally = Tally()
        self.token_times_s: list[float] = []  # since `clear_token_times`
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
        """Close the gate and wait until all clients have finished. Raises TimeoutError."""
        self._gate.clear()
        if not await wait_until(lambda: not self._num_active, timeout_s):
            raise TimeoutError(f"{self._num_active} clients still wait after {timeout_s:g} s")

    def clear_token_times(self) -> None:
        self.token_times_s.clear()

    async def first_token_after(self, moment_s: float, timeout_s: float = 60) -> float:
        """Return the time of the first token after the moment. Raises TimeoutError."""
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
            if self.tally.count(asked, self._references.answers[asked.name], reply) != "right":
                await asyncio.sleep(0.2)  # no tight loop against a server that refuses
            times = reply.token_times_s
            self.longest_pause_s = max([self.longest_pause_s, *(b - a for a, b in pairwise(times))])

    def _on_token(self, now_s: float) -> None:
        self.token_times_s.append(now_s)


async def wait_until(is_true: Callable[[], bool], timeout_s: float, pause_s: float = 0.01) -> bool:
    """Wait for a condition; return whether it became true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(pause_s)
    return True
