"""Compare prefill and decode apart with chunked prefill: the time between tokens while long prompts arrive.

    python -m benchmarks.disaggregated_prefill [--only virtual] [--seconds 20] [--rounds 3] [--write]

First in virtual time, with the scheduler of the server and the times that the roofline of `servekit plan` gives for
Llama-3.1-8B on H100s: chats, and documents of 16,384 tokens that are asked about. Then on this machine, with two
workers of one thread each and a model of 88 million random weights: four streams, and prompts of 1,536 tokens that come
one after the other. The servers run at the same time and get the same requests in turn.

- chunked prefill: each replica computes prompts and answers, up to 2,048 tokens a step;
- with a target: the same with `--itl-target-ms`;
- apart: `--prefill-replicas`.

In virtual time a block that is sent or loaded takes as long as its bytes at TRANSFER_BYTES_PER_S, and its step waits.
`--write` writes the tables into docs/disaggregated_prefill.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from benchmarks.decode_steps import SHAPE, make_model
from benchmarks.progress import Progress, tell
from benchmarks.random_llama import write_tokenizer
from scripts.tables import with_table
from servekit.planning.devices import find_device
from servekit.planning.model_shape import read_shape
from servekit.planning.roofline import Layout, make_roofline
from servekit.routing.router import Router
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.fleet import Conversation, Fleet, FleetSimulation, Turn, TurnRecord
from tests.support.server_process import ONE_THREAD, ServerProcess, events, serving

MAKER = "python -m benchmarks.disaggregated_prefill"
PAGE = Path(__file__).parents[1] / "docs" / "disaggregated_prefill.md"
BLOCK_SIZE = 16
TRANSFER_BYTES_PER_S = 50e9  # PCIe 5.0 x16 between a GPU and the host's memory, less its overhead
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
VIRTUAL_S, CHATS_PER_S, DOCUMENTS_PER_S = 60.0, 6.0, 0.7
DOCUMENT_TOKENS = 16_384
TARGET_MS = 20.0
LONG_TOKENS, NUM_STREAMS, PAUSE_S = 1536, 4, 1.0


class Side(Struct, kw_only=True):
    """A way to use the replicas, and what was measured of it, in seconds."""

    name: str
    num_replicas: int = 2
    num_prefill: int = 0
    itl_target_ms: float | None = None
    gaps_s: list[float] = field(default_factory=list)  # between tokens of short requests
    short_ttft_s: list[float] = field(default_factory=list)
    long_ttft_s: list[float] = field(default_factory=list)


def virtual_sides() -> list[Side]:
    return [
        Side(name="2 replicas, chunked prefill"),
        Side(name=f"2 replicas, chunked prefill, target {TARGET_MS:g} ms", itl_target_ms=TARGET_MS),
        Side(name="1 prefill, 1 decode", num_prefill=1),
        Side(name="4 replicas, chunked prefill", num_replicas=4),
        Side(name="2 prefill, 2 decode", num_replicas=4, num_prefill=2),
    ]


class PromptRouter(Router):
    """Routes prompts to prefill replicas only."""

    def __init__(self, block_size: int, num_prefill: int) -> None:
        super().__init__(block_size)
        self._num_prefill = num_prefill

    def add_replica(self, replica_id: int, manager: WorkloadManager) -> None:
        if not self._num_prefill or replica_id < self._num_prefill:
            super().add_replica(replica_id, manager)


def make_conversations(num_replicas: int) -> tuple[Conversation, ...]:
    """Return chats and questions about documents; twice as many for twice as many replicas."""
    rng = random.Random(7)
    found: list[Conversation] = []
    scale = num_replicas / 2
    for rate, is_document in ((CHATS_PER_S * scale, False), (DOCUMENTS_PER_S * scale, True)):
        at_s = rng.expovariate(rate)
        while at_s < VIRTUAL_S:
            num_tokens = DOCUMENT_TOKENS if is_document else rng.randrange(200, 800)
            tokens = tuple(rng.randrange(100_000) for _ in range(num_tokens))
            turn = Turn(tokens, rng.randrange(50, 150) if is_document else rng.randrange(100, 400))
            found.append(Conversation(at_s, "", (turn,)))
            at_s += rng.expovariate(rate)
    return tuple(found)


def play_virtual(side: Side) -> FleetSimulation:
    """Play one side in virtual time."""
    layout = Layout(shape=read_shape(LLAMA_8B))
    roofline = make_roofline(layout, find_device("h100"))
    scheduler = SchedulerConfig(
        num_blocks=layout.num_kv_blocks(50 * 10**9, BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=131_072,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_steps_in_flight=2,
        scheduling_policy="shortest",
        itl_target_s=None if side.itl_target_ms is None else side.itl_target_ms / 1e3,
    )
    fleet = Fleet(
        scheduler=scheduler,
        models=(roofline,) * side.num_replicas,
        conversations=make_conversations(side.num_replicas),
        num_prefill_replicas=side.num_prefill,
        transfer_s=layout.kv_bytes_per_token * BLOCK_SIZE / TRANSFER_BYTES_PER_S,
    )
    simulation = FleetSimulation(fleet, PromptRouter(BLOCK_SIZE, side.num_prefill))
    simulation.run()
    return simulation


def add_records(side: Side, records: Iterable[TurnRecord]) -> None:
    for record in records:
        if record.num_prompt_tokens == DOCUMENT_TOKENS:
            side.long_ttft_s.append(record.ttft_s)
        else:
            side.gaps_s += record.gaps_s
            side.short_ttft_s.append(record.ttft_s)


# -- on this machine ---------------------------------------------------------------------------------------------------


class Load:
    """Streams of short prompts, and long prompts beside them, against one server."""

    def __init__(self, server: ServerProcess, side: Side, seconds: float, seed: int) -> None:
        self._server, self._side, self._rng = server, side, random.Random(seed)
        self._end_s = time.perf_counter() + seconds
        self._lock = threading.Lock()

    def run(self) -> None:
        threads = [threading.Thread(target=self._stream) for _ in range(NUM_STREAMS)]
        threads.append(threading.Thread(target=self._ask_long_prompts))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _tokens(self, number: int) -> list[int]:
        with self._lock:
            return [self._rng.randrange(10, 8000) for _ in range(number)]

    def _ask(self, num_tokens: int, max_tokens: int) -> list[float]:
        """Return the seconds until each token came."""
        body: dict[str, Any] = {"model": "random", "prompt": self._tokens(num_tokens), "max_tokens": max_tokens}
        body |= {"temperature": 0.0, "ignore_eos": True, "stream": True}
        began_s, times_s = time.perf_counter(), list[float]()
        with self._server.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            for _ in events(line for line in response.iter_lines() if "[DONE]" not in line):
                times_s.append(time.perf_counter() - began_s)
        return times_s

    def _stream(self) -> None:
        while time.perf_counter() < self._end_s:
            times_s = self._ask(32, 96)
            with self._lock:
                self._side.short_ttft_s.append(times_s[0])
                self._side.gaps_s += [after - before for before, after in pairwise(times_s)]

    def _ask_long_prompts(self) -> None:
        while time.perf_counter() < self._end_s:
            time.sleep(PAUSE_S)
            times_s = self._ask(LONG_TOKENS, 16)
            with self._lock:
                self._side.long_ttft_s.append(times_s[0])


def measure(seconds: float, num_rounds: int) -> list[Side]:
    """Measure the sides on this machine."""
    sides = [
        Side(name="2 replicas, chunked prefill"),
        Side(name="2 replicas, chunked prefill, target 60 ms", itl_target_ms=60.0),
        Side(name="1 prefill, 1 decode", num_prefill=1),
    ]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, servers = Path(name), list[ServerProcess]()
        make_model(folder / "random")
        write_tokenizer(folder / "random", int(SHAPE["vocab_size"]))  # type: ignore[call-overload]
        for number, side in enumerate(sides):
            flags = ["--model", str(folder / "random"), "--served-model-name", "random", "--log-level", "warning"]
            flags += ["--data-parallel-size", "2", "--num-kv-blocks", "1024", "--dtype", "float32"]
            flags += ["--prefill-replicas", str(side.num_prefill)] if side.num_prefill else []
            flags += ["--itl-target-ms", str(side.itl_target_ms)] if side.itl_target_ms else []
            log = folder / f"{number}.log"
            servers.append(stack.enter_context(serving(*flags, log=log, environment=ONE_THREAD)))
        with Progress("rounds", (1 + num_rounds) * len(sides)) as progress:
            for seed in range(-1, num_rounds):  # the first one warms up
                for side, server in zip(sides, servers, strict=True):
                    progress.begin(f"{side.name}, round {seed}")
                    unused = replace(side, gaps_s=[], short_ttft_s=[], long_ttft_s=[])
                    Load(server, side if seed >= 0 else unused, seconds if seed >= 0 else 3.0, seed).run()
    return sides


# -- tables ------------------------------------------------------------------------------------------------------------


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile in milliseconds."""
    ordered = sorted(values)
    return 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def table(sides: list[Side]) -> list[str]:
    lines = [
        "| | between tokens, p50 | p99 | longest | short prompts: TTFT p50 | p99 | long prompts: TTFT p50 | p99 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for side in sides:
        gaps = [percentile(side.gaps_s, percent) for percent in (50, 99, 100)]
        ttft = [percentile(each, percent) for each in (side.short_ttft_s, side.long_ttft_s) for percent in (50, 99)]
        cells = [*(f"{value:.1f} ms" for value in gaps), *(f"{value:,.0f} ms" for value in ttft)]
        lines.append(f"| {side.name} | {' | '.join(cells)} |")
    return lines


def write(name: str, lines: list[str]) -> None:
    PAGE.write_text(with_table(PAGE.read_text(), name, iter(lines), MAKER))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=["virtual", "measured"], help="make one of the two tables")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/disaggregated_prefill.md")
    arguments = parser.parse_args()
    if arguments.only != "measured":
        sides = virtual_sides()
        for side in sides:
            add_records(side, play_virtual(side).records)
        lines = ["", *table(sides), ""]
        tell("\n".join(lines))
        if arguments.write:
            write("disaggregated_prefill_virtual", lines)
    if arguments.only != "virtual":
        measured = measure(arguments.seconds, arguments.rounds)
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        lines = [
            "",
            f"{os.cpu_count()} cores ({platform.machine()}), 88 million weights in float32, {arguments.rounds} rounds "
            f"of {arguments.seconds:g} s, on {date}.",
            "",
            *table(measured),
            "",
        ]
        tell("\n".join(lines))
        if arguments.write:
            write("disaggregated_prefill", lines)


if __name__ == "__main__":
    main()
