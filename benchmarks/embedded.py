"""Prompts per second of `servekit.LLM`, beside a server that gets the same prompts over HTTP.

    python -m benchmarks.embedded [--model demo] [--prompts 1000] [--tokens 32] [--rounds 3]

The server gets them in one request, and as one request for each prompt from a client with 256 connections. The three
sides take turns, and figures are medians. Engine, worker and client share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2

from servekit import LLM, SamplingParams
from tests.support.server_process import ServerProcess, serving

NUM_CONNECTIONS = 256


def with_llm(llm: LLM, prompts: list[str], fields: dict[str, Any]) -> int:
    outputs = llm.generate(prompts, SamplingParams(**fields), use_tqdm=False)
    return sum(output.usage.completion_tokens for output in outputs)


def with_one_request(server: ServerProcess, prompts: list[str], fields: dict[str, Any]) -> int:
    response = server.client.post("/generate", json={"prompts": prompts, **fields}, timeout=600)
    num_tokens: int = response.raise_for_status().json()["usage"]["completion_tokens"]
    return num_tokens


def with_a_request_each(server: ServerProcess, prompts: list[str], fields: dict[str, Any]) -> int:
    async def ask_all() -> int:
        waiting, num_tokens = iter(prompts), 0
        async with httpx2.AsyncClient(base_url=server.url, timeout=600) as client:

            async def ask() -> None:
                nonlocal num_tokens
                for prompt in waiting:
                    response = await client.post("/generate", json={"prompt": prompt, **fields})
                    num_tokens += response.raise_for_status().json()["usage"]["completion_tokens"]

            await asyncio.gather(*(ask() for _ in range(NUM_CONNECTIONS)))
        return num_tokens

    return asyncio.run(ask_all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    prompts = [f"Count from {number % 9} to {number}." for number in range(arguments.prompts)]
    fields = {"temperature": 0.0, "max_tokens": arguments.tokens, "ignore_eos": True}
    times_s: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("--model", arguments.model, log=Path(folder) / "log") as server,
        LLM(arguments.model) as llm,
    ):
        sides = {
            "LLM.generate": lambda: with_llm(llm, prompts, fields),
            "one request over HTTP": lambda: with_one_request(server, prompts, fields),
            "a request for each prompt": lambda: with_a_request_each(server, prompts, fields),
        }
        for round_number in range(arguments.rounds + 1):  # the first one warms up
            for name, answer in sides.items():
                started_s = time.monotonic()
                assert answer() == arguments.prompts * arguments.tokens
                if round_number:
                    times_s.setdefault(name, []).append(time.monotonic() - started_s)
    for name, values in times_s.items():
        median_s = statistics.median(values)
        rate = arguments.prompts / median_s
        print(f"{name:<26} {rate:8,.0f} prompts/s {rate * arguments.tokens:9,.0f} tokens/s   {median_s:.2f} s")


if __name__ == "__main__":
    main()
