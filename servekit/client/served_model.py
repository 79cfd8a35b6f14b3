"""Serve a model for one of the commands: `servekit serve` as a child process, which ends with the command."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from servekit.client.http_client import HttpClient, RequestFailed
from servekit.errors import ConfigError

_READY_TICK_S = 0.1
_STOP_TIMEOUT_S = 30.0
_MAX_BYTES = 1 << 16


@asynccontextmanager
async def served(model: str, quantization: str | None) -> AsyncIterator[str]:
    """Yield the address of a server of the model, on a port of this machine only, when it is ready.

    Other settings come from SERVEKIT_* variables. Its log goes to standard error. Raises ConfigError if it ends early.
    """
    port = _free_port()
    command = [sys.executable, "-m", "servekit", "serve", f"--model={model}", "--host=127.0.0.1", f"--port={port}"]
    if quantization is not None:
        # So that the two servers of a comparison have two names.
        command += [f"--quantization={quantization}", f"--served-model-name={model} {quantization}"]
    process = await asyncio.create_subprocess_exec(*command, "--log-level=warning")
    try:
        url = f"http://127.0.0.1:{port}"
        await _wait_until_ready(process, url, model)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _wait_until_ready(process: asyncio.subprocess.Process, url: str, model: str) -> None:
    """Wait as long as the model loads, which the server itself bounds. Raises ConfigError if the process ends."""
    async with HttpClient(url) as client:
        while process.returncode is None:
            with suppress(RequestFailed):
                await client.get("/ready", dict[str, Any], _MAX_BYTES)
                return
            await asyncio.sleep(_READY_TICK_S)
    raise ConfigError(f"the server of {model!r} ended with exit code {process.returncode}; its own message is above")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
