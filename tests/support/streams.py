"""Read many streamed answers at the same time, each on a connection of its own, and disturb the server meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2

from tests.support.server_process import ServerProcess, events

NUM_STREAMS = 16  # of as many connections: the probability that one of two processes gets all of them is 1 in 32,768
FIELDS = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "seed": 7}


def prompt_of(number: int) -> str:
    """The prompt of a stream."""
    return f"Story number {number}: once"


@contextmanager
def new_client(server: ServerProcess) -> Iterator[httpx2.Client]:
    """A client with a connection of its own, which any API process may get."""
    with httpx2.Client(base_url=server.url, timeout=120) as client:
        yield client


def from_all(server: ServerProcess, method: str, path: str, **options: Any) -> list[httpx2.Response]:
    """The answers to a request that is sent on many connections, and so to each API process."""
    answers = []
    for _ in range(NUM_STREAMS):
        with new_client(server) as client:
            answers.append(client.request(method, path, **options))
    return answers


class Streams:
    """Answers that are read at the same time. `fields` are those of each request, beside its prompt."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self._server = server
        self._fields = {**FIELDS, **fields}
        self._started = threading.Barrier(NUM_STREAMS + 1)

    def read(self, number: int) -> str | None:
        """The text of an answer; None if its connection was lost."""
        body = {"prompt": prompt_of(number), **self._fields}
        pieces: list[str] = []
        try:
            with new_client(self._server) as client, client.stream("POST", "/generate_stream", json=body) as response:
                assert response.status_code == 200
                for event in events(response.iter_lines()):
                    assert "error" not in event, event
                    pieces.append(event["token"]["text"])
                    if len(pieces) == 5:
                        self._started.wait(timeout=60)
        except httpx2.TransportError:
            return None
        assert len(pieces) == self._fields["max_tokens"]
        return "".join(pieces)

    def wait_until_all_have_tokens(self) -> None:
        self._started.wait(timeout=60)


def read_all(server: ServerProcess, disturb: Callable[[], object] = lambda: None, **fields: Any) -> list[str | None]:
    """All answers; `disturb` is called when each has a few tokens."""
    streams = Streams(server, **fields)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        reading = [threads.submit(streams.read, number) for number in range(NUM_STREAMS)]
        streams.wait_until_all_have_tokens()
        disturb()
        return [each.result() for each in reading]
