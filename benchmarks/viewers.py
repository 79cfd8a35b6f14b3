"""Measure the cost of the live view: the server's CPU time per token with 0, 1, 4 and 16 viewers of /ui/events.

    python -m benchmarks.viewers [--viewers 0 1 4 16] [--streams 128] [--seconds 5] [--rounds 5]

A server with the simulated model, whose device takes no time, streams to clients that send the next request as soon
as the last one is answered, so the server's main thread is always busy. The rounds alternate between the numbers of
viewers. In each round, tokens come from /metrics and the thread's CPU time from /proc. The table has medians, and the
ratio to the first of `--viewers` (0 by default) within the same round. Clients and viewers are separate processes. On
few cores they take time from the server, which lowers tokens/s, and hardly changes the CPU time per token, except
through the caches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import selectors
import statistics
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from urllib.request import urlopen

from benchmarks.open_streams import open_stream
from tests.support.server_process import ServerProcess, serving

NUM_VIEWERS = [0, 1, 4, 16]
SETTLE_S = 0.5


def main_thread_s(server: ServerProcess) -> float:
    """Return the CPU time of the event loop's thread, in seconds."""
    pid = server.process.pid
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def request_forever(server: ServerProcess, num_streams: int) -> None:
    """Run clients until the process is ended."""
    with selectors.DefaultSelector() as selector:
        for number in range(num_streams):
            selector.register(open_stream(server, number), selectors.EVENT_READ)
        number = num_streams
        while True:
            for key, _ in selector.select(60):
                content = key.fileobj.recv(2**16)  # type: ignore[union-attr]
                if not content or content.endswith(b"0\r\n\r\n"):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                    selector.register(open_stream(server, number), selectors.EVENT_READ)
                    number += 1


def watch(url: str, num_frames: Synchronized[int]) -> None:
    """Run a viewer until the process is ended."""
    with urlopen(f"{url}/ui/events") as response:  # noqa: S310
        for line in response:
            if line.startswith(b"data: "):
                num_frames.value += 1


def measure(server: ServerProcess, num_viewers: int, seconds: float) -> tuple[float, float, float]:
    """Return (tokens/s, µs of the main thread per token, frames/s of a viewer)."""
    with ExitStack() as stack:
        counts = [multiprocessing.Value("l", 0) for _ in range(num_viewers)]
        for count in counts:
            viewer = multiprocessing.Process(target=watch, args=(server.url, count), daemon=True)
            viewer.start()
            stack.callback(viewer.join)
            stack.callback(viewer.terminate)
        time.sleep(SETTLE_S)
        before = server.metric("servekit_generation_tokens_total"), main_thread_s(server), sum(c.value for c in counts)
        began_s = time.monotonic()
        time.sleep(seconds)
        after = server.metric("servekit_generation_tokens_total"), main_thread_s(server), sum(c.value for c in counts)
        elapsed_s = time.monotonic() - began_s
    num_tokens, cpu_s, num_frames = (end - begin for begin, end in zip(before, after, strict=True))
    return num_tokens / elapsed_s, 1e6 * cpu_s / num_tokens, num_frames / elapsed_s / max(1, num_viewers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--viewers",
        type=int,
        nargs="+",
        default=NUM_VIEWERS,
        help="numbers of viewers; the others are compared with the first one",
    )
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    figures: dict[int, list[tuple[float, float, float]]] = {num: [] for num in arguments.viewers}
    flags = ("--model", "sim:instant", "--max-num-seqs", str(arguments.streams), "--log-level", "warning")
    with tempfile.TemporaryDirectory() as folder, serving(*flags, log=Path(folder) / "log") as server:
        clients = multiprocessing.Process(target=request_forever, args=(server, arguments.streams), daemon=True)
        clients.start()
        time.sleep(2 * SETTLE_S)
        for number in range(arguments.rounds):
            # The order is reversed in every other round, so that a drift within a round affects all alike.
            for num_viewers in figures if number % 2 == 0 else reversed(figures):
                figures[num_viewers].append(measure(server, num_viewers, arguments.seconds))
        clients.terminate()
        clients.join()
    print(f"{os.cpu_count()} cores, {arguments.streams} streams, medians of {arguments.rounds} rounds\n")
    print(f"| viewers | tokens/s | main thread, µs a token | that, to {arguments.viewers[0]}'s | frames/s of each |")
    print("|---:|---:|---:|---:|---:|")
    for num_viewers, rounds in figures.items():
        rate, cost_us, frames = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [mine[1] / base[1] for mine, base in zip(rounds, figures[arguments.viewers[0]], strict=True)]
        shown = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"| {num_viewers} | {rate:,.0f} | {cost_us:.1f} | {shown} | {frames:.1f} |")


if __name__ == "__main__":
    main()
