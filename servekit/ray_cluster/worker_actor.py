"""Own one worker on a node of a Ray cluster: a process of `python -m servekit.worker --connect`.

The worker joins the server as every other worker does. Ray carries no step and no token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

from servekit.protocol.placement_job import PlacementJob

PIPE_ROOM_BYTES = 2**15  # a pipe takes more without a reader


class WorkerActor:
    """A worker process, which ends when this actor ends, however that happens."""

    def __init__(self, job: PlacementJob, node: str) -> None:
        """Start the process. `node` is what the server calls the machine."""
        assert len(job.key) < PIPE_ROOM_BYTES and len(job.tls_ca or "") < PIPE_ROOM_BYTES
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # those that Ray has reserved; the worker counts them from 0
        if job.device == "cuda" and gpus:
            node += f", GPU {gpus}"
        command = [
            sys.executable,
            "-P",  # a `workers` folder in the current directory must not hide ours
            *("-m", "servekit.worker", "--connect", job.listen_address, "--model", job.model, "--node", node),
            *("--device", job.device, "--log-level", job.log_level, "--log-format", job.log_format),
            *("--parent-pid", str(os.getpid())),
        ]
        with contextlib.ExitStack() as pipes:
            # Through pipes, so that no file with the key stays behind, whatever ends this process.
            inherited = [_filled_pipe(job.key, pipes)]
            command += ["--key-file", f"/dev/fd/{inherited[0]}"]
            if job.tls_ca is not None:
                inherited.append(_filled_pipe(job.tls_ca, pipes))
                command += ["--tls-ca", f"/dev/fd/{inherited[1]}"]
            # Ray sets the variable for the whole actor, and each rank would use that many threads.
            environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, job.cpus_per_rank))}
            self._command, self._inherited, self._environment = command, inherited, environment
            self._pipes = pipes.pop_all()
        self.process: subprocess.Popen[str] | None = None
        self.last_line = ""  # that it wrote to standard error

    async def run(self) -> tuple[int, str]:
        """Run the worker until it ends. Returns its exit code and its last line on standard error."""
        # The kernel kills the worker when the thread that started it ends: this one, which lives as long as the actor.
        with self._pipes:
            self.process = subprocess.Popen(  # noqa: ASYNC220  # takes a millisecond, and nothing else runs here
                self._command,
                pass_fds=self._inherited,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=self._environment,
                text=True,
                errors="replace",
            )
        return await asyncio.to_thread(self._wait, self.process), self.last_line

    async def leave(self) -> None:
        """Let the worker finish its steps and end; `run` returns then."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def _wait(self, process: subprocess.Popen[str]) -> int:
        """Pass on what the worker logs, to Ray's log of this actor, until the worker ends. Returns its exit code."""
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                sys.stderr.write(line)
                self.last_line = line.strip()
        return process.wait()


def _filled_pipe(text: str, pipes: contextlib.ExitStack) -> int:
    """Return a file descriptor that gives this text and then the end of the file. `pipes` closes it."""
    reader, writer = os.pipe()
    pipes.callback(os.close, reader)
    with os.fdopen(writer, "w") as file:
        file.write(text)
    return reader
