"""Define the messages between a server and the process that places its workers on a cluster: lines of JSON."""

from __future__ import annotations

from msgspec import Struct


class PlacementJob(Struct, frozen=True, kw_only=True):
    """What is placed, and what the workers need to join. The server's first line."""

    cluster_address: str | None  # of Ray; None: the cluster that this machine is part of
    listen_address: str  # at which the workers join, as `unix:PATH` or `tcp://HOST:PORT`
    key: str  # that authenticates the workers
    tls_ca: str | None  # certificates that the server's is signed by, in PEM format; None without TLS
    model: str  # as a worker's --model takes it, on any machine
    device: str  # auto, cpu or cuda
    num_ranks: int  # of each worker
    num_nodes: int = 1  # that the ranks of each worker may be on, each with as many of them
    cpus_per_rank: int
    num_workers: int
    log_level: str
    log_format: str


class SetNumWorkers(Struct, frozen=True, tag="set_num_workers"):
    """From now on there should be so many workers. A line of the server."""

    num_workers: int


class PlacementFailed(Struct, frozen=True, tag="placement_failed"):
    """The cluster cannot be used, or a worker on it ended because the operator must change something first."""

    message: str
