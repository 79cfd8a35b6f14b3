"""Gather ranks that join one by one, from several machines, until they are a group, which is one worker."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from servekit.executor.worker_connection import WorkerConnection
from servekit.executor.worker_group import WorkerGroup
from servekit.protocol.handshake import Offer
from servekit.protocol.messages import LoadModel, WorkerReady

log = logging.getLogger("servekit")

NAME_BYTES = 16  # of a group; no other one, and no earlier one at the same address, has the same


class JoinedRank(Struct, frozen=True):
    """A rank that has joined: authenticated, and without a model yet."""

    connection: WorkerConnection
    offer: Offer


class GatheredRanks:
    """The ranks that wait for others. Those that name the same rendezvous are one group."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[int, JoinedRank]] = {}  # by rendezvous, and by the number of the rank
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return sum(len(ranks) for ranks in self._groups.values())

    def add(self, rank: JoinedRank) -> list[JoinedRank] | None:
        """Take a rank. Returns all ranks of its group, in their order, when it is complete, and else None.

        A rank takes the place of an older one of the same number. That is probably the last connection of the same
        agent, whose end is not noticed yet, and would keep this one from joining.
        """
        offer, name = rank.offer, rank.connection.name
        which = f"rank {offer.rank} of {offer.num_ranks} at {offer.rendezvous}"
        if (older := self._groups.get(offer.rendezvous, {}).get(offer.rank)) is not None:
            log.warning("worker %s takes the place of %s: both are %s", name, older.connection.name, which)
            self._drop(older)
        ranks = self._groups.setdefault(offer.rendezvous, {})
        ranks[offer.rank] = rank
        rank.connection.on_loss = partial(self._on_loss, rank)
        if missing := [str(number) for number in range(offer.num_ranks) if number not in ranks]:
            log.info("worker %s is %s; the model is loaded when rank %s has come", name, which, ", ".join(missing))
            return None
        del self._groups[offer.rendezvous]
        return [ranks[number] for number in range(offer.num_ranks)]

    async def stop(self) -> None:
        """Close the connections of the ranks that wait here."""
        for rank in [rank for ranks in self._groups.values() for rank in ranks.values()]:
            self._drop(rank)
        await asyncio.gather(*self._ending)

    def _on_loss(self, rank: JoinedRank) -> None:
        log.info("worker %s has gone, while it waited for other ranks", rank.connection.name)
        self._drop(rank)

    def _drop(self, rank: JoinedRank) -> None:
        """Forget a rank, and close its connection."""
        ranks = self._groups[rank.offer.rendezvous]
        del ranks[rank.offer.rank]
        if not ranks:
            del self._groups[rank.offer.rendezvous]
        rank.connection.on_loss = lambda: None
        task = asyncio.create_task(rank.connection.end(), name=f"ends worker {rank.connection.name}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def make_group(ranks: Sequence[JoinedRank], load: LoadModel) -> WorkerGroup:
    """Return ranks that have joined as one worker, which has no model yet."""

    def take(number: int, on_loss: Callable[[], None]) -> WorkerConnection:
        ranks[number].connection.on_loss = on_loss
        return ranks[number].connection

    rendezvous = f"{ranks[0].offer.rendezvous}/{secrets.token_hex(NAME_BYTES)}"
    return WorkerGroup(len(ranks), len(ranks) - load.tensor_parallel_size, take, lambda: None, rendezvous)


def offer_of(ranks: Sequence[JoinedRank]) -> Offer:
    """Return what ranks offer together: what the first one does, on all of their hosts."""
    hosts = dict.fromkeys(rank.offer.host for rank in ranks)
    return replace(ranks[0].offer, host=" and ".join(hosts))


def with_hosts(ready: WorkerReady, ranks: Sequence[JoinedRank]) -> WorkerReady:
    """Return what a group has reported, with the host of each rank, if each has said where it runs."""
    if len(ready.ranks) != len(ranks):
        return ready
    places = zip(ready.ranks, ranks, strict=True)
    return replace(ready, ranks=tuple(replace(place, host=rank.offer.host) for place, rank in places))


def size_mismatch(offer: Offer, load: LoadModel) -> str | None:
    """Return why a rank that joins does not fit the model's ranks; None if it does."""
    if not offer.num_ranks or (offer.num_ranks == load.num_ranks and offer.rank < load.num_ranks):
        return None
    return (
        f"the worker is rank {offer.rank} of {offer.num_ranks} (--nnodes times --nproc-per-node), and the server "
        f"divides the model among {load.num_ranks} ranks (--tensor-parallel-size {load.tensor_parallel_size}, "
        f"--pipeline-parallel-size {load.pipeline_parallel_size})"
    )
