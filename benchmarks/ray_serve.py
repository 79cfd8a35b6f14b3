"""Measure what prefix-aware routing brings behind Ray Serve: `python -m benchmarks.ray_serve`.

Conversations of several turns go through Serve's proxy to three servers of a simulated model, once with Serve's own
router and once with ours. Printed are the part of the prompts' tokens that the servers found in their prefix caches,
the time to the first token, and the part of all tokens that the busiest server generated: a router that sends
everything to one server has many hits, too. Needs the package ray; starts a cluster of three nodes on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time

import httpx2

from tests.support.ray_nodes import RayNodes
from tests.support.ray_serve import ServeApp

NUM_SERVERS = 3
MODEL = "sim:step=10ms,prefill=100us"
SYSTEM = "You are the assistant of a shop. Answer politely and in one sentence. " * 8
# A turn adds some 750 bytes, as a question with an answer of some 100 words does. Most of it is in the question, for
# what is measured is not how long answers take.
QUESTION_WORDS, ANSWER_TOKENS = 150, 32


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()
    nodes = RayNodes(NUM_SERVERS, num_cpus=2)
    try:
        print(f"{options.conversations} conversations of {options.turns} turns, {options.concurrency} at a time")
        print(f"{'router':<24} {'prefix hits':>12} {'TTFT p50':>10} {'TTFT p99':>10} {'busiest server':>15}")
        for name, is_aware in (("Ray Serve's default", False), ("prefix-aware", True)):
            size = {"min_replicas": NUM_SERVERS, "max_replicas": NUM_SERVERS}
            label = f"aware-{is_aware}"
            app = ServeApp(nodes, label, model=options.model, prefix_aware=is_aware, **size)
            try:
                run = converse(app.url, label, options.conversations, options.turns, options.concurrency)
                hits, times_s = asyncio.run(run)
                generated = app.metric(label, "servekit_generation_tokens_total")
            finally:
                app.close()
            percentiles = statistics.quantiles(times_s, n=100)
            print(
                f"{name:<24} {hits:>12.1%} {percentiles[49] * 1e3:>7.0f} ms {percentiles[98] * 1e3:>7.0f} ms "
                f"{max(generated) / sum(generated):>15.1%}",
                flush=True,
            )
    finally:
        nodes.close()


async def converse(
    url: str, model: str, num_conversations: int, num_turns: int, concurrency: int
) -> tuple[float, list[float]]:
    """Return the part of prompt tokens that were cached, and the times to the first token in seconds."""
    num_prompt, num_cached = 0, 0
    times_s: list[float] = []
    places = asyncio.Semaphore(concurrency)

    async def conversation(number: int, client: httpx2.AsyncClient) -> None:
        nonlocal num_prompt, num_cached
        draw = random.Random(number)
        messages = [{"role": "system", "content": SYSTEM}]
        for _ in range(num_turns):
            words = " ".join(str(draw.randrange(10_000)) for _ in range(QUESTION_WORDS))
            messages.append({"role": "user", "content": words})
            body = {
                "messages": messages,
                "model": model,
                "max_tokens": ANSWER_TOKENS,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with places:
                began_s, text, is_first = time.monotonic(), "", True
                async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                    assert response.status_code == 200, (await response.aread()).decode()
                    async for line in response.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        event = json.loads(line.removeprefix("data: "))
                        for choice in event["choices"]:
                            piece = choice["delta"].get("content") or ""
                            if piece and is_first:
                                times_s.append(time.monotonic() - began_s)
                                is_first = False
                            text += piece
                        if event.get("usage"):
                            num_prompt += event["usage"]["prompt_tokens"]
                            num_cached += event["usage"]["prompt_tokens_details"]["cached_tokens"]
            messages.append({"role": "assistant", "content": text})

    async with httpx2.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(conversation(number, client) for number in range(num_conversations)))
    return num_cached / num_prompt, times_s


if __name__ == "__main__":
    main()
