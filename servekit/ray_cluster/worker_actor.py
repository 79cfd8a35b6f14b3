"""Own one worker on a node of a Ray cluster: a process of `python -m servekit.worker --connect`.

The worker joins the server as every other worker does. Ray carries no step and no token. Where the ranks of a worker
are on several nodes, there is such a process, with its share of the ranks, on each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys

from msgspec import Struct

from servekit.protocol.placement_job import PlacementJob

PIPE_ROOM_BYTES = 2**15  # a pipe takes more without a reader
# Between those that Ray's workers listen at and those that the kernel gives to outgoing connections.
PORTS = range(20_000, 32_000)


class NodeShare(Struct, frozen=True):
    """The ranks of one node, of a worker whose ranks are on several: which node it is, and where the ranks meet."""

    node_rank: int
    master_addr: str  # of node rank 0
    master_port: int


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
            self._job, self._command, self._inherited, self._environment = job, command, inherited, environment
            self._pipes = pipes.pop_all()
        self.process: subprocess.Popen[str] | None = None
        self.last_line = ""  # that it wrote to standard error
        self._is_leaving = False

    async def free_port(self, address: str) -> int:
        """Return a port of this node that nothing uses now. Raises OSError if there is none."""
        for port in random.sample(PORTS, len(PORTS)):
            with contextlib.suppress(OSError), socket.create_server((address, port), family=_family(address)):
                return port
        raise OSError(f"no port of {address} from {PORTS.start} to {PORTS.stop - 1} is free")

    async def run(self, share: NodeShare | None = None) -> tuple[int, str]:
        """Run the worker, or this node's share of it, until it ends.

        Returns its exit code and its last line on standard error.
        """
        if self._is_leaving:  # it was asked while this actor started
            self._pipes.close()
            return 0, "it was asked to leave before it was started"
        if share is not None:
            self._command += ["--nnodes", str(self._job.num_nodes), "--node-rank", str(share.node_rank)]
            self._command += ["--nproc-per-node", str(self._job.num_ranks // self._job.num_nodes)]
            self._command += ["--master-addr", share.master_addr, "--master-port", str(share.master_port)]
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
        """Let the worker finish its steps and end; `run` returns then, or at once if it has not begun."""
        self._is_leaving = True
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


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _filled_pipe(text: str, pipes: contextlib.ExitStack) -> int:
    """Return a file descriptor that gives this text and then the end of the file. `pipes` closes it."""
    reader, writer = os.pipe()
    pipes.callback(os.close, reader)
    with os.fdopen(writer, "w") as file:
        file.write(text)
    return reader
