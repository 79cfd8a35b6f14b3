"""Compare two sets of flags in one run, to measure what a setting costs or gains.

Both servers run all the time and get requests in turn, so a noisy machine affects both. Prompts are new in every
round, so the prefix cache finds nothing. *Overhead* is the time between two steps in which the worker does not
compute: planning, both queues, commit, text and HTTP, as far as it is not overlapped with the previous step.

    python benchmarks/settings.py --first="--max-steps-in-flight 1" --second="--max-steps-in-flight 2"
    python benchmarks/settings.py --first=--no-enable-prefix-caching --second=--enable-prefix-caching
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics

import httpx2
import torch
from against_generate import Served, make_prompts

from benchmarks.progress import Progress, tell


class Round:
    """The figures of one round on one server."""

    def __init__(self, seconds: float, num_tokens: int, before: dict[str, float], after: dict[str, float]) -> None:
        num_steps = after["scheduler_steps_total"] - before["scheduler_steps_total"]
        step_s = after["step_duration_seconds_sum"] - before["step_duration_seconds_sum"]
        self.tokens_per_s = num_tokens / seconds
        self.step_ms = 1e3 * step_s / num_steps
        self.overhead_ms = 1e3 * (seconds - step_s) / num_steps


async def scrape(url: str) -> dict[str, float]:
    """Return the server's metrics, summed over their labels."""
    async with httpx2.AsyncClient() as client:
        lines = (await client.get(url + "/metrics")).text.splitlines()
    values: dict[str, float] = {}
    for line in lines:
        if line.startswith("servekit_"):
            name = line.removeprefix("servekit_").partition("{")[0].partition(" ")[0]
            values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
    return values


async def play(served: Served, prompts: list[str], num_tokens: int) -> Round:
    before = await scrape(served.url)
    seconds = await served.run(prompts, num_tokens)
    return Round(seconds, len(prompts) * num_tokens, before, await scrape(served.url))


async def measure(arguments: argparse.Namespace) -> None:
    settings = (arguments.first, arguments.second)
    servers = [Served(arguments.model, *setting.split()) for setting in settings]
    try:
        for served in servers:
            await served.wait_until_ready()
            await served.run(make_prompts(8), arguments.num_tokens)
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {arguments.model}")
        print(f"{arguments.num_tokens} tokens per request, medians of {arguments.rounds} rounds\n")
        print("| concurrent requests | setting | tokens/s | step, ms | overhead, ms | tokens/s, ratio |")
        print("|---:|---|---:|---:|---:|---:|")
        with Progress("rounds", len(arguments.concurrency) * arguments.rounds * len(servers)) as progress:
            for concurrency in arguments.concurrency:
                rounds: list[list[Round]] = [[], []]
                for number in range(arguments.rounds):
                    prompts = [
                        f"{number} {concurrency} {index} {text}" for index, text in enumerate(make_prompts(concurrency))
                    ]
                    for setting, played, served in zip(settings, rounds, servers, strict=True):
                        progress.begin(f"{concurrency} requests, {setting}")
                        played.append(await play(served, prompts, arguments.num_tokens))
                pairs = zip(*rounds, strict=True)
                ratio = statistics.median(second.tokens_per_s / first.tokens_per_s for first, second in pairs)
                for setting, played in zip(settings, rounds, strict=True):
                    medians = [
                        statistics.median(getattr(r, column) for r in played)
                        for column in ("tokens_per_s", "step_ms", "overhead_ms")
                    ]
                    last = f"{ratio:.3f}" if played is rounds[1] else "1"
                    figures = f"{medians[0]:,.0f} | {medians[1]:.2f} | {medians[2]:.2f}"
                    tell(f"| {concurrency} | `{setting}` | {figures} | {last} |")
    finally:
        for served in servers:
            served.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--first", required=True, help="flags of the first server, in one argument")
    parser.add_argument("--second", required=True, help="flags of the second server")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
