"""Measure how long KV blocks take from one process to another, by each way that they can go.

    python -m benchmarks.kv_transfer [--rounds 9] [--mib 64] [--write]

- shared memory: the reader copies them out of memory that both have mapped, as the workers of one machine do;
- TCP: the agent of one worker sends them to that of another one, over the loopback interface;
- NIXL: one agent reads them from the other one's memory. UCX chooses the transport, on one machine copies by the
  kernel;
- NIXL over TCP: the same, with TCP over loopback as UCX's only transport, as between two machines without RDMA.

Each way has a pair of processes, and the ways take turns. With the last three, blocks end in memory that an agent
shares with its worker, which then loads them from there by the first way. This is not measured again. `--write` writes
the table into docs/disaggregated_prefill.md.

"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import queue
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.progress import Progress, tell
from scripts.tables import with_table
from servekit.joining.block_receiver import BlockReceiver
from servekit.joining.block_sender import BlockSender
from servekit.joining.nixl_transfer import NixlReaders, NixlSource
from servekit.protocol.block_ring import BlockRing, open_memory
from servekit.protocol.messages import BlocksFetched, FetchBlocks

MAKER = "python -m benchmarks.kv_transfer"
PAGE = Path(__file__).parents[1] / "docs" / "disaggregated_prefill.md"
BLOCK_BYTES = 2 * 2**20  # of 16 tokens of Llama-3.1-8B
LAYOUT, KEY = b"all of the same.", b"0123456789abcdef" * 2
WAYS = ("shared memory", "TCP", "NIXL", "NIXL over TCP")
ENVIRONMENT = {"NIXL over TCP": {"UCX_TLS": "tcp,self"}}
TIMEOUT_S = 60.0


def send(fd: int, with_nixl: bool) -> None:
    """Be the agent with the blocks, in a process of its own, until standard input ends."""
    source = NixlSource([fd]) if with_nixl else None
    sender = BlockSender([BlockRing.attach(fd)], KEY, ("127.0.0.1", 0), None, source)
    sys.stdout.write(f"{sender.port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    sender.close()
    if source is not None:
        source.close()


def receive(way: str, num_blocks: int) -> None:
    """Fetch blocks by this way for each line of standard input, and write how many seconds it took."""
    fds = open_memory(("source", "target"), 4 * num_blocks * BLOCK_BYTES)
    source, target = (BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True) for fd in fds)
    reader = BlockRing(fds[0], BLOCK_BYTES, LAYOUT)
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, (num_blocks, BLOCK_BYTES), np.uint8)
    sending = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kv_transfer", "--send", str(fds[0]), "--way", way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=fds[:1],
    )
    assert sending.stdout is not None
    address = f"tcp://127.0.0.1:{int(sending.stdout.readline())}"
    answers: queue.Queue[BlocksFetched] = queue.Queue()
    readers = NixlReaders() if "NIXL" in way else None
    receiver = BlockReceiver([target], KEY, None, answers.put, None, readers)
    for _ in sys.stdin:
        keys = tuple(secrets.token_bytes(16) for _ in range(num_blocks))
        for first in range(0, num_blocks, source.max_append):
            some = keys[first : first + source.max_append]
            source.rows[source.next_rows(len(some))] = content[first : first + len(some)]
            source.append(list(some))
            source.refresh()
        began_s = time.perf_counter()
        if way == "shared memory":
            reader.refresh()
            for first in range(0, num_blocks, 2):
                _, is_right = reader.read(list(keys[first : first + 2]))
                assert is_right.all()
        else:
            receiver.fetch(FetchBlocks(0, (address,), keys))
            assert answers.get(timeout=TIMEOUT_S).keys == keys
        sys.stdout.write(f"{time.perf_counter() - began_s}\n")
        sys.stdout.flush()
    receiver.close()
    if readers is not None:
        readers.close()
    sending.communicate()


def measure(num_rounds: int, num_blocks: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, after one round that connects."""
    processes = {
        way: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kv_transfer", "--way", way, "--blocks", str(num_blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **ENVIRONMENT.get(way, {})},
        )
        for way in WAYS
    }
    times_s: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        with Progress("transfers", (1 + num_rounds) * len(WAYS)) as progress:
            for number in range(-1, num_rounds):
                for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                    progress.begin(way)
                    process = processes[way]
                    assert process.stdin is not None and process.stdout is not None
                    process.stdin.write("\n")
                    taken_s = float(process.stdout.readline())
                    if number >= 0:
                        times_s[way].append(taken_s)
    finally:
        for process in processes.values():
            process.communicate()
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=64, help="of the blocks that are fetched at once")
    parser.add_argument("--write", action="store_true", help="write the table into docs/disaggregated_prefill.md")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send is not None:
        send(arguments.send, "NIXL" in arguments.way)
        return
    if arguments.way is not None:
        receive(arguments.way, arguments.blocks)
        return
    num_bytes = arguments.mib * 2**20
    times_s = measure(arguments.rounds, num_bytes // BLOCK_BYTES)
    medians_s = {way: statistics.median(times) for way, times in times_s.items()}
    lines = [
        "",
        f"{os.cpu_count()} cores ({platform.machine()}), {arguments.mib} MiB in blocks of 2 MiB, medians of "
        f"{arguments.rounds} rounds, on {datetime.datetime.now(tz=datetime.UTC).date().isoformat()}.",
        "",
        "| | time | GB/s | fastest and slowest round |",
        "|---|---:|---:|---:|",
        *(
            f"| {way} | {1e3 * median_s:.0f} ms | {num_bytes / median_s / 1e9:.2f} | "
            f"{1e3 * min(times_s[way]):.0f} to {1e3 * max(times_s[way]):.0f} ms |"
            for way, median_s in medians_s.items()
        ),
        "",
    ]
    tell("\n".join(lines))
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(), "kv_transfer", iter(lines), MAKER))


if __name__ == "__main__":
    main()
