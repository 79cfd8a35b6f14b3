"""Measure what a server keeps of its speed while another process uses a core.

    python -m benchmarks.busy_neighbour [--model PATH] [--server "vllm=vllm serve {model} --port {port}"]

Each load is measured alone and beside busy processes that are bound to no core, in turn. A fair share of C cores beside
N busy processes is (C - N) / C of the speed alone. The last column says how much of a core the busy processes had. By
default the model is a Llama of 88 million random weights. Each `--server` is measured in the same way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.against_peers import ask, started
from benchmarks.medians import median_of
from benchmarks.progress import Progress, tell
from benchmarks.random_llama import SHAPE, make_random_llama
from loadtest.analysis.summary import Summary
from loadtest.reporting.formatting import as_number
from tests.support.server_process import serving

WORKLOAD = "random:input=uniform:16-64,output=64"
# 88 million weights
SMALLER = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "tie_word_embeddings": False,
}
SETTLE_S = 0.5  # until the kernel has moved the threads


@contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """Run processes that always compute. Yield their process ids."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(SETTLE_S if count else 0)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="model that servekit serves")
    parser.add_argument("--serve", default="", help="further flags of servekit serve, separated by spaces")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND", help="another server")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--neighbours", type=int, default=1, help="busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--min-requests", type=int, default=6)
    arguments = parser.parse_args()
    num_cores = os.cpu_count() or 1
    fair = (num_cores - arguments.neighbours) / num_cores
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        model = arguments.model or str(make_random_llama(folder, SHAPE | SMALLER))
        flags = ("--model", model, "--log-level", "warning", *arguments.serve.split())
        urls = {"servekit": stack.enter_context(serving(*flags, log=folder / "log")).url}
        for number, (name, command) in enumerate(each.split("=", 1) for each in arguments.server):
            urls[name] = stack.enter_context(started(command.replace("{model}", model), folder / f"log-{number}"))
        print(f"{num_cores} cores, {arguments.neighbours} busy, median of {arguments.rounds} rounds\n")
        print("| server | clients | alone, tokens/s | beside, tokens/s | share | of the fair share | busy: cores |")
        print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
        with Progress("rounds", 2 * arguments.rounds * len(arguments.clients) * len(urls)) as progress:
            for num_clients in arguments.clients:
                num_requests = max(arguments.min_requests, arguments.requests_per_client * num_clients)
                for name, url in urls.items():
                    found: dict[int, list[Summary]] = {0: [], arguments.neighbours: []}
                    had: list[float] = []
                    for of_round in range(arguments.rounds):
                        for count, summaries in found.items():
                            progress.begin(f"{name}, {num_clients} clients, {count} busy")
                            with busy_processes(count) as pids:
                                began_s, before = time.monotonic(), sum(map(processor_seconds, pids))
                                summaries.append(ask(url, WORKLOAD, num_clients, of_round, num_requests, 4.0))
                                used = sum(map(processor_seconds, pids)) - before
                                had += [used / (time.monotonic() - began_s)] * bool(count)
                    alone, beside = (
                        median_of(summaries, lambda each: each.output_tokens_per_s) for summaries in found.values()
                    )
                    share = beside / alone if alone and beside else 0.0
                    cells = [name, str(num_clients), as_number(alone), as_number(beside), f"{share:.2f}"]
                    cells += [f"{share / fair:.2f}", f"{statistics.median(had):.2f}"]
                    tell(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
