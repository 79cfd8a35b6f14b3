"""Track the hand-overs whose KV blocks are on the way to a decode replica on another machine.

On one machine, a decode replica can load a block as soon as the prefill replica has computed it. Between two machines
the blocks are fetched first, and the prefill replica goes on with the sequence meanwhile. So a slow or lost transfer
delays no step: the sequence stays where it is.

While blocks are on the way, the room that their sequence needs is kept for it. If a transfer fails, no other one
between the same two replicas begins for a while: longer after each failure.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

MAX_FETCHES = 4  # at the same time, for one decode replica: more would share the network, and all arrive later
FETCH_TIMEOUT_S = 30.0  # after which an answer is not waited for; the agent gives up long before
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0  # after a failure


class Fetch(Struct, frozen=True):
    """The blocks of one sequence, on the way from one replica to another."""

    number: int
    sequence_id: int
    source_id: int
    target_id: int
    keys: tuple[bytes, ...]
    num_blocks: int  # that the sequence will need at the target
    ends_s: float  # when it is given up


class BlockFetches:
    """All fetches of a server. The caller gives the time."""

    def __init__(self) -> None:
        self.num_failed = 0
        self._fetches: dict[int, Fetch] = {}  # by number, the oldest first
        self._num_begun = 0
        self._pauses: dict[tuple[int, int], tuple[int, float]] = {}  # by replicas: (failures in a row, until when)

    def __contains__(self, sequence_id: int) -> bool:
        """Whether blocks of a sequence are on the way."""
        return any(fetch.sequence_id == sequence_id for fetch in self._fetches.values())

    def to(self, target_id: int) -> list[Fetch]:
        """Return the fetches of one decode replica."""
        return [fetch for fetch in self._fetches.values() if fetch.target_id == target_id]

    def may_begin(self, source_id: int, target_id: int, now_s: float) -> bool:
        """Whether another fetch between two replicas may begin now."""
        _, until_s = self._pauses.get((source_id, target_id), (0, now_s))
        return until_s <= now_s and len(self.to(target_id)) < MAX_FETCHES

    def begin(
        self, sequence_id: int, source_id: int, target_id: int, keys: tuple[bytes, ...], num_blocks: int, now_s: float
    ) -> Fetch:
        """Note that a replica is asked to fetch blocks."""
        self._num_begun += 1
        fetch = Fetch(self._num_begun, sequence_id, source_id, target_id, keys, num_blocks, now_s + FETCH_TIMEOUT_S)
        self._fetches[fetch.number] = fetch
        return fetch

    def end(self, number: int, target_id: int, keys: tuple[bytes, ...], now_s: float) -> Fetch | None:
        """Note the blocks that a replica has. None if these are not of a fetch that is waited for."""
        fetch = self._fetches.get(number)
        if fetch is None or fetch.target_id != target_id or keys != fetch.keys[: len(keys)]:
            return None
        del self._fetches[number]
        if len(keys) == len(fetch.keys):
            self._pauses.pop((fetch.source_id, target_id), None)
        else:
            self._failed(fetch, now_s)
        return fetch

    def expire(self, now_s: float) -> Iterator[Fetch]:
        """Give up the fetches without an answer, and return each of them."""
        for fetch in list(self._fetches.values()):
            if fetch.ends_s <= now_s:
                del self._fetches[fetch.number]
                self._failed(fetch, now_s)
                yield fetch

    def forget_target(self, target_id: int) -> None:
        """Give up the fetches of a replica whose worker is lost. Its next worker is asked anew."""
        for fetch in self.to(target_id):
            del self._fetches[fetch.number]

    def _failed(self, fetch: Fetch, now_s: float) -> None:
        self.num_failed += 1
        replicas = fetch.source_id, fetch.target_id
        num_before, until_s = self._pauses.get(replicas, (0, now_s))
        if now_s < until_s:
            return  # it began before the failure that the pause is for
        pause_s = min(MAX_PAUSE_S, MIN_PAUSE_S * 2.0 ** min(num_before, 10))
        self._pauses[replicas] = num_before + 1, now_s + pause_s
