"""A server of a remote model that fails or stalls if the prompt says so: `python -m tests.torture.attacks.upstream`.

It writes its port to standard output. A prompt that contains `fail` gets a 500. One that contains `stall` gets its
answer only after `STALL_S`. All others get as many pieces as `max_tokens` says, without pause.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.torture.remote_server import read_request, write_completion, write_json

STALL_S = 30.0


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        head, body = await read_request(reader)
        if head.startswith(b"GET"):
            await write_json(writer, "200 OK", '{"data": [{"id": "far"}]}')
        elif b"fail" in body[:2000]:
            await write_json(writer, "500 Internal Server Error", '{"error": {"message": "no"}}')
        else:
            if b"stall" in body[:2000]:
                await asyncio.sleep(STALL_S)
            await write_completion(writer, "far ", json.loads(body).get("max_tokens") or 1)
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
