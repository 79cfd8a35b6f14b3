"""Fetch blocks for all ranks on this machine: from an agent that has all of their parts, or from one for each rank."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from servekit.joining.block_receiver import BlockReceiver
from servekit.joining.nixl_transfer import NixlReaders
from servekit.joining.transfer_log import TransferLog
from servekit.protocol.block_ring import BlockRing
from servekit.protocol.messages import BlocksFetched, FetchBlocks


class RankReceivers:
    """A receiver for all ranks together, and one for each of them.

    A prefill worker has one agent if all of its ranks are on one machine. If each of them has an agent of its own, each
    rank here fetches its parts from the rank with the same number there, at the same time as the others.
    """

    def __init__(
        self,
        rings: Sequence[BlockRing],
        key: bytes,
        tls: ssl.SSLContext | None,
        on_fetched: Callable[[BlocksFetched], None],
        readers: NixlReaders | None = None,
    ) -> None:
        """`rings` has one for each rank, for the blocks that come. `on_fetched` is called in a thread."""
        self._on_fetched = on_fetched
        self._warn = TransferLog().warning
        lock = threading.Lock()  # of the rings: a worker may fetch from prefill workers of both kinds
        self._of_all = BlockReceiver(rings, key, tls, on_fetched, lock, readers)
        self._of_each = [
            BlockReceiver([ring], key, tls, partial(self._on_rank_fetched, rank), lock, readers)
            for rank, ring in enumerate(rings if len(rings) > 1 else ())
        ]
        self._lock = threading.Lock()  # of all that follows
        self._answers: dict[int, dict[int, BlocksFetched]] = {}  # by number and rank, until all ranks have answered

    def fetch(self, request: FetchBlocks) -> None:
        """Begin to fetch blocks. Does not wait; `on_fetched` gets those that came for all ranks, perhaps none."""
        if len(request.addresses) == 1:
            self._of_all.fetch(request)
        elif len(request.addresses) == len(self._of_each):
            with self._lock:
                self._answers[request.number] = {}
            for address, receiver in zip(request.addresses, self._of_each, strict=True):
                receiver.fetch(replace(request, addresses=(address,)))
        else:
            self._warn(
                f"KV blocks are not fetched from {len(request.addresses)} agents, because this one has "
                f"{max(1, len(self._of_each))} ranks"
            )
            self._on_fetched(BlocksFetched(request.number))

    def close(self) -> None:
        """End all threads, whatever they wait for."""
        for receiver in (self._of_all, *self._of_each):
            receiver.close()

    def _on_rank_fetched(self, rank: int, answer: BlocksFetched) -> None:
        with self._lock:
            answers = self._answers[answer.number]
            answers[rank] = answer
            if len(answers) < len(self._of_each):
                return
            del self._answers[answer.number]
        self._on_fetched(min(answers.values(), key=lambda each: len(each.keys)))
