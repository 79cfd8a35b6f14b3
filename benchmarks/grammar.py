"""Measure what grammars cost: the same load with and without them, in alternating rounds of one run, over HTTP.

Every request of a batch has a grammar: in one kind of round all the same, in another each its own, which is the worst
case. Grammars are compiled before, as where the same ones are requested again and again; the cost of compiling is
reported separately. Answers have as many tokens with a grammar as without.

    make bench-grammar
    make bench-grammar ARGS="--against ../another-checkout"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import torch
from against_generate import Served
from settings import Round, scrape

from benchmarks.progress import Progress, progress, tell


def schema(number: int) -> dict[str, Any]:
    """Return a schema of a long array, so that the grammar lasts as long as the answer."""
    properties = {
        f"name_{number}": {"type": "string"},
        "kind": {"enum": ["red", "green", f"blue_{number}"]},
        "count": {"type": "integer"},
    }
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 100}


def grammar(number: int) -> dict[str, Any]:
    return {"type": "json_schema", "value": schema(number)}


async def play(served: Served, grammars: list[dict[str, Any] | None], num_tokens: int) -> Round:
    """Send one request for each grammar, all at once."""
    before = await scrape(served.url)
    async with httpx2.AsyncClient(base_url=served.url, timeout=600) as client:
        started = time.perf_counter()
        await asyncio.gather(*(ask(client, index, grammar, num_tokens) for index, grammar in enumerate(grammars)))
        seconds = time.perf_counter() - started
    return Round(seconds, len(grammars) * num_tokens, before, await scrape(served.url))


async def ask(client: httpx2.AsyncClient, index: int, grammar: dict[str, Any] | None, num_tokens: int) -> None:
    body = {"prompt": "Give me a list of things.", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 1.0}
    response = await client.post("/generate", content=json.dumps({**body, "seed": index, "grammar": grammar}))
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == num_tokens


async def measure(arguments: argparse.Namespace) -> None:
    checkouts = [None, *([arguments.against] if arguments.against else [])]
    servers = [Served(arguments.model, checkout=checkout) for checkout in checkouts]
    num_tokens = arguments.num_tokens
    try:
        for served in servers:
            await served.wait_until_ready()
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {arguments.model}")
        print(f"answers of {num_tokens} tokens, medians of {arguments.rounds} rounds\n")
        print("| requests | grammars | tokens/s | ratio to none | the worker's step, ms | ratio to none |", end="")
        print(" tokens/s, to the other tree | step, to the other tree |" if arguments.against else "")
        print("|---:|---|---:|---:|---:|---:|" + "---:|---:|" * bool(arguments.against))
        compiling = [await first_times(served, max(arguments.concurrency)) for served in servers]
        with Progress("rounds", len(arguments.concurrency) * (arguments.rounds + 1) * 3 * len(servers)) as steps:
            for size in arguments.concurrency:
                rounds = await alternate(servers, size, num_tokens, arguments.rounds, steps)
                for kind, (ours, *others) in rounds.items():
                    tell(line(size, kind, ours, rounds["none"][0], others))
    finally:
        for served in servers:
            served.stop()
    print(f"\na grammar's first request, beyond a second one: median {1e3 * compiling[0]:.1f} ms")
    if arguments.against:
        print(f"in the other tree: {1e3 * compiling[1]:.1f} ms")


async def alternate(
    servers: list[Served], size: int, num_tokens: int, num_rounds: int, steps: Progress
) -> dict[str, list[list[Round]]]:
    """Play rounds of all kinds on all servers in turn. Return them by kind, and for each server."""
    kinds: dict[str, list[dict[str, Any] | None]] = {
        "none": [None] * size,
        "the same": [grammar(0)] * size,
        "each its own": [grammar(number) for number in range(size)],
    }
    rounds: dict[str, list[list[Round]]] = {kind: [[] for _ in servers] for kind in kinds}
    for number in range(num_rounds + 1):
        for kind, grammars in kinds.items():
            for index, served in enumerate(servers):
                steps.begin(f"{size} requests, grammars: {kind}")
                played = await play(served, grammars, num_tokens)
                if number:  # the first one warms up
                    rounds[kind][index].append(played)
    return rounds


def line(size: int, kind: str, ours: list[Round], none: list[Round], others: list[list[Round]]) -> str:
    """Return a line of the table: medians, and medians of the ratios of rounds that were played after each other."""

    def ratios(to: list[Round]) -> tuple[float, float]:
        pairs = list(zip(ours, to, strict=True))
        return (
            median(one.tokens_per_s / other.tokens_per_s for one, other in pairs),
            median(one.step_ms / other.step_ms for one, other in pairs),
        )

    tokens_ratio, step_ratio = ratios(none)
    tokens_per_s, step_ms = median(one.tokens_per_s for one in ours), median(one.step_ms for one in ours)
    text = f"| {size} | {kind} | {tokens_per_s:,.0f} | {tokens_ratio:.3f} | {step_ms:.2f} | {step_ratio:.3f} |"
    for other in others:
        text += " {:.3f} | {:.3f} |".format(*ratios(other))
    return text


async def first_times(served: Served, size: int) -> float:
    """Return the seconds that a new grammar adds to a request of one token."""
    added = []
    async with httpx2.AsyncClient(base_url=served.url, timeout=600) as client:
        for number in progress(range(size), "grammars compiled"):
            elapsed_s = []
            for _ in range(2):
                started = time.perf_counter()
                await ask(client, 0, grammar(number), 1)
                elapsed_s.append(time.perf_counter() - started)
            added.append(elapsed_s[0] - elapsed_s[1])
    return median(added)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument(
        "--against", type=Path, help="another source tree of servekit, whose rounds alternate with this"
    )
    parser.add_argument("--num-tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
