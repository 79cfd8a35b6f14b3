"""A server of a remote model that fails or stalls if the prompt says so: `python -m tests.torture.attacks.upstream`.

It writes its port to standard output. A prompt that contains `fail` gets a 500. One that contains `stall` gets its
answer only after `STALL_S`. All others get as many pieces as `max_tokens` says, without pause.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STALL_S = 30.0


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        begin = b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Type: %s\r\n\r\n"
        if head.startswith(b"GET"):
            writer.write(begin % (b"200 OK", b"application/json") + b'{"data": [{"id": "far"}]}')
        elif b"fail" in body[:2000]:
            writer.write(begin % (b"500 Internal Server Error", b"application/json") + b'{"error": {"message": "no"}}')
        else:
            if b"stall" in body[:2000]:
                await asyncio.sleep(STALL_S)
            writer.write(begin % (b"200 OK", b"text/event-stream"))
            num_pieces = json.loads(body).get("max_tokens") or 1
            for number in range(num_pieces):
                reason = '"stop"' if number == num_pieces - 1 else "null"
                choice = f'{{"index": 0, "text": "far ", "finish_reason": {reason}}}'
                writer.write(f'data: {{"choices": [{choice}]}}\n\n'.encode())
                await writer.drain()
            writer.write(b"data: [DONE]\n\n")
        await writer.drain()
    writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def running_upstream() -> Iterator[str]:
    """Yield the address of such a server. Its process has the lowest priority, as if it were on another machine."""
    command = [sys.executable, "-m", "tests.torture.attacks.upstream"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # which closes its pipe at the end
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.kill()


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(_serve())
