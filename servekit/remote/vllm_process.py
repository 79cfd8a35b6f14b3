"""The processes of vLLM, which this server starts and ends. They listen on a socket file of this user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

from servekit.errors import WorkerNotReady

TERM_TIMEOUT_S = 10.0  # for vLLM to end by itself
KILL_TIMEOUT_S = 10.0

# Variables of vLLM's environment, unless the operator has set them.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}  # by default vLLM reports its use over the network


class VllmProcess:
    """One run of vLLM. Call `start`, and then `end`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="servekit-vllm-"))  # mode 0700
        self._process: Process | None = None

    @property
    def socket(self) -> str:
        """The path of its socket."""
        return str(self._folder / "http")

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def start(self, command: Sequence[str], environment: Mapping[str, str], devices: str | None) -> None:
        """Start vLLM. `devices` is what CUDA_VISIBLE_DEVICES is set to. Raises WorkerNotReady if there is no vLLM."""
        name = shutil.which(command[0])
        if name is None:
            raise WorkerNotReady(
                f"there is no program {command[0]!r} to start vLLM with; install vLLM, in a virtual environment of its "
                "own, and name its program in the model file: vllm = { command = ['/opt/vllm/bin/vllm'] }"
            )
        visible = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        # With VLLM_API_KEY, vLLM demands a key that this server does not know. The socket is for this user only.
        inherited = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
        launcher = [sys.executable, "-P", "-m", "servekit.remote.vllm_launcher"]
        self._process = await asyncio.create_subprocess_exec(
            *launcher,
            name,
            *command[1:],
            stdin=PIPE,
            env={**ENVIRONMENT, **inherited, **visible, **environment},
            preexec_fn=os.setpgrp,  # Ctrl-C in a terminal must reach the server only
        )

    async def wait(self) -> str:
        """Return how it ended."""
        assert self._process is not None, "start was called"
        code = await self._process.wait()
        if code <= 128:
            return f"exited with code {code}"
        return f"was killed by signal {code - 128}"

    async def end(self, graceful: bool) -> None:
        """End it, and remove its socket. Idempotent."""
        process = self._process
        if process is not None and process.returncode is None:
            if graceful and await self._ended_after(process, signal.SIGTERM, TERM_TIMEOUT_S):
                pass
            elif process.stdin is not None:
                process.stdin.close()  # the launcher kills the group
                await self._ended_after(process, None, KILL_TIMEOUT_S)
            if process.returncode is None:
                process.kill()
                await process.wait()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder of its socket."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @staticmethod
    async def _ended_after(process: Process, number: signal.Signals | None, timeout_s: float) -> bool:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            if number is not None:
                process.send_signal(number)
            async with asyncio.timeout(timeout_s):
                await process.wait()
        return process.returncode is not None
