"""Run 102,000 queries in flight at once on one machine, and check each of them token by token.

    python -m benchmarks.parallel_queries [batched streams many_servers demo] [--share 0.1]

- *batched*: 102,000 prompts in lists of 250 to `POST /generate` of one server process.
- *streams*: 16,000 streams of one server process, open at the same time. The limit is 20,000 open files per process.
- *many_servers*: 102,000 streams of seven server processes that share a port (`--reuse-port`).
- *demo*: 2,000 streams of the demo model; each answer is compared with one from an idle server.

The first three use the simulated model, whose answers the client can compute. Steps are so slow that no answer is
complete before the last query has arrived. Two sources show that all were in flight together: the metrics of the
server, if there is one server only, and the client's records, in which the last of all first tokens precedes the
first of all ends. The server's counts of requests and tokens must be those of the client. The client is `loadtest`,
in as many processes as its open files need.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
from msgspec import Struct

from benchmarks.open_streams import resident_bytes
from benchmarks.progress import progress
from loadtest.experiment import Experiment, Trial, run
from loadtest.record import Outcome
from loadtest.reporting.formatting import as_time
from loadtest.target import ApiFormat, Target
from tests.support.server_process import ServerProcess, free_port, num_listening, serving
from tests.torture.streams import Connections, End, Reply, RequestSpec, ask

ALL = 102_000
OF_ONE_PROCESS = 16_000
SOURCES = tuple(f"127.0.0.{number}" for number in range(2, 10))  # 28,000 ports each
LOOK_S = 0.5


class Watch:
    """Samples some servers regularly, and keeps the maxima."""

    def __init__(self, servers: list[ServerProcess], port: int) -> None:
        self._pids = [server.process.pid for server in servers]
        self._worker_pids = [pid for server in servers for pid in server.worker_pids()]
        self._port = port
        self._ends = threading.Event()
        self.at_rest = self._resident()
        self.max_bytes = self.at_rest  # of all servers, and of all workers
        self.max_in_flight = 0.0  # only measured for one server

    def _resident(self) -> tuple[int, int]:
        return sum(map(resident_bytes, self._pids)), sum(map(resident_bytes, self._worker_pids))

    def look(self) -> None:
        while not self._ends.wait(LOOK_S):
            servers, workers = self._resident()
            self.max_bytes = max(self.max_bytes[0], servers), max(self.max_bytes[1], workers)
            if len(self._pids) == 1:
                with suppress(httpx2.TransportError):
                    values = metrics(self._port)
                    running, waiting = (values[f"servekit_num_requests_{state}"] for state in ("running", "waiting"))
                    self.max_in_flight = max(self.max_in_flight, running + waiting)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self.look)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join()

    def num_ended(self) -> tuple[int, int]:
        """Return the finished sequences and the generated tokens of all servers.

        The kernel chooses the server that answers on a shared port, so requests repeat until all have answered.
        """
        of_each: dict[str, tuple[int, int]] = {}
        deadline = time.monotonic() + 60
        while len(of_each) < len(self._pids):
            assert time.monotonic() < deadline, f"only {[*of_each]} answered"
            answer = httpx2.get(f"http://127.0.0.1:{self._port}/metrics", timeout=30).text
            (name,) = set(re.findall(r'model_name="([^"]*)"', answer))
            values = sums(answer)
            ended, tokens = (values[f"servekit_{what}_total"] for what in ("request_success", "generation_tokens"))
            of_each[name] = round(ended), round(tokens)
        ended, tokens = (sum(numbers) for numbers in zip(*of_each.values(), strict=True))
        return ended, tokens


def metrics(port: int) -> Counter[str]:
    return sums(httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text)


def sums(exposition: str) -> Counter[str]:
    """Return the sum over the labels for each metric."""
    values = Counter[str]()
    for line in exposition.splitlines():
        if not line.startswith("#"):
            values[re.split(r"[{ ]", line, maxsplit=1)[0]] += float(line.rpartition(" ")[2])  # type: ignore[assignment]
    return values


class Case(Struct, frozen=True, kw_only=True):
    """A number of queries, and how they are sent."""

    name: str
    num_queries: int
    num_servers: int
    max_num_seqs: int
    step: str
    num_tokens: int
    rate: float  # arrivals per second
    target: Target
    num_processes: int


def serve(case: Case, folder: Path, stack: ExitStack) -> tuple[list[ServerProcess], int]:
    """Start the servers of a case on one port, and wait until all are ready."""
    port = free_port()
    num_each = -(-case.num_queries // case.num_servers) * (1 if case.num_servers == 1 else 1.1)
    arguments = {
        "model": f"sim:step={case.step}",
        "max-num-seqs": case.max_num_seqs,
        "max-num-batched-tokens": 65536,
        "num-kv-blocks": 6 * case.max_num_seqs,
        "max-num-queued-reqs": case.num_queries,
        "max-num-queued-tokens": 2**30,
        "max-predicted-wait": 0,
        "max-connections": round(num_each) + 500,
        "log-level": "warning",
        "step-timeout": 120,
    }
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    flags.append("--reuse-port")
    servers = [
        stack.enter_context(
            serving(*flags, "--served-model-name", f"server-{number}", log=folder / f"log-{number}", port=port)
        )
        for number in progress(
            range(case.num_servers), f"{case.name}: servers", lambda number: f"number {number + 1} starts"
        )
    ]
    while num_listening(port) < case.num_servers:  # /ready was answered by one of them only
        time.sleep(0.1)
    return servers, port


def play(case: Case) -> bool:
    """Run a case and print its figures; return whether all demands are met."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers, port = serve(case, Path(folder), stack)
        watch = Watch(servers, port)
        target = case.target
        target.urls[:] = [f"http://127.0.0.1:{port}"]
        experiment = Experiment(
            target=target,
            arrivals=f"constant:{case.rate:g}",
            workload=f"queries:output={case.num_tokens}",
            num_requests=case.num_queries,
            characters_per_token=1.0,
            num_processes=case.num_processes,
            sources=SOURCES,
            num_warm_up=0,
        )
        started_s = time.monotonic()
        with watch.running():
            trial = run(experiment, case.name, sys.stderr)
        wall_s = time.monotonic() - started_s
        return tell(case, trial, watch, wall_s)


