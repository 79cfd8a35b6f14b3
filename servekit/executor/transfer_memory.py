"""Hold the memory through which prefill workers hand KV blocks over to decode workers on the same machine.

Workers that join have such memory from their agents, which carry the blocks over the network.

It is the server's, because it has to outlive workers: a worker that is started again finds what the lost one has sent.
It consists of open files without names, so nothing is left behind when the server is killed.
"""

from __future__ import annotations

import os

from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.protocol.block_ring import open_memory
from servekit.protocol.messages import LoadModel
from servekit.scheduler.kv_connector import ReplicaRole


def replica_role(config: ServeConfig, index: int) -> ReplicaRole:
    """Return the role of a replica whose workers the server starts: the first ones are for prefill."""
    if not config.prefill_replicas:
        return ReplicaRole.BOTH
    return ReplicaRole.PREFILL if index < config.prefill_replicas else ReplicaRole.DECODE


class TransferMemory:
    """One open file for each rank of each prefill replica; none if prefill and decode are not apart.

    Ranks with the same number have the same part of each block, and share a file.
    """

    def __init__(self, config: ServeConfig) -> None:
        """Reserve the memory. It is taken page by page when blocks are written.

        Raises ConfigError for settings with which nothing can be handed over, or if the kernel gives no memory.
        """
        self._fds: tuple[int, ...] = ()
        if not config.prefill_replicas:
            return
        _check(config)
        if config.lets_workers_join:
            return
        num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
        names = map(str, range(config.prefill_replicas * num_ranks))
        try:
            self._fds = open_memory(names, config.kv_transfer_memory_bytes // num_ranks)
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_memory_bytes = {config.kv_transfer_memory_bytes} (--kv-transfer-memory-bytes) for each "
                f"of {config.prefill_replicas} prefill replicas cannot be reserved: {error}; lower it"
            ) from None

    @property
    def fds(self) -> tuple[int, ...]:
        """The open files that every worker inherits."""
        return self._fds

    def apply(self, load: LoadModel, index: int, role: ReplicaRole) -> LoadModel:
        """Return the message that loads the model in the worker of a replica."""
        own = index if role is ReplicaRole.PREFILL else None
        return replace(load, kv_transfer_fds=self._fds, kv_transfer_own=own) if self._fds else load

    def close(self) -> None:
        """Give the memory back, when no worker will be started any more."""
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)


def _check(config: ServeConfig) -> None:
    """Raise ConfigError for settings with which nothing can be handed over."""
    what = f"prefill_replicas = {config.prefill_replicas} (--prefill-replicas)"
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.lets_workers_join and config.starts_workers:
        raise ConfigError(
            f"{what} works with workers that the server starts itself, or with workers that join, and not with both: "
            "leave out --data-parallel-size and --devices, or --listen-workers"
        )
    if not config.enable_prefix_caching:
        raise ConfigError(
            f"{what} needs the prefix cache, in which blocks are found; leave out --no-enable-prefix-caching"
        )
    if config.kv_offload_memory_bytes is not None:
        raise ConfigError(f"{what} does not work together with --kv-offload-memory-bytes yet; leave one of them out")
    if config.lets_workers_join and config.placement == "local":
        return  # any number of workers may join
    num_replicas = config.data_parallel_size or 1
    if config.devices is not None:
        num_replicas = len(config.devices.split(",")) // num_ranks
    if config.prefill_replicas is not None and config.prefill_replicas >= num_replicas:
        raise ConfigError(
            f"{what} leaves no replica for decode: there are {num_replicas}; raise --data-parallel-size, or name more "
            "--devices"
        )
