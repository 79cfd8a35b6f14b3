"""Kill the server with SIGKILL twice while it runs a batch: each line must be answered once, and with the right text.

The model is simulated, and its answers are known. The server is killed at random numbers of answered lines.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2

from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.support.server_process import ServerProcess, free_port
from tests.torture.report import BUILD, Finding, percentile

NUM_KILLS = 2
MAX_TOKENS = 6
PAUSE_S = 0.02  # between two looks at the batch
TIMEOUT_S = 900.0
WRONG_EVERY = 100  # one line in so many is refused by its route, and must be in the error file
SETTINGS = ("--model", "sim:instant", "--log-level", "warning", "--batch-concurrency", "64")


def _line(number: int) -> dict[str, Any]:
    body = {"prompt": f"Line {number}.", "max_tokens": 0 if _is_wrong(number) else MAX_TOKENS}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def _is_wrong(number: int) -> bool:
    return number % WRONG_EVERY == WRONG_EVERY - 1


def _expected(number: int) -> str:
    return bytes(NaiveReference().output(f"Line {number}.".encode(), SamplingParams(max_tokens=MAX_TOKENS))).decode()


class BatchRun:
    """One batch, over several lives of the server."""

    def __init__(self, num_lines: int, directory: Path, api_processes: int) -> None:
        self.num_lines = num_lines
        self._directory = directory
        self._port = free_port()
        self._settings = (*SETTINGS, "--batch-dir", str(directory), "--api-processes", str(api_processes))
        self._server: ServerProcess
        self.statuses: list[str] = []
        self.counts: list[int] = []  # of answered lines, as the server reported them
        self.start()

    def start(self) -> None:
        log = BUILD / "batches.log"
        self._server = ServerProcess(*self._settings, log=log, port=self._port)
        self._server.wait_until_ready()
        self.client = self._server.client

    def kill(self) -> None:
        self._server.process.send_signal(signal.SIGKILL)
        self._server.process.wait()
        self.client.close()
        deadline_s = time.monotonic() + 30
        while self._server.started_pids():  # the next server has the same port
            assert time.monotonic() < deadline_s
            time.sleep(PAUSE_S)

    def create(self) -> str:
        content = "".join(json.dumps(_line(number)) + "\n" for number in range(self.num_lines))
        files = {"file": ("input.jsonl", content.encode())}
        file = self.client.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id: str = self.client.post("/v1/batches", json=wanted).raise_for_status().json()["id"]
        return batch_id

    def wait(self, batch_id: str, num_answered: int) -> dict[str, Any]:
        """Return the batch when so many lines are answered, or it has ended."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            batch: dict[str, Any] = self.client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
            counts = batch["request_counts"]
            self.statuses.append(batch["status"])
            self.counts.append(counts["completed"] + counts["failed"])
            if self.counts[-1] >= num_answered or batch["status"] in ("completed", "failed", "expired"):
                return batch
            assert time.monotonic() < deadline_s, batch
            time.sleep(PAUSE_S)

    def content(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        text = self.client.get(f"/v1/files/{file_id}/content").raise_for_status().text
        return [json.loads(line) for line in text.splitlines()]

    def latency_s(self) -> float:
        """Send a request as a client would; return how long it takes."""
        began_s = time.monotonic()
        asked = {"prompt": "How are you?", "max_tokens": MAX_TOKENS}
        self.client.post("/v1/completions", json=asked).raise_for_status()
        return time.monotonic() - began_s


def run(num_lines: int, seed: int = 0, api_processes: int = 1) -> list[Finding]:
    """Run a batch of `num_lines` lines, and kill the server twice meanwhile."""
    chance, directory = random.Random(seed), BUILD / "batches"
    shutil.rmtree(directory, ignore_errors=True)
    batch_run = BatchRun(num_lines, directory, api_processes)
    try:
        alone_s = [batch_run.latency_s() for _ in range(50)]
        batch_id, began_s = batch_run.create(), time.monotonic()
        killed_at = []
        beside_s: list[float] = []
        for part in range(NUM_KILLS):
            share = (part + chance.uniform(0.3, 0.9)) / (NUM_KILLS + 1)
            batch_run.wait(batch_id, round(share * num_lines))
            beside_s += [batch_run.latency_s() for _ in range(num_lines // 400)]
            batch = batch_run.wait(batch_id, 0)
            assert batch["status"] == "in_progress", f"the batch was too short to kill the server in it: {batch}"
            killed_at.append(batch_run.counts[-1])
            batch_run.kill()
            batch_run.start()
        batch = batch_run.wait(batch_id, num_lines + 1)
        took_s = time.monotonic() - began_s
        completed = batch_run.content(batch["output_file_id"])
        failed = batch_run.content(batch["error_file_id"])
    except httpx2.HTTPError as error:
        raise AssertionError(f"a request about the batch failed: {error!r}") from error
    finally:
        batch_run.kill()
    return [
        *_answers(num_lines, batch, completed, failed),
        Finding(
            "what the server reports over its three lives",
            "the number of answered lines never falls",
            f"killed after {' and '.join(f'{count:,}' for count in killed_at)} lines; "
            f"{sum(later < earlier for earlier, later in pairwise(batch_run.counts))} times less than before",
            all(later >= earlier for earlier, later in pairwise(batch_run.counts)),
        ),
        Finding("from the creation to the end, with both restarts", "", f"{took_s:.0f} s"),
        Finding(
            "other requests beside the batch",
            "",
            f"{1e3 * percentile(beside_s, 0.5):.0f} ms (p50), {1e3 * percentile(beside_s, 0.99):.0f} ms (p99); alone "
            f"{1e3 * percentile(alone_s, 0.5):.0f} and {1e3 * percentile(alone_s, 0.99):.0f} ms",
        ),
    ]


def _answers(
    num_lines: int, batch: dict[str, Any], completed: list[dict[str, Any]], failed: list[dict[str, Any]]
) -> list[Finding]:
    times = Counter(line["custom_id"] for line in [*completed, *failed])
    wanted = {f"line-{number}" for number in range(num_lines)}
    num_lost, num_twice = len(wanted - times.keys()), sum(count > 1 for count in times.values())
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in completed}
    refused = {line["custom_id"]: line["response"]["status_code"] for line in failed}
    num_wrong = sum(
        (refused.get(name) != 400 if _is_wrong(number) else texts.get(name) != _expected(number))
        for number, name in ((number, f"line-{number}") for number in range(num_lines))
    )
    counts = batch["request_counts"]
    fits = counts == {"total": num_lines, "completed": len(completed), "failed": len(failed)}
    return [
        Finding("lines", "completed", f"{num_lines:,}, batch {batch['status']}", batch["status"] == "completed"),
        Finding("lines without an answer", "0", f"{num_lost:,}", num_lost == 0),
        Finding("lines with two answers", "0", f"{num_twice:,}", num_twice == 0),
        Finding("lines with a wrong answer, or in the wrong file", "0", f"{num_wrong:,}", num_wrong == 0),
        Finding(
            "request_counts",
            "those of the two files",
            f"{counts['completed']:,} completed, {counts['failed']:,} failed of {counts['total']:,}",
            fits,
        ),
    ]
