"""Choose the sequences that a prefill replica hands over, and the decode replica that continues each.

A sequence is handed over when it has its first token. If no decode replica has room for it, the prefill replica
continues it, and it is checked again after each step. So if one kind of replica is full, steps become slower, but no
sequence waits.

Between machines, the decode replica fetches the sequence's blocks first (`block_fetches.py`). The sequence moves when
they have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from servekit.routing.block_fetches import MAX_FETCHES, BlockFetches, Fetch
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.workload_manager import WorkloadManager

# Blocks that a decode replica computes again, besides the last one, which is never full. Those that were computed in
# steps in flight are not sent yet. With more, prompts would be computed where only decodes should be.
MAX_RECOMPUTED_BLOCKS = 2


class HandOver(Struct, frozen=True):
    """A sequence that should move to a decode replica."""

    sequence_id: int
    target_id: int
    keys: tuple[bytes, ...]  # of its blocks that can be loaded there, or fetched for that


def find_hand_overs(
    source: WorkloadManager, targets: Mapping[int, WorkloadManager], fetches: BlockFetches | None = None
) -> Iterator[HandOver]:
    """Choose the sequences that go on elsewhere, and where. `targets` are the decode replicas that take sequences.

    The caller carries out each one before it asks for the next one, or begins to fetch its blocks. Those of `fetches`
    are on the way.
    """
    if not targets or source.quarantine:
        return
    fetches = fetches or BlockFetches()
    for sequence in source.past_prompt:
        leader = sequence.leader
        if sequence.sequence_id in fetches or (leader is not None and leader.sequence_id in fetches):
            continue  # forks share the blocks of their leader's prompt: they follow it
        keys = sequence.kv.hashes[: source.kv_connector.num_sent(sequence.kv.hashes)]
        if num_full_blocks(source, sequence) - len(keys) > MAX_RECOMPUTED_BLOCKS:
            continue  # its blocks were overwritten, so continuing here takes less time
        fitting = {
            target_id: manager
            for target_id, manager in targets.items()
            if sequence.max_length <= manager.config.max_total_tokens
        }
        target_id = _choose(sequence, keys, fitting, fetches)
        if target_id is not None:
            yield HandOver(sequence.sequence_id, target_id, tuple(keys))
        elif fitting:
            return  # the order is strict, as of admissions; and this is asked after each step


def num_full_blocks(manager: WorkloadManager, sequence: Sequence) -> int:
    """Return how many full blocks a sequence has whose keys and values are computed, or will be in steps in flight."""
    return (sequence.num_tokens - 1) // manager.config.block_size


def can_move(source: WorkloadManager, sequence_id: int, target: WorkloadManager) -> bool:
    """Whether a sequence should move to a replica that has fetched its blocks.

    It has gone on meanwhile: perhaps it has ended, or has more blocks than were fetched.
    """
    sequence = source.find(sequence_id)
    if sequence is None or source.quarantine or sequence.max_length > target.config.max_total_tokens:
        return False
    num_there = target.kv_cache.prefixes.num_known(sequence.kv.hashes)
    return num_full_blocks(source, sequence) - num_there <= MAX_RECOMPUTED_BLOCKS


def _choose(
    sequence: Sequence, keys: list[bytes], targets: Mapping[int, WorkloadManager], fetches: BlockFetches
) -> int | None:
    """Return the least loaded replica that has room for a sequence; None if there is none.

    The replica of its leader comes first: forks share the blocks of the prompt.
    """
    leader = sequence.leader
    loads = {
        target_id: (
            leader is None or manager.find(leader.sequence_id) is None,
            (manager.num_running + manager.num_waiting) / manager.config.max_num_seqs,
            -manager.kv_cache.pool.num_available,
        )
        for target_id, manager in targets.items()
        if _has_room(manager, sequence, keys, fetches.to(target_id))
    }
    return min(loads, key=loads.__getitem__) if loads else None


def _has_room(manager: WorkloadManager, sequence: Sequence, keys: list[bytes], coming: list[Fetch]) -> bool:
    """Whether a sequence will probably start at once: there is a slot, and blocks up to its predicted end.

    Blocks that are fetched must also fit into memory beside those on the way: later ones overwrite the oldest.
    """
    if not manager.has_work and not coming:
        return True
    if len(coming) >= MAX_FETCHES or not _have_room_in_memory(manager, keys, coming):
        return False
    if manager.num_running + manager.num_waiting + len(coming) >= manager.config.max_num_seqs:
        return False
    num_blocks = manager.kv_cache.num_blocks_at_end(sequence, 0) + sum(fetch.num_blocks for fetch in coming)
    return num_blocks <= manager.kv_cache.pool.num_available - manager.num_waiting_blocks


def _have_room_in_memory(manager: WorkloadManager, keys: list[bytes], coming: list[Fetch]) -> bool:
    """Whether blocks that are fetched would overwrite none of those on the way. Without these, they may try."""
    num_blocks = (
        manager.config.num_transfer_blocks
    )  # its two memories, for what it sends and fetches, are equally large
    if not coming or not num_blocks:
        return True
    num_missing = len(keys) - manager.kv_cache.prefixes.num_known(keys)
    return sum(len(fetch.keys) for fetch in coming) + num_missing <= num_blocks
