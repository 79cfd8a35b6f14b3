"""Compute the work before a new sequence if tenants take turns. Tenants that were served more do not count."""

from __future__ import annotations

from math import ceil

from msgspec.structs import replace

from servekit.routing.replica import Load
from servekit.scheduler.workload_manager import WorkloadManager


def load_before(load: Load, manager: WorkloadManager, tenant: str, length: float) -> Load:
    """Return the load without the waiting sequences that a new one of this tenant overtakes.

    The sequence starts when its tenant's counter, with everything that this tenant has queued before it, is the lowest.
    Until then each other tenant starts sequences until its own counter has reached this value. `length` is the mean
    length of answers.
    """
    if load.queued is None:
        return load
    queue, own = manager.waiting_queue, load.queued.get(tenant)
    floor = min(map(queue.num_served, load.queued), default=0)
    turn = max(floor, queue.num_served(tenant)) + (own.num_tokens + own.num_sequences * length if own else 0)
    num_others = num_overtaken = num_tokens = 0
    for name, count in load.queued.items():  # there may be thousands
        if name == tenant:
            continue
        num_others += count.num_sequences
        num_behind, tokens_each = count.num_sequences, count.num_tokens / count.num_sequences
        if (room := turn - queue.num_served(name)) > 0:
            num_behind -= ceil(room / (tokens_each + length))
        if num_behind > 0:
            num_overtaken += num_behind
            num_tokens += int(num_behind * tokens_each)
    num_looked_up = manager.num_prompt_tokens
    missing_share = 1.0 - manager.num_cached_tokens / num_looked_up if num_looked_up else 1.0
    before = replace(
        load,
        num_waiting=load.num_waiting - num_overtaken,
        num_queued_tokens=load.num_queued_tokens - num_tokens,
        num_prefill_tokens=max(0, load.num_prefill_tokens - int(num_tokens * missing_share)),
    )
    is_first = own is None and num_overtaken == num_others
    if is_first and load.num_running >= manager.config.max_num_seqs and _takes_slot(manager, tenant, turn):
        before.num_waiting, before.num_running = 0, load.num_running - 1
    return before


def _takes_slot(manager: WorkloadManager, tenant: str, turn: float) -> bool:
    """Return whether a tenant may preempt a sequence of another one that was not served less: see Fair.find_victim."""
    queue, held = manager.waiting_queue, manager.slots_by_tenant()
    least = held[tenant] + 2  # with the preemption this tenant has one more, and the other tenant one less
    return any(number >= least and queue.num_served(name) >= turn for name, number in held.items())
