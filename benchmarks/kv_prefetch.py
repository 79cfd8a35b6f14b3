"""Measure what it is worth to read offloaded KV blocks from files while their sequence waits for its turn.

    python -m benchmarks.kv_prefetch [--rounds 6] [--tokens 1024] [--conversations 6] [--write]

As in `benchmarks.kv_offload`, conversations take turns on a KV cache that holds a third of them, and their blocks are
in files. But each one arrives behind a short request, and there is one slot. So it waits until that one has its
answer, and the time to first token is counted from there. Three servers get the same requests in turn:

- hit: its KV cache has room for all conversations;
- read ahead: the worker reads files while the conversation waits;
- read by the step: the same, but no more than one block is read ahead.

In every other round, the kernel forgets the files before each conversation, so they are really read from the disk.

`--write` writes the table into docs/kv_offloading.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.decode_steps import SHAPE, make_model
from benchmarks.kv_offload import NUM_NEW_TOKENS, PAGE, flags
from benchmarks.progress import Progress, tell
from benchmarks.random_llama import write_tokenizer
from scripts.tables import with_table
from tests.support.server_process import ServerProcess, serving

MAKER = "python -m benchmarks.kv_prefetch"
SIDES = ("hit", "read ahead", "read by the step")
NUM_SHORT_TOKENS = 12  # of the answer that a conversation waits for: some 200 ms, in which the files can be read
# Imported by each process of a server at its start.
WITHOUT_READING_AHEAD = "from workers.kv_cache import disk_tier\ndisk_tier.MAX_PREFETCHED_BYTES = 0\n"


def wait_and_answer_s(server: ServerProcess, short: list[int], prompt: list[int]) -> float:
    """Send a short request, and a conversation behind it. Returns the seconds from the one's end to the other's."""
    ended_s: list[float] = []

    def send(tokens: list[int], max_tokens: int) -> None:
        body = {"model": "random", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        response = server.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        ended_s.append(time.perf_counter())

    first = threading.Thread(target=send, args=(short, NUM_SHORT_TOKENS))
    first.start()
    while first.is_alive() and server.metric("servekit_num_requests_running") < 1:  # so the conversation comes second
        time.sleep(0.002)
    send(prompt, 1)
    first.join()
    return max(ended_s) - min(ended_s)


def forget_files(folder: Path) -> None:
    """Let the kernel drop the files of blocks from its page cache."""
    for path in folder.rglob("*.block"):
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # the server has deleted it
            continue
        os.fsync(fd)  # pages that are not written yet would stay
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="half of them with files that the kernel has forgotten")
    parser.add_argument("--tokens", type=int, default=1024, help="of each conversation")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--write", action="store_true", help="write the table into docs/kv_offloading.md")
    arguments = parser.parse_args()
    rng = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(10, 8000) for _ in range(number)]

    conversations = [tokens(arguments.tokens) for _ in range(arguments.conversations)]
    times_s: dict[tuple[str, bool], list[float]] = {(side, is_cold): [] for side in SIDES for is_cold in (False, True)}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        make_model(folder / "random")
        write_tokenizer(folder / "random", int(SHAPE["vocab_size"]))  # type: ignore[call-overload]
        (folder / "changed").mkdir()
        (folder / "changed" / "sitecustomize.py").write_text(WITHOUT_READING_AHEAD)
        paths = os.pathsep.join(filter(None, [str(folder / "changed"), os.environ.get("PYTHONPATH", "")]))
        servers = {}
        for number, side in enumerate(SIDES):
            own_folder = folder / str(number)
            own_folder.mkdir()
            kind = "hit" if side == "hit" else "disk"
            own = flags(kind, arguments.conversations, arguments.tokens, own_folder)
            base = ["--model", str(folder / "random"), "--served-model-name", "random", "--max-num-seqs", "1"]
            changed = {"PYTHONPATH": paths} if side == "read by the step" else None
            servers[side] = stack.enter_context(
                serving(*base, "--log-level", "warning", *own, log=own_folder / "log", environment=changed)
            )
        with Progress("requests", (2 + arguments.rounds) * len(conversations) * len(SIDES)) as progress:
            for number in range(-2, arguments.rounds):  # two rounds fill the cache and the files
                for conversation in conversations:
                    short, prompt = tokens(NUM_NEW_TOKENS), conversation + tokens(NUM_NEW_TOKENS)
                    for side in SIDES[number % 3 :] + SIDES[: number % 3]:
                        progress.begin(f"{side}, round {number}")
                        is_cold = number % 2 == 1
                        if is_cold:
                            forget_files(folder / str(SIDES.index(side)))
                        elapsed_s = wait_and_answer_s(servers[side], short, prompt)
                        if number >= 0:
                            times_s[side, is_cold].append(elapsed_s)
        medians_ms = {which: 1e3 * statistics.median(times) for which, times in times_s.items()}
        lines = [
            "",
            f"{os.cpu_count()} cores ({platform.machine()}), 88 million weights in float32, {len(conversations)} "
            f"conversations of {arguments.tokens} tokens, medians of {arguments.rounds} rounds, on "
            f"{datetime.datetime.now(tz=datetime.UTC).date().isoformat()}.",
            "",
            "| a returning conversation that has waited | files in the page cache: first token, ms | "
            "files on the disk: first token, ms |",
            "|---|---:|---:|",
            *(f"| {side} | {medians_ms[side, False]:.1f} | {medians_ms[side, True]:.1f} |" for side in SIDES),
            "",
        ]
    tell("\n".join(lines))
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(), "kv_prefetch", iter(lines), MAKER))


if __name__ == "__main__":
    main()
