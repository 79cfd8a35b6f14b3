"""Keep a process running that starts workers on a cluster. They join this server like any other worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.joining.address import TcpAddress, UnixAddress
from servekit.protocol.placement_job import PlacementFailed, PlacementJob, SetNumWorkers
from servekit.simulation.model import is_simulated

MODULES = {"ray": "servekit.ray_cluster.placer"}  # by the setting `placement`
RESTART_DELAY_S = 5.0
END_TIMEOUT_S = 5.0  # to end the workers on the cluster; if the process is killed, the cluster ends them


class WorkerPlacer:
    """The placing process, from the start of the server to its end. Everything runs on the event loop's thread."""

    def __init__(
        self, config: ServeConfig, address: UnixAddress | TcpAddress, key: bytes, on_failure: Callable[[str], None]
    ) -> None:
        """Start it. `on_failure` is called when the operator must change something, and gets a text that says what."""
        self.num_workers = config.data_parallel_size or 1
        self._module = MODULES[config.placement]
        self._on_failure = on_failure
        certificate = config.worker_tls_cert
        self._job = PlacementJob(
            cluster_address=config.ray_address,
            listen_address=str(address),
            key=key.decode("latin-1"),
            tls_ca=None if certificate is None else Path(certificate).read_text(),
            model=model_anywhere(config),
            device=config.device,
            num_ranks=config.tensor_parallel_size * config.pipeline_parallel_size,
            num_nodes=config.ray_nodes_per_replica,
            cpus_per_rank=config.ray_num_cpus,
            num_workers=self.num_workers,
            log_level=config.log_level,
            log_format=config.log_format,
        )
        self._process: asyncio.subprocess.Process | None = None
        self._running = asyncio.create_task(self._run(), name="worker placer")

    def set_num_workers(self, num_workers: int) -> None:
        """Set the number of workers: start more, or let some leave."""
        self.num_workers = num_workers
        self._write(SetNumWorkers(num_workers))

    async def stop(self) -> None:
        """End the workers on the cluster, and the process."""
        self._running.cancel()
        await asyncio.wait([self._running])

    async def _run(self) -> None:
        while True:
            self._on_failure(await self._place())
            await asyncio.sleep(RESTART_DELAY_S)

    async def _place(self) -> str:
        """Run the process until it ends. Returns what happened to it."""
        command = [sys.executable, "-P", "-m", self._module, "--parent-pid", str(os.getpid())]
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=os.setpgrp
            )
        except OSError as error:  # for example, too many processes or open files
            return f"the process that places workers did not start ({error})"
        try:
            self._write(msgspec.structs.replace(self._job, num_workers=self.num_workers))
            await self._read_failures(process)
        finally:
            await self._end(process)
        return f"the process that places workers ended with code {process.returncode}"

    def _write(self, message: msgspec.Struct) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():  # else it ends now; the next one gets `num_workers` with its job
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _read_failures(self, process: asyncio.subprocess.Process) -> None:
        """Report failures until the process ends."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # asyncio drops lines above 64 KiB; Ray may print such lines
                continue
            if not line:
                return
            with contextlib.suppress(msgspec.DecodeError):
                self._on_failure(msgspec.json.decode(line, type=PlacementFailed).message)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Let the process end the workers, and kill the process if this takes too long."""
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with pause_tolerant_timeout(END_TIMEOUT_S):
                await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def check_placement(config: ServeConfig) -> None:
    """Raise ConfigError for a placement on a cluster that cannot work."""
    if config.placement == "local":
        if config.max_data_parallel_size is not None:
            raise ConfigError(
                "max_data_parallel_size has no effect with placement = 'local', which starts --data-parallel-size "
                "workers; set placement = 'ray', or leave it out"
            )
        if config.ray_nodes_per_replica > 1:
            raise ConfigError(
                f"ray_nodes_per_replica = {config.ray_nodes_per_replica} has no effect with placement = 'local'; set "
                "placement = 'ray', or leave it out (workers on several machines without Ray: docs/workers.md)"
            )
        return
    num_ranks, num_nodes = config.tensor_parallel_size * config.pipeline_parallel_size, config.ray_nodes_per_replica
    if num_ranks % num_nodes:
        raise ConfigError(
            f"ray_nodes_per_replica = {num_nodes} does not divide the {num_ranks} ranks of a replica "
            f"(--tensor-parallel-size {config.tensor_parallel_size} times --pipeline-parallel-size "
            f"{config.pipeline_parallel_size}): each node has as many ranks as the others"
        )
    if find_spec("ray") is None:  # it is not imported here, because that takes a second and 100 MB
        raise ConfigError(
            "placement = 'ray' (--placement) needs Ray, which is not installed; in the checkout of servekit run: pip "
            "install '.[ray]'; without a checkout: pip install 'ray[serve]'"
        )
    at_least, at_most = config.data_parallel_size or 1, config.max_data_parallel_size
    if at_most is not None and at_most < at_least:
        raise ConfigError(
            f"max_data_parallel_size = {at_most} is less than data_parallel_size = {at_least}, the number of replicas "
            "to begin with; raise the first, or lower the second"
        )
    if config.devices is not None or ":" in config.device:
        name = "device" if config.devices is None else "devices"
        raise ConfigError(
            f"{name} = {getattr(config, name)!r} (--{name}): with placement = {config.placement!r} the cluster chooses "
            "nodes and GPUs; use --device cuda or --device cpu, or leave it out"
        )


def model_anywhere(config: ServeConfig) -> str:
    """Return the model so that a worker on any node can find it: as an absolute path, or by the name in the setting."""
    model = config.model
    if not is_simulated(model) and Path(model).exists():
        return str(Path(model).resolve())
    return f"{model}@{config.revision}" if config.revision is not None and "@" not in model else model
