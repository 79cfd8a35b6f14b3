"""Explain every request of a live server under load, faults included, and measure what the explanations cost.

    python -m benchmarks.explain live [--model sim:step=2ms,decode=50us,prefill=5us] [--requests 1000]
    python -m benchmarks.explain cost [--rounds 9] [--steps 200]

`live` sends requests to a server with a small KV pool, so that sequences are preempted, and kills its worker twice. Of
five requests one disconnects early, one has no length bound, one asks for three answers, and one is streamed to a
client that pauses before it reads. Then each request is explained. Its causes must sum to its wall time, as the server
reports it, within a millisecond; and that to the duration in the server's log, which another layer measures.

`cost` compares the CPU time of a step in the workload manager with and without the record of why sequences waited, in
rounds that alternate, in one process; then that of a write of a stream. It exits with 1 if that is 1 % of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from benchmarks.journal import DEMO_STEPS_S, decode_us, kill_workers
from benchmarks.manager import PROMPT_LENGTH, make_manager
from benchmarks.progress import progress, tell
from servekit.requests.time_causes import RequestTimes
from servekit.scheduler.step import Step
from servekit.scheduler.workload_manager import WorkloadManager
from tests.support.server_process import ServerProcess, serving

TOLERANCE_S = 1e-3
PAUSE_S = 1.0  # of a client that does not read, once it has a token
SEGMENT_BYTES = 536  # by default those of the loopback interface are so large that the kernel buffers megabytes
NUM_WRITES = 100_000
MAX_SHARE = 0.01  # of a step: the aim

# -- a live server -----------------------------------------------------------------------------------------------------


class Explained(NamedTuple):
    """What came of the requests of a live run."""

    outcomes: Counter[str]
    num_preemptions: int
    num_restarts: int
    num_explained: int
    worst_sum_s: float  # how far the causes of a request are off its wall time
    log_errors_s: list[float]  # how far wall times are off the durations in the log, sorted
    causes_s: Counter[str]  # over all requests
    gaps: int  # intervals that do not begin where the one before them ended


def run_live(model: str, num_requests: int, folder: Path, num_kills: int = 2, num_threads: int = 32) -> Explained:
    """Serve requests with faults, and explain each of them. There may be 1,000 of them."""
    arguments = ["--model", model, "--max-model-len", "256", "--num-kv-blocks", "64", "--max-num-seqs", "16"]
    log = folder / "log"
    with serving(*arguments, "--log-format", "json", log=log) as server:
        with ThreadPoolExecutor(num_threads) as threads:
            requests = threads.map(lambda number: send(server, number), range(num_requests))
            killer = threading.Thread(target=kill_workers, args=(server, num_requests, num_kills))
            killer.start()
            outcomes = Counter(requests)
            killer.join()
        server.wait_until_at_rest()
        num_preemptions = int(server.metric("servekit_num_preemptions_total"))
        num_restarts = int(server.metric("servekit_worker_restarts_total"))
        found = [server.client.get(f"/v1/requests/{number}/explain") for number in range(num_requests)]
    explanations = [each.json() for each in found if each.status_code == 200]
    durations_s = logged_durations_s(log)
    causes_s: Counter[str] = Counter()
    for each in explanations:
        causes_s.update(each["causes"])
    return Explained(
        outcomes,
        num_preemptions,
        num_restarts,
        len(explanations),
        max(abs(sum(each["causes"].values()) - each["wall_time_s"]) for each in explanations),
        sorted(abs(each["wall_time_s"] - durations_s[each["request_id"]]) for each in explanations),
        causes_s,
        sum(map(num_gaps, explanations)),
    )


def num_gaps(explanation: dict[str, Any]) -> int:
    """How many intervals do not begin where the one before them ended; the first begins at 0, the last is the end."""
    ends = [0.0, *(each["end_s"] for each in explanation["intervals"])]
    starts = [*(each["start_s"] for each in explanation["intervals"]), explanation["wall_time_s"]]
    return sum(abs(one - other) > 1e-9 for one, other in zip(ends, starts, strict=True))


def logged_durations_s(log: Path) -> dict[str, float]:
    """By request id, how long each request took, as the log has it."""
    entries = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return {entry["request_id"]: entry["duration_ms"] / 1e3 for entry in entries if "duration_ms" in entry}


def send(server: ServerProcess, number: int) -> str:
    """Send one request, with its number as its id."""
    rng = random.Random(number)
    body: dict[str, object] = {
        "prompt": f"{rng.random()} " * rng.randint(1, 3) if number % 7 else "The same beginning for many of them. " * 2,
        "ignore_eos": True,
        "max_tokens": rng.randint(1, 60),
    }
    headers = {"X-Request-Id": str(number)}
    kind = number % 5
    if kind == 1:
        del body["max_tokens"]  # up to the context's end
    if kind == 2:
        body["n"] = 3
    try:
        if kind == 0:
            with server.client.stream("POST", "/generate_stream", json=body, headers=headers) as response:
                for _ in zip(range(3), response.iter_lines(), strict=False):
                    pass
            return "aborted"
        if kind == 3:
            return read_slowly(server.port, {**body, "prompt": "x", "max_tokens": 250, "logprobs": 20}, number)
        response = server.client.post("/generate", json=body, headers=headers)
        return "answered" if response.status_code == 200 else "failed"
    except (httpx2.HTTPError, OSError):
        return "failed"


def read_slowly(port: int, body: dict[str, object], number: int) -> str:
    """Begin to read a stream, pause, and read the rest. With small segments and buffers, writes soon block."""
    payload = json.dumps(body).encode()
    head = f"POST /generate_stream HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {number}\r\nConnection: close\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        connection.settimeout(120)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        first = connection.recv(2**12)
        while b"data:" not in first and (more := connection.recv(2**12)):
            first += more
        time.sleep(PAUSE_S)
        while connection.recv(2**16):
            pass
    return "read slowly" if b" 200 " in first else "failed"


def measure_live(model: str, num_requests: int, folder: Path) -> int:
    run = run_live(model, num_requests, folder)
    outcomes = ", ".join(f"{number:,} {outcome}" for outcome, number in run.outcomes.items())
    print(f"{num_requests:,} requests to {model}: {outcomes}; ", end="")
    print(f"{run.num_preemptions:,} preemptions, {run.num_restarts} workers killed")
    print(f"explained: {run.num_explained:,}; gaps between intervals: {run.gaps}")
    print(f"causes against wall time: at most {run.worst_sum_s * 1e3:.6f} ms off")
    errors = run.log_errors_s
    print(
        f"wall time against the log: {errors[len(errors) // 2] * 1e3:.3f} ms off at the median, "
        f"{errors[-len(errors) // 100] * 1e3:.3f} ms at p99, {errors[-1] * 1e3:.3f} ms at most\n"
    )
    total_s = sum(run.causes_s.values())
    for cause, seconds in run.causes_s.most_common():
        print(f"  {cause:<20}{seconds:10.2f} s {seconds / total_s:7.1%}")
    is_right = run.num_explained == num_requests and not run.gaps and run.worst_sum_s <= TOLERANCE_S
    return 0 if is_right else 1


# -- cost --------------------------------------------------------------------------------------------------------------


class UnexplainedManager(WorkloadManager):
    """A workload manager that does not record why sequences wait, and what steps did for them."""

    def _record(self, step: Step, began_s: float) -> None:
        pass

    def _note_queue(self, step: Step, prefill_rule: str) -> None:
        pass


def write_us() -> float:
    """CPU time of timing one write of a stream, in microseconds."""
    times = RequestTimes(time.monotonic, time.monotonic())
    began_s = time.process_time()
    for _ in range(NUM_WRITES):
        times.written(times.clock())
    return (time.process_time() - began_s) / NUM_WRITES * 1e6


def measure_cost(num_rounds: int, num_steps: int) -> int:
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; medians of {num_rounds}\n"
    )
    written_us = statistics.median(write_us() for _ in range(num_rounds))
    largest_share = 0.0
    print("| running sequences | manager without, µs a step | added, µs | writes of streams, µs | of a demo step |")
    print("|---:|---:|---:|---:|---:|")
    for num_sequences in progress(DEMO_STEPS_S, "sizes", lambda number: f"{number:,} sequences"):
        plain_us, added_us = [], []
        for _ in range(num_rounds):
            config = make_manager(
                num_sequences, PROMPT_LENGTH + num_steps + 2, num_sequences * PROMPT_LENGTH, True
            ).config
            plain_us.append(decode_us(UnexplainedManager(config), num_sequences, num_steps))
            added_us.append(decode_us(WorkloadManager(config), num_sequences, num_steps) - plain_us[-1])
        added, of_writes = statistics.median(added_us), num_sequences * written_us
        step_us = DEMO_STEPS_S[num_sequences] * 1e6
        largest_share = max(largest_share, (max(added, 0.0) + of_writes) / step_us)
        tell(
            f"| {num_sequences} | {statistics.median(plain_us):.0f} | {added:.1f} | {of_writes:.1f} | "
            f"{(max(added, 0.0) + of_writes) / step_us:.2%} |"
        )
    return 0 if largest_share < MAX_SHARE else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    cost = commands.add_parser("cost")
    cost.add_argument("--rounds", type=int, default=9)
    cost.add_argument("--steps", type=int, default=200)
    live = commands.add_parser("live")
    live.add_argument("--model", default="sim:step=2ms,decode=50us,prefill=5us")
    live.add_argument("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.command == "cost":
        return measure_cost(arguments.rounds, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        return measure_live(arguments.model, arguments.requests, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
