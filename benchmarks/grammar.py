"""Measure what grammars cost: the same load with and without them, in alternating rounds of one run, over HTTP.

Every request of a batch has a grammar: in one kind of round all the same, in another each its own, which is the worst
case. Grammars are compiled before, as where the same ones are requested again and again; the cost of compiling is
reported separately. Answers have as many tokens with a grammar as without.

    make bench-grammar
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from statistics import median
from typing import Any

import httpx2
import torch
from against_generate import Served
from settings import Round, scrape

from benchmarks.progress import Progress, progress


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
    size, num_tokens = arguments.concurrency, arguments.num_tokens
    kinds: dict[str, list[dict[str, Any] | None]] = {
        "none": [None] * size,
        "the same": [grammar(0)] * size,
        "each its own": [grammar(number) for number in range(size)],
    }
    rounds: dict[str, list[Round]] = {kind: [] for kind in kinds}
    served = Served(arguments.model)
    try:
        await served.wait_until_ready()
        compiling = await first_times(served, size)
        with Progress("rounds", (arguments.rounds + 1) * len(kinds)) as steps:
            for number in range(arguments.rounds + 1):
                for kind, grammars in kinds.items():
                    steps.begin(f"grammars: {kind}")
                    played = await play(served, grammars, num_tokens)
                    if number:  # the first one warms up
                        rounds[kind].append(played)
    finally:
        served.stop()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {arguments.model}")
    print(f"{size} requests of {num_tokens} tokens, medians of {arguments.rounds} rounds\n")
    print("| grammars | tokens/s | ratio | the worker's step, ms | ratio |")
    print("|---|---:|---:|---:|---:|")
    for kind, played_rounds in rounds.items():
        pairs = list(zip(played_rounds, rounds["none"], strict=True))
        print(
            f"| {kind} | {median(one.tokens_per_s for one in played_rounds):,.0f} "
            f"| {median(one.tokens_per_s / none.tokens_per_s for one, none in pairs):.3f} "
            f"| {median(one.step_ms for one in played_rounds):.2f} "
            f"| {median(one.step_ms / none.step_ms for one, none in pairs):.3f} |"
        )
    print(f"\na grammar's first request, beyond a second one: median {1e3 * compiling:.1f} ms")


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
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
