"""Servers that stream ready-made events and do nothing else: what the libraries under servekit reach by themselves.

python -m benchmarks.bare_streams (starlette | sse-starlette) PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import uvicorn
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


def make_event(index: int, num_tokens: int) -> bytes:
    """As servekit's own stream has it."""
    token = {"id": 97, "text": "a", "special": False, "logprob": None}
    told: dict[str, object] = {"index": index, "token": token, "generated_text": None, "details": None}
    if index == num_tokens:
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}
        told |= {"generated_text": "a" * num_tokens, "finish_reason": "length", "usage": usage}
    return b"data: " + json.dumps(told).encode() + b"\n\n"


async def events(num_tokens: int) -> AsyncIterator[bytes]:
    for event in EVENTS.setdefault(num_tokens, [make_event(index, num_tokens) for index in range(1, num_tokens + 1)]):
        yield event
        await asyncio.sleep(0)  # as if it had waited for a token


EVENTS: dict[int, list[bytes]] = {}


async def stream(request: Request) -> Response:
    num_tokens = int((await request.json())["max_tokens"])
    return StreamingResponse(events(num_tokens), media_type="text/event-stream")


async def stream_by_library(request: Request) -> Response:
    return EventSourceResponse(events(int((await request.json())["max_tokens"])), sep="\n")


async def ready(_: Request) -> Response:
    return PlainTextResponse("ready")


def main() -> None:
    handler = {"starlette": stream, "sse-starlette": stream_by_library}[sys.argv[1]]
    app = Starlette(routes=[Route("/generate_stream", handler, methods=["POST"]), Route("/ready", ready)])
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False, loop="uvloop", http="httptools")


if __name__ == "__main__":
    main()
