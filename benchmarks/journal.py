"""Measure what the journal costs, and replay the journal of a live server under load, faults included.

    python -m benchmarks.journal cost [--rounds 9] [--steps 200]
    python -m benchmarks.journal live [--model sim:step=2ms,decode=50us,prefill=5us] [--requests 1000]

`cost` compares the CPU time of a step in the workload manager with and without a journal, in rounds that alternate, in
one process. Between two steps is a pause as long as a step of the demo model, in which the journal's thread writes. Its
time is part of the cost. It also measures how long a checkpoint blocks the main loop.

`live` sends requests to a server with `--journal`. Of five requests one disconnects early, one has no length bound and
one asks for three answers, so that the small KV pool runs short and sequences are preempted. The worker is killed
twice. Then every journal file is replayed.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx2
from msgspec.structs import replace

from benchmarks.manager import BLOCK_SIZE, PROMPT_LENGTH, make_manager, step
from benchmarks.progress import progress, tell
from servekit.observability.journal import Journal, ReplayResult, replay_journal
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.checkpoint import save_manager
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.workload_manager import WorkloadManager
from tests.support.server_process import ServerProcess, serving

# What a step of the demo model takes on 2 cores, by running sequences (benchmarks/settings.py).
DEMO_STEPS_S = {1: 2.5e-3, 8: 5.2e-3, 32: 11e-3, 128: 27e-3}

# -- cost --------------------------------------------------------------------------------------------------------------


def decode_us(manager: WorkloadManager, num_sequences: int, num_steps: int, journal: Journal | None = None) -> float:
    """CPU time of a step that decodes `num_sequences`, in microseconds: the mean, until the journal is written."""
    sampling = SamplingParams(max_tokens=num_steps + 2, ignore_eos=True)
    for sequence_id in range(num_sequences):
        prompt = (sequence_id,) * (PROMPT_LENGTH - sequence_id % BLOCK_SIZE)
        manager.apply(AddSequence(sequence_id=sequence_id, prompt_token_ids=prompt, sampling=sampling))
    step(manager)
    # Of both threads, because they share the interpreter; and not of other processes on this machine.
    began_s = time.process_time()
    for _ in range(num_steps):
        step(manager)
        time.sleep(DEMO_STEPS_S[num_sequences])  # while the worker computes; the journal's thread writes meanwhile
    if journal is not None:
        journal.close()
        assert journal.num_bytes > 0
    return (time.process_time() - began_s) / num_steps * 1e6


def open_journal(folder: Path) -> Journal:
    journal = Journal(folder / "journal", 2**40, 1)
    journal.open()
    return journal


def measure_cost(num_rounds: int, num_steps: int, folder: Path) -> None:
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; medians of {num_rounds}\n"
    )
    print("| running sequences | manager, µs a step | with a journal, µs | added, µs | of a demo step | bytes a step |")
    print("|---:|---:|---:|---:|---:|---:|")
    for num_sequences in progress(DEMO_STEPS_S, "sizes", lambda number: f"{number:,} sequences"):
        plain_us, added_us, num_bytes = [], [], 0
        for _ in range(num_rounds):
            plain = make_manager(num_sequences, PROMPT_LENGTH + num_steps + 2, num_sequences * PROMPT_LENGTH, True)
            plain_us.append(decode_us(plain, num_sequences, num_steps))
            journal = open_journal(folder)
            recorded_us = decode_us(journal.make_manager(plain.config), num_sequences, num_steps, journal)
            added_us.append(recorded_us - plain_us[-1])
            num_bytes = journal.num_bytes
        plain_median, added = statistics.median(plain_us), statistics.median(added_us)
        step_us = DEMO_STEPS_S[num_sequences] * 1e6
        tell(
            f"| {num_sequences} | {plain_median:.0f} | {plain_median + added:.0f} | {added:.0f} | "
            f"{added / step_us:.2%} | {num_bytes / num_steps:.0f} |"
        )
    print("\n| running | waiting | cached blocks | checkpoint blocks the main loop, ms |")
    print("|---:|---:|---:|---:|")
    for num_running, num_waiting, num_blocks in ((32, 0, 4_096), (256, 0, 16_384), (256, 4_096, 131_072)):
        manager = make_loaded_manager(num_running, num_waiting, num_blocks)
        times_ms = []
        for _ in range(num_rounds):
            began_s = time.perf_counter()
            save_manager(manager)
            times_ms.append((time.perf_counter() - began_s) * 1e3)
        num_cached = manager.kv_cache.pool.num_cached
        print(f"| {num_running} | {num_waiting:,} | {num_cached:,} | {statistics.median(times_ms):.1f} |")


def make_loaded_manager(num_running: int, num_waiting: int, num_blocks: int) -> WorkloadManager:
    """A manager whose pool is full of cached prefixes, with so many sequences that run and that wait."""
    config = make_manager(num_running, 1, 2**16, True).config
    manager = WorkloadManager(replace(config, num_blocks=num_blocks))
    num_prompt_tokens = 256 * BLOCK_SIZE
    for sequence_id in range(num_blocks // 256 + 1):
        prompt = (sequence_id,) * num_prompt_tokens
        manager.apply(
            AddSequence(sequence_id=sequence_id, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))
        )
        while manager.has_work:
            step(manager)
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    for sequence_id in range(num_blocks, num_blocks + num_running + num_waiting):
        manager.apply(AddSequence(sequence_id=sequence_id, prompt_token_ids=(1,) * 64, sampling=sampling))
    step(manager)
    assert manager.num_running == num_running
    return manager


# -- a live server -----------------------------------------------------------------------------------------------------


class LiveRun(NamedTuple):
    """What a live run did, and what its replay found."""

    num_answered: int
    num_aborted: int
    num_failed: int
    num_preemptions: int
    num_restarts: int
    num_bytes: int
    results: list[ReplayResult]  # of each file, the oldest first


def run_live(
    model: str, num_requests: int, folder: Path, num_kills: int = 2, num_threads: int = 32, *flags: str
) -> LiveRun:
    """Serve requests with faults, and replay the journal."""
    path = folder / "journal"
    arguments = ["--model", model, "--max-model-len", "256", "--num-kv-blocks", "64", "--max-num-seqs", "32"]
    with serving(*arguments, "--journal", str(path), *flags, log=folder / "log") as server:
        with ThreadPoolExecutor(num_threads) as threads:
            requests = threads.map(lambda number: send(server, number), range(num_requests))
            killer = threading.Thread(target=kill_workers, args=(server, num_requests, num_kills))
            killer.start()
            outcomes = list(requests)
            killer.join()
        server.wait_until_at_rest()
        num_preemptions = int(server.metric("servekit_num_preemptions_total"))
        num_restarts = int(server.metric("servekit_worker_restarts_total"))
        num_bytes = int(server.metric("servekit_journal_bytes_total"))
        assert server.metric("servekit_journal_recording") == 1
        server.process.send_signal(signal.SIGTERM)
        server.process.wait()
    paths = sorted(folder.glob("journal*"), key=lambda each: each.stat().st_mtime)
    counts = (outcomes.count("answered"), outcomes.count("aborted"), outcomes.count("failed"))
    return LiveRun(*counts, num_preemptions, num_restarts, num_bytes, [replay_journal(each) for each in paths])


def send(server: ServerProcess, number: int) -> str:
    """Send one request; of five, one is aborted, one is unbounded and one asks for several answers."""
    rng = random.Random(number)
    body: dict[str, object] = {
        "prompt": f"{rng.random()} " * rng.randint(1, 3) if number % 7 else "The same beginning for many of them. " * 2,
        "ignore_eos": True,
        "max_tokens": rng.randint(1, 60),
        "deadline_ms": 600_000 if number % 11 else 300,
    }
    kind = number % 5
    if kind == 1:
        del body["max_tokens"]  # up to the context's end
    if kind == 2:
        body["n"] = 3
    try:
        if kind == 0:
            with server.client.stream("POST", "/generate_stream", json=body) as response:
                for _ in zip(range(3), response.iter_lines(), strict=False):
                    pass
            return "aborted"
        return "answered" if server.client.post("/generate", json=body).status_code == 200 else "failed"
    except httpx2.HTTPError:
        return "failed"


def kill_workers(server: ServerProcess, num_requests: int, num_kills: int) -> None:
    """Kill the worker at even intervals of the requests that have ended."""
    for number in range(1, num_kills + 1):
        wanted = num_requests * number / (num_kills + 1)
        while server.metric("servekit_request_success_total") < wanted:
            time.sleep(0.02)
        for pid in server.worker_pids():
            os.kill(pid, signal.SIGKILL)
        server.wait_for_metric("servekit_worker_restarts_total", number)


def measure_live(model: str, num_requests: int, folder: Path) -> int:
    run = run_live(model, num_requests, folder)
    print(f"{num_requests:,} requests to {model}: {run.num_answered:,} answered, {run.num_aborted:,} aborted, ", end="")
    print(f"{run.num_failed:,} failed; {run.num_preemptions:,} preemptions, {run.num_restarts} workers killed")
    num_steps = sum(result.num_steps for result in run.results)
    num_sequences = sum(result.num_sequences for result in run.results)
    differences = [result.difference for result in run.results if result.difference is not None]
    print(f"journal: {run.num_bytes:,} bytes, {num_steps:,} steps, {num_sequences:,} sequences: ", end="")
    print(f"{run.num_bytes / (num_steps + num_sequences):.0f} bytes each")
    print(f"replay: {differences[0] if differences else 'every decision is the same'}")
    return 1 if differences else 0


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
    with tempfile.TemporaryDirectory() as folder:
        if arguments.command == "live":
            return measure_live(arguments.model, arguments.requests, Path(folder))
        measure_cost(arguments.rounds, arguments.steps, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
