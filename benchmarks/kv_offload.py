"""Measure the time to first token of conversations that return, with and without offloaded KV blocks.

    python -m benchmarks.kv_offload [--rounds 5] [--tokens 1024] [--conversations 6] [--dtype bfloat16] [--write]

The KV cache has room for a third of the conversations, and these take turns: each one returns, with a few new tokens,
when the others have reused its blocks. There are four servers, which get the same requests in turn, one at a time:

- hit: its KV cache has room for all conversations;
- memory: it offloads blocks to the host's memory;
- disk: it offloads blocks to files, with memory for one conversation. Files that were just written are in the kernel's
  page cache, as they are on a machine with enough memory; a disk that is really read takes longer.
  The server is started again when its files are written, so that its memory is empty;
- recompute: it offloads nothing.

The model has 88 million random weights. `--write` writes the table into docs/kv_offloading.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.decode_steps import BLOCK_SIZE, SHAPE, make_model
from benchmarks.progress import Progress, tell
from benchmarks.random_llama import write_tokenizer
from scripts.tables import with_table
from tests.support.server_process import ServerProcess, serving

MAKER = "python -m benchmarks.kv_offload"
PAGE = Path(__file__).parents[1] / "docs" / "kv_offloading.md"
NUM_NEW_TOKENS = 16  # of each turn
NUMBERS_PER_TOKEN = 2 * 64 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"]  # type: ignore[operator]
BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2}
SIDES = ("hit", "memory", "disk", "recompute")


def flags(side: str, num_conversations: int, num_tokens: int, folder: Path, dtype: str = "float32") -> list[str]:
    """Return the flags of one server: for its data type, and for its KV cache."""
    blocks_each = -(-(num_tokens + 2 * NUM_NEW_TOKENS) // BLOCK_SIZE)
    all_bytes = num_conversations * blocks_each * BLOCK_SIZE * NUMBERS_PER_TOKEN * BYTES_PER_NUMBER[dtype]
    num_blocks = blocks_each * (num_conversations + 1 if side == "hit" else num_conversations // 3)
    found = ["--dtype", dtype, "--num-kv-blocks", str(num_blocks)]
    if side in ("memory", "disk"):
        memory = 2 * all_bytes if side == "memory" else all_bytes // num_conversations
        found += ["--kv-offload-memory-bytes", str(memory)]
    if side == "disk":
        found += ["--kv-offload-dir", str(folder / "blocks")]
    return found


def ttft_s(server: ServerProcess, prompt: list[int]) -> float:
    """Return the seconds until the answer's only token is there."""
    body = {"model": "random", "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
    began_s = time.perf_counter()
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return time.perf_counter() - began_s


def rows(times_s: dict[str, list[float]], servers: dict[str, ServerProcess]) -> list[str]:
    medians = {side: statistics.median(times) for side, times in times_s.items()}
    lines = []
    for side in SIDES:
        loaded = {"memory": 0.0, "disk": 0.0}
        if side in ("memory", "disk"):
            loaded_by_tier(servers[side], loaded)
        lines.append(
            f"| {side} | {1e3 * medians[side]:.1f} | {medians[side] / medians['hit']:.2f} | "
            f"{medians['recompute'] / medians[side]:.1f} | {loaded['memory']:.0f} | {loaded['disk']:.0f} |"
        )
    return lines


def loaded_by_tier(server: ServerProcess, loaded: dict[str, float]) -> None:
    """Add the blocks that a server has loaded."""
    for line in server.client.get("/metrics").text.splitlines():
        for tier in loaded:
            if line.startswith("servekit_kv_offload_loaded_blocks_total") and f'tier="{tier}"' in line:
                loaded[tier] += float(line.rpartition(" ")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024, help="of each conversation")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--dtype", choices=tuple(BYTES_PER_NUMBER), default="float32")
    parser.add_argument("--write", action="store_true", help="write the table into docs/kv_offloading.md")
    arguments = parser.parse_args()
    rng = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(10, 8000) for _ in range(number)]

    conversations = [tokens(arguments.tokens) for _ in range(arguments.conversations)]
    times_s: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        make_model(folder / "random")
        write_tokenizer(folder / "random", int(SHAPE["vocab_size"]))  # type: ignore[call-overload]
        first_disk = stack.enter_context(ExitStack())

        def start(side: str, ends_with: ExitStack, log: str) -> ServerProcess:
            own = flags(side, arguments.conversations, arguments.tokens, folder, arguments.dtype)
            base = ("--model", str(folder / "random"), "--served-model-name", "random")
            return ends_with.enter_context(serving(*base, "--log-level", "warning", *own, log=folder / log))

        servers = {side: start(side, first_disk if side == "disk" else stack, f"{side}.log") for side in SIDES}
        num_requests = (3 + arguments.rounds) * len(conversations) * len(SIDES)
        with Progress("requests", num_requests) as progress:
            # Rounds below 0 are not measured: two fill the caches and the files, and one is after the new start.
            for number in range(-3, arguments.rounds):
                if number == -1:
                    first_disk.close()
                    servers["disk"] = start("disk", stack, "disk-2.log")
                for conversation in conversations:
                    prompt = conversation + tokens(NUM_NEW_TOKENS)
                    for side in SIDES[number % 4 :] + SIDES[: number % 4]:
                        progress.begin(f"{side}, round {number}")
                        elapsed_s = ttft_s(servers[side], prompt)
                        if number >= 0:
                            times_s[side].append(elapsed_s)
        lines = [
            "",
            f"{os.cpu_count()} cores ({platform.machine()}), 88 million weights in {arguments.dtype}, "
            f"{len(conversations)} conversations of {arguments.tokens} tokens, medians of {arguments.rounds} rounds, "
            f"on {datetime.datetime.now(tz=datetime.UTC).date().isoformat()}.",
            "",
            "| the blocks of a returning conversation | TTFT, ms | ratio to a hit | faster than recompute | blocks "
            "loaded from memory | from disk |",
            "|---|---:|---:|---:|---:|---:|",
            *rows(times_s, servers),
            "",
        ]
    tell("\n".join(lines))
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(), "kv_offload", iter(lines), MAKER))


if __name__ == "__main__":
    main()
