"""Compare output tokens per second of servekit over HTTP with a loop of transformers' `generate`, in one run.

Both sides get the same model in the same precision, the same prompts and the same fixed output length. servekit is
measured from outside: a server process, its worker, HTTP. The loop runs one prompt after the other. Rounds alternate
between the two, so a noisy machine affects both, and each figure is the median of its rounds.

    python benchmarks/against_generate.py [--model demo] [--rounds 3] [--concurrency 1 8 32]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.progress import Progress, no_bars_in_files, tell
from servekit.engine.model_files import find_model

NO_EOS = [2**31]  # an id beyond the vocabulary, so that outputs have their full length
WORDS = [
    "sky",
    "cat",
    "seven",
    "Japan",
    "token",
    "river",
    "green",
    "batch",
    "Monday",
    "little",
    "answer",
    "count",
    "bird",
    "the",
    "is",
    "of",
    "a",
]


def make_prompts(number: int) -> list[str]:
    """Return prompts of 4 to 60 words, the same in every run."""
    return [" ".join(WORDS[(i * 7 + j * 3) % len(WORDS)] for j in range(4 + (i * 13) % 57)) for i in range(number)]


class Baseline:
    """A loop of transformers' `generate`."""

    def __init__(self, path: str) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def run(self, prompts: list[str], num_tokens: int) -> float:
        """Return the seconds for all prompts."""
        started = time.perf_counter()
        for prompt in prompts:
            inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            output = self.model.generate(**inputs, do_sample=False, max_new_tokens=num_tokens, eos_token_id=NO_EOS)
            self.tokenizer.decode(output[0])
        return time.perf_counter() - started


class Served:
    """A server process with one concurrent client per prompt. `checkout`: the source tree that it runs, if not this."""

    def __init__(self, model: str, *arguments: str, checkout: Path | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "servekit",
            "serve",
            model,
            "--port",
            str(port),
            "--dtype",
            "float32",
            *arguments,
        ]
        environment = os.environ if checkout is None else {**os.environ, "PYTHONPATH": str(checkout)}
        self.process = subprocess.Popen([*command, "--log-level", "warning"], cwd=checkout, env=environment)

    async def wait_until_ready(self) -> None:
        async with httpx2.AsyncClient() as client, asyncio.timeout(120):
            while True:
                try:
                    if (await client.get(self.url + "/ready")).status_code == 200:
                        return
                except httpx2.TransportError:
                    assert self.process.poll() is None, "the server ended"
                await asyncio.sleep(0.1)

    async def run(self, prompts: list[str], num_tokens: int) -> float:
        """Return the seconds for all prompts, sent at once in separate requests."""
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=self.url, limits=limits, timeout=600) as client:
            started = time.perf_counter()
            answers = await asyncio.gather(*(self._ask(client, prompt, num_tokens) for prompt in prompts))
            elapsed_s = time.perf_counter() - started
        assert all(answer["usage"]["completion_tokens"] == num_tokens for answer in answers)
        return elapsed_s

    async def _ask(self, client: httpx2.AsyncClient, prompt: str, num_tokens: int) -> dict[str, dict[str, int]]:
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        response = await client.post("/generate", json=body)
        response.raise_for_status()
        answer: dict[str, dict[str, int]] = response.json()
        return answer

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


async def measure(arguments: argparse.Namespace) -> None:
    baseline, served = Baseline(str(find_model(arguments.model))), Served(arguments.model)
    num_tokens = arguments.num_tokens
    try:
        await served.wait_until_ready()
        warm_up = make_prompts(4)
        baseline.run(warm_up[:1], num_tokens)
        await served.run(warm_up, num_tokens)
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, float32, {arguments.model}")
        print(f"{num_tokens} tokens per request, median of {arguments.rounds} rounds\n")
        print("| concurrent requests | generate loop, tokens/s | servekit, tokens/s | ratio |")
        print("|---:|---:|---:|---:|")
        with Progress("rounds", len(arguments.concurrency) * arguments.rounds) as progress:
            for concurrency in arguments.concurrency:
                prompts, rounds = make_prompts(concurrency), []
                for _ in range(arguments.rounds):
                    progress.begin(f"{concurrency} requests to both")
                    rounds.append((baseline.run(prompts, num_tokens), await served.run(prompts, num_tokens)))
                loop_s, served_s = (statistics.median(times) for times in zip(*rounds, strict=True))
                total = concurrency * num_tokens
                ratio = statistics.median(loop / ours for loop, ours in rounds)
                tell(f"| {concurrency} | {total / loop_s:,.0f} | {total / served_s:,.0f} | {ratio:.1f} |")
    finally:
        served.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    no_bars_in_files()
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
