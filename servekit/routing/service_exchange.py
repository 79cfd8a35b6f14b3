"""Tell each replica what was computed for tenants on the others, so that tenants share the whole server fairly.

Under the policy `fair` each workload manager counts what it computes for each tenant, and admits sequences of the
tenant with the lowest counter. If one tenant waits on one replica only, and another one is served on all, equal
counters on that replica are not equal shares of the server. So from time to time each manager gets a command that adds
what the others have computed since the last time (docs/design/fairness.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from servekit.scheduler.commands import ChargeElsewhere
from servekit.scheduler.policy import Fair
from servekit.scheduler.workload_manager import WorkloadManager


class ServiceExchange:
    """Remembers what each manager had computed for each tenant when it was asked last."""

    def __init__(self) -> None:
        self._reported: dict[WorkloadManager, dict[str, int]] = {}  # positions computed there, by tenant

    def commands(self, managers: Sequence[WorkloadManager]) -> list[ChargeElsewhere | None]:
        """Return a command for each manager; None where the others have computed nothing since the last call.

        The caller applies them before it calls this again. Takes time linear in the tenants that the managers know.
        """
        before = self._reported
        self._reported = {manager: manager.waiting_queue.num_computed_tokens() for manager in managers}
        computed = [_difference(now, before.get(manager, {})) for manager, now in self._reported.items()]
        total: Counter[str] = Counter()
        for by_tenant in computed:
            total.update(by_tenant)
        limit = max_lead(managers)
        elsewhere = [_difference(total, own) for own in computed]
        return [ChargeElsewhere(by_tenant, limit) if by_tenant else None for by_tenant in elsewhere]


def _difference(counts: dict[str, int], subtracted: dict[str, int]) -> dict[str, int]:
    """Return by how much counts are higher, where they are."""
    return {name: count - subtracted.get(name, 0) for name, count in counts.items() if count > subtracted.get(name, 0)}


def max_lead(managers: Iterable[WorkloadManager]) -> int:
    """Return how far what others compute may put a tenant ahead on a replica, in tokens.

    It is as far as two tenants may drift apart on one replica with the slots of all.
    """
    configs = [manager.config for manager in managers]
    return sum(Fair.max_lag(config.max_num_seqs, config.max_total_tokens) for config in configs)