def tell(case: Case, trial: Trial, watch: Watch, wall_s: float) -> bool:
    """Print the figures. Return whether all answers are right, none is double, and all were in flight together."""
    outcomes = Counter(record.outcome for record in trial.result.records)
    full = trial.summary.full
    num_tokens = sum(record.num_output_tokens for record in trial.result.records)
    indices = Counter(record.index for record in trial.result.records)
    num_lost = trial.result.num_missing + case.num_queries - len(indices)
    num_twice = sum(indices.values()) - len(indices)
    counted = watch.num_ended()
    print(f"{case.name}: {case.num_queries:,} queries of {case.num_tokens} tokens, {case.num_servers} server processes")
    print(f"  outcomes: {', '.join(f'{name} {count:,}' for name, count in outcomes.items())}")
    print(f"  lost {num_lost}, twice {num_twice}; {num_tokens:,} tokens, every answer compared with the expected one")
    print(f"  the servers count {counted[0]:,} answers and {counted[1]:,} tokens")
    print(f"  in flight at once: {full.in_flight_max:,} by the client", end="")
    print(f", {watch.max_in_flight:,.0f} by the server" if watch.max_in_flight else "")
    for name, times in (("first token", full.ttft_s), ("whole answer", full.e2e_s)):
        if times is not None:
            print(f"  {name} {as_time(times.p50)} (p50), {as_time(times.p99)} (p99)")
    print(f"  {wall_s:.0f} s in all")
    of_server, of_worker = (
        (peak - at_rest) / case.num_queries for at_rest, peak in zip(watch.at_rest, watch.max_bytes, strict=True)
    )
    print(
        f"  memory for each: {of_server / 1000:.1f} kB of the server, {of_worker / 1000:.1f} kB of the worker; ", end=""
    )
    print(f"{num_tokens / wall_s:,.0f} tokens/s")
    for note in [*trial.result.errors, *trial.summary.invalid_because]:
        print(f"  {note}")
    for failure in trial.summary.failures[:5]:
        print(f"  {failure}")
    is_good = outcomes == {Outcome.OK: case.num_queries} and not num_lost and not num_twice
    is_good = is_good and counted == (case.num_queries, num_tokens)
    if case.num_servers == 1 and watch.max_in_flight != case.num_queries:
        print("  the server never had all of them in flight")
        return False
    if case.target.api is ApiFormat.GENERATE_STREAM and not were_open_together(trial):
        return False
    return is_good and full.in_flight_max == case.num_queries


