"""Serve a model by OpenVINO GenAI, for benchmarks/against_peers.py. It needs `pip install openvino-genai aiohttp`.

    python benchmarks/peers/serve_openvino.py MODEL_DIRECTORY PORT [--step-tokens 2048] [--threads 2]

Run it with an interpreter that has these packages. GenAI brings no server, so its ContinuousBatchingPipeline runs here
behind the smallest one: POST /v1/completions, streamed, and GET /health. `optimum-cli export openvino` makes the
directory (`--weight-format int8`, or `int4 --sym --group-size 128 --ratio 1.0`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import queue
import threading
from dataclasses import dataclass, field

import openvino_genai
from aiohttp import web


@dataclass(eq=False)
class Request:
    """A request and the token ids that are computed for it, in batches; an empty batch ends it."""

    prompt: str
    max_tokens: int
    batches: asyncio.Queue[list[int]] = field(default_factory=asyncio.Queue)


class Engine:
    """The pipeline, in a thread of its own."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = arguments.cache_gb
        scheduler.max_num_batched_tokens = arguments.step_tokens
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": arguments.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self.arrived: queue.Queue[Request] = queue.Queue()

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Compute steps forever."""
        numbers, running = itertools.count(), {}
        while True:
            while not running or not self.arrived.empty():
                request = self.arrived.get()
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens, config.ignore_eos, config.do_sample = request.max_tokens, True, False
                running[request] = self._pipeline.add_request(next(numbers), request.prompt, config)
            self._pipeline.step()
            for request, handle in list(running.items()):
                token_ids: list[int] = []
                while handle.can_read():
                    for output in handle.read().values():
                        token_ids += output.generated_ids
                if token_ids:
                    loop.call_soon_threadsafe(request.batches.put_nowait, token_ids)
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING and not handle.can_read():
                    loop.call_soon_threadsafe(request.batches.put_nowait, [])
                    del running[request]


def choice(text: str, finish_reason: str | None) -> dict[str, object]:
    return {"index": 0, "text": text, "finish_reason": finish_reason}


async def send(response: web.StreamResponse, **event: object) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def make_app(engine: Engine) -> web.Application:
    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ours = Request(body["prompt"], body["max_tokens"])
        engine.arrived.put(ours)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = 0
        while token_ids := await ours.batches.get():
            num_tokens += len(token_ids)
            await send(response, choices=[choice(engine.tokenizer.decode(token_ids), None)])
        await send(response, choices=[choice("", "length")])
        await send(response, choices=[], usage={"completion_tokens": num_tokens})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def start(_: web.Application) -> None:
        threading.Thread(target=engine.run, args=(asyncio.get_running_loop(),), daemon=True).start()

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", health)
    app.on_startup.append(start)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="directory of the OpenVINO model")
    parser.add_argument("port", type=int)
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    web.run_app(make_app(Engine(arguments)), host="127.0.0.1", port=arguments.port, print=None)


if __name__ == "__main__":
    main()
