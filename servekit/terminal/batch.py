"""`servekit batch FILE`: answer a file of requests, each once, over HTTP.

The file of answers is a log that is only appended to, one answer on each line. Requests with an answer in it are not
sent again, so an interrupted command continues where it stopped. A last line that is incomplete is dropped. OpenAI's
own output files have the same lines.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Raw, Struct
from tqdm import tqdm  # type: ignore[import-untyped]

from servekit.client.http_client import HttpClient, RequestFailed
from servekit.client.served_model import served
from servekit.errors import ConfigError

MAX_LINE_BYTES = 2**24
MAX_ANSWER_BYTES = 2**28
SYNC_INTERVAL_S = 5.0  # how often the answers are made durable
RETRY_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0)  # of a server that is busy or restarts: two minutes
RETRIED = (408, 429, 500, 502, 503, 504)
MAX_RETRY_AFTER_S = 60.0


class BatchSettings(Struct, kw_only=True):
    """The flags of `servekit batch`."""

    file: Path
    output: Path | None = None
    url: str | None = None
    model: str | None = None
    api_key: str | None = None
    concurrency: int = 16


class _Line(Struct):
    """A request of the input file."""

    custom_id: str
    url: str
    body: Raw
    method: str = "POST"


class _Answered(Struct):
    """What is read of an answer."""

    custom_id: str
    response: _Status | None = None


class _Status(Struct):
    status_code: int


class _Response(Struct):
    status_code: int
    request_id: str
    body: Raw | str


class _OutputLine(Struct):
    id: str
    custom_id: str
    response: _Response
    error: None = None


def answer_file(settings: BatchSettings) -> int:
    """Answer all requests of a file. Returns the exit code: 1 if one was answered with an error.

    Raises ConfigError, and RequestFailed if the server ends meanwhile.
    """
    if settings.url is not None and settings.model is not None:
        raise ConfigError("give either --url, the address of a server, or --model, a model to serve for this")
    output = settings.output or settings.file.with_suffix(".answers.jsonl")
    if output.resolve() == settings.file.resolve():
        raise ConfigError(f"--output {output} is the file of the requests; choose another name")
    num_lines = _check(settings.file)
    try:
        file = output.open("a+b")
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from None
    with file:
        log = _AnswerLog(file, output)
        num_sent = asyncio.run(_answer_all(settings, log, num_lines))
    print_line(
        f"{num_lines} requests: {num_sent} sent, {log.num_errors} of all answered with an error; "
        f"the answers are in {output}"
    )
    return 1 if log.num_errors else 0


def print_line(text: str) -> None:
    """Write a line to standard error, where the bar is, too."""
    sys.stderr.write(text + "\n")


def _lines(path: Path) -> Iterator[tuple[int, _Line]]:
    """Yield the requests with their line numbers. Raises ConfigError for a line that is none."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{path}, line {number} is longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield number, _decoder.decode(line)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}, line {number} is not a request of a batch: {error}") from None


_decoder = msgspec.json.Decoder(_Line)


def _check(path: Path) -> int:
    """Return how many requests there are. Raises ConfigError before any is sent."""
    seen: set[str] = set()
    for number, line in _lines(path):
        if line.custom_id in seen:
            raise ConfigError(f"{path}, line {number}: custom_id {line.custom_id[:64]!r} is used by an earlier line")
        if not line.url.startswith("/") or line.method != "POST":
            raise ConfigError(f"{path}, line {number}: it takes the method POST and a url like /v1/chat/completions")
        seen.add(line.custom_id)
    return len(seen)


class _AnswerLog:
    """The file of answers."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        """Read the answers that are there, and drop an incomplete last line. Raises ConfigError."""
        self._file = file
        self.answered: set[str] = set()
        self.num_errors = 0
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
        except BlockingIOError:
            raise ConfigError(f"--output {path}: another servekit batch writes it") from None
        file.seek(0)
        end = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                answered = msgspec.json.decode(line, type=_Answered)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise ConfigError(f"--output {path} has lines that are no answers; choose another name") from None
            self._note(answered.custom_id, 0 if answered.response is None else answered.response.status_code)
            end += len(line)
        file.truncate(end)

    def _note(self, custom_id: str, status: int) -> None:
        self.answered.add(custom_id)
        self.num_errors += status != 200

    def append(self, custom_id: str, status: int, body: bytes) -> None:
        """Write an answer: the kernel has it when this returns."""
        try:
            shown: Raw | str = Raw(msgspec.json.encode(msgspec.json.decode(body)))  # on one line, whatever was sent
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            shown = body.decode("utf-8", "replace")
        response = _Response(status, "", shown)
        self._file.write(
            msgspec.json.encode(_OutputLine(f"batch_req_{secrets.token_hex(12)}", custom_id, response)) + b"\n"
        )
        self._file.flush()
        self._note(custom_id, status)

    def sync(self) -> None:
        """Make all answers durable."""
        os.fsync(self._file.fileno())


async def _answer_all(settings: BatchSettings, log: _AnswerLog, num_lines: int) -> int:
    """Send the requests without an answer; return how many they were."""
    main = asyncio.current_task()
    assert main is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    remaining = (line for _, line in _lines(settings.file) if line.custom_id not in log.answered)
    num_before = len(log.answered)
    if num_before >= num_lines:
        return 0
    async with _server(settings) as url, HttpClient(url, settings.api_key) as client:
        with tqdm(total=num_lines, initial=num_before, desc="requests", disable=None, leave=False) as bar:

            async def work() -> None:
                for line in remaining:
                    status, body = await _ask(client, line)
                    log.append(line.custom_id, status, body)
                    bar.update()

            async def sync() -> None:
                while True:
                    await asyncio.sleep(SYNC_INTERVAL_S)
                    await asyncio.to_thread(log.sync)

            syncing = asyncio.create_task(sync())
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(settings.concurrency):
                        group.create_task(work())
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            finally:
                syncing.cancel()
                log.sync()
    return len(log.answered) - num_before


@asynccontextmanager
async def _server(settings: BatchSettings) -> AsyncIterator[str]:
    if settings.model is None:
        yield settings.url or "http://127.0.0.1:8000"
    else:
        async with served(settings.model, None) as url:
            yield url


async def _ask(client: HttpClient, line: _Line) -> tuple[int, bytes]:
    """Return the status and the body of an answer. Raises RequestFailed if the server stays away or refuses the key."""
    for pause_s in (*RETRY_AFTER_S, None):
        try:
            status, body, retry_after = await client.exchange(line.url, bytes(line.body), MAX_ANSWER_BYTES)
        except RequestFailed as failure:
            if pause_s is None or failure.is_permanent:
                raise RequestFailed(f"{failure.message}; the same command continues from here") from None
        else:
            if status == 401:
                raise RequestFailed("the server rejects the API key; give it with --api-key or SERVEKIT_API_KEY")
            if status not in RETRIED or pause_s is None:
                return status, body
            if retry_after is not None and retry_after.isdecimal() and len(retry_after) < 6:
                pause_s = max(pause_s, min(float(retry_after), MAX_RETRY_AFTER_S))
        await asyncio.sleep(pause_s or 0.0)
    raise AssertionError("the last try returns or raises")