def were_open_together(trial: Trial) -> bool:
    """Return whether every stream had its first token before the first stream ended."""
    records = trial.result.records
    last_first_s = max(record.first_token_s or float("inf") for record in records)
    first_end_s = min(record.ended_s for record in records)
    print(f"  the last first token came after {last_first_s:.1f} s, the first end after {first_end_s:.1f} s")
    return last_first_s < first_end_s


def target(api: ApiFormat, batch_size: int = 1) -> Target:
    return Target(urls=[""], api=api, batch_size=batch_size, timeout_s=1800, verifies=True)


def cases(share: float) -> dict[str, Case]:
    num_all, num_one = round(ALL * share), round(OF_ONE_PROCESS * share)
    stream = ApiFormat.GENERATE_STREAM
    return {
        "batched": Case(
            name="batched",
            num_queries=num_all,
            num_servers=1,
            max_num_seqs=16384,
            step="300ms",
            num_tokens=64,
            rate=num_all,  # all within a second, if possible
            target=target(ApiFormat.GENERATE, 250),
            num_processes=1,
        ),
        "streams": Case(
            name="streams",
            num_queries=num_one,
            num_servers=1,
            max_num_seqs=num_one,
            step="2s",
            num_tokens=24,
            rate=700,
            target=target(stream),
            num_processes=2,
        ),
        "many_servers": Case(
            name="many_servers",
            num_queries=num_all,
            num_servers=7,
            max_num_seqs=round(16384 * share),
            step="20s",
            num_tokens=10,
            rate=800,
            target=target(stream),
            num_processes=7,
        ),
    }


# -- the demo model ----------------------------------------------------------------------------------------------------

NUM_DEMO, NUM_DEMO_PROMPTS, NUM_DEMO_TOKENS = 2000, 50, 32


def play_demo(share: float) -> bool:
    """Send each prompt alone first, then all of them 40 times at once; return whether all answers are equal."""
    number = round(NUM_DEMO * share)
    flags = ("--max-num-queued-reqs", str(number), "--max-predicted-wait", "0", "--log-level", "warning")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = stack.enter_context(serving(*flags, log=Path(folder) / "log"))
        started_s = time.monotonic()
        replies, wanted = asyncio.run(_ask_demo(server.port, number))
        wall_s = time.monotonic() - started_s
        num_right = sum(
            reply.end is End.WHOLE and reply.answers == wanted[index % NUM_DEMO_PROMPTS]
            for index, reply in enumerate(replies)
        )
        firsts = sorted(reply.token_times_s[0] - reply.started_s for reply in replies if reply.token_times_s)
        ends = sorted(reply.ended_s - reply.started_s for reply in replies)
        print(f"demo: {number:,} streams of {NUM_DEMO_TOKENS} tokens at once, {num_right:,} right; {wall_s:.0f} s")
        for name, times in (("first token", firsts), ("whole answer", ends)):
            print(f"  {name} {as_time(times[len(times) // 2])} (p50), {as_time(times[int(0.99 * len(times))])} (p99)")
        return num_right == number


async def _ask_demo(port: int, number: int) -> tuple[list[Reply], list[list[int]]]:
    fields = {"max_tokens": NUM_DEMO_TOKENS, "ignore_eos": True, "temperature": 0}
    asked = [
        RequestSpec(f"{i}", "/generate_stream", {"prompt": f"What is {i} and {i % 7}?", **fields})
        for i in range(NUM_DEMO_PROMPTS)
    ]
    connections = Connections(port)
    wanted = [(await ask(connections, each)).answers for each in progress(asked, "demo: alone", lambda each: each.name)]
    replies = await asyncio.gather(*(ask(connections, asked[i % NUM_DEMO_PROMPTS]) for i in range(number)))
    return replies, wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = [*cases(1.0), "demo"]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(known)}; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="share of the queries; 0.1 sends a tenth")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB")
    share = arguments.share
    asked = cases(share)
    are_good = [play_demo(share) if name == "demo" else play(asked[name]) for name in arguments.cases or known]
    print("all demands met" if all(are_good) else "demands NOT met")
    return 0 if all(are_good) else 1


if __name__ == "__main__":
    sys.exit(main())
