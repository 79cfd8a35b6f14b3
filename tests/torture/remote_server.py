"""What the stand-ins for servers of remote models share: they read a request, and write a completion."""

from __future__ import annotations

import asyncio
import re


def _head(status: str, content_type: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: {content_type}\r\n\r\n".encode()


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return the head and the body of the request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return head, await reader.readexactly(int(length[1]) if length else 0)


async def write_json(writer: asyncio.StreamWriter, status: str, body: str) -> None:
    """Write an answer with this status, such as "200 OK", and this JSON."""
    writer.write(_head(status, "application/json") + body.encode())
    await writer.drain()


async def write_completion(writer: asyncio.StreamWriter, text: str, num_pieces: int, pause_s: float = 0.0) -> None:
    """Write a streamed answer of `num_pieces` events with this text, and wait `pause_s` before each."""
    writer.write(_head("200 OK", "text/event-stream"))
    for number in range(num_pieces):
        if pause_s:
            await asyncio.sleep(pause_s)
        reason = '"stop"' if number == num_pieces - 1 else "null"
        choice = f'{{"index": 0, "text": "{text}", "finish_reason": {reason}}}'
        writer.write(f'data: {{"choices": [{choice}]}}\n\n'.encode())
        await writer.drain()
    writer.write(b"data: [DONE]\n\n")
    await writer.drain()
