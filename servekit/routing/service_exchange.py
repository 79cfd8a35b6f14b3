"""Tell each replica what was computed for tenants on the others, so that tenants share the whole server fairly.

Under the policy `fair` each workload manager counts what it computes for each tenant, and admits sequences of the
tenant with the lowest counter. If one tenant waits on one replica only, and another one is served on all, equal
counters on that replica are not equal shares of the server. So at regular times each manager gets a command that adds
what the others have computed since the command before (docs/design/fairness.md).

One exchange asks each manager, and then tells each one. With thousands of tenants each of these calls takes a
millisecond, so the caller may do other work between them: `begin`, then `collect` from each manager, then a `command`
for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from servekit.scheduler.commands import ChargeElsewhere
from servekit.scheduler.policy import Fair
from servekit.scheduler.workload_manager import WorkloadManager


class ServiceExchange:
    """Records what each manager had computed for each tenant when it was last asked."""

    def __init__(self) -> None:
        self._reported: dict[WorkloadManager, dict[str, int]] = {}  # positions computed there, by tenant
        self._computed: dict[WorkloadManager, dict[str, int]] = {}  # of these, since the exchange before this one
        self._total: Counter[str] = Counter()  # of all managers that were asked in this exchange
        self._max_lead = 0

    def begin(self, managers: Sequence[WorkloadManager]) -> None:
        """Begin an exchange among these managers, when the last one is complete. Forget the others."""
        self._reported = {manager: self._reported.get(manager, {}) for manager in managers}
        self._computed = {}
        self._total = Counter()
        self._max_lead = max_lead(managers)

    def collect(self, manager: WorkloadManager) -> None:
        """Ask a manager, once in each exchange. Takes time linear in the tenants that it knows."""
        computed = manager.waiting_queue.num_computed_tokens()
        self._computed[manager] = _difference(computed, self._reported[manager])
        self._reported[manager] = computed
        self._total.update(self._computed[manager])

    def command(self, manager: WorkloadManager) -> ChargeElsewhere | None:
        """Return what the others computed, when all were asked; None if that is nothing. The caller applies it.

        Takes time linear in the tenants for which any of them computed.
        """
        elsewhere = _difference(self._total, self._computed[manager])
        return ChargeElsewhere(elsewhere, self._max_lead) if elsewhere else None

    def commands(self, managers: Sequence[WorkloadManager]) -> list[ChargeElsewhere | None]:
        """Return the commands of a whole exchange, one for each manager."""
        self.begin(managers)
        for manager in managers:
            self.collect(manager)
        return [self.command(manager) for manager in managers]


def _difference(counts: Mapping[str, int], subtracted: Mapping[str, int]) -> dict[str, int]:
    """Return by how much counts are higher, where they are."""
    before = subtracted.get
    return {name: change for name, count in counts.items() if (change := count - before(name, 0)) > 0}


def max_lead(managers: Iterable[WorkloadManager]) -> int:
    """Return the largest lead, in tokens, that a tenant may get on one replica from work on the others.

    It is as far as two tenants may drift apart on one replica with the slots of all.
    """
    configs = [manager.config for manager in managers]
    return sum(Fair.max_lag(config.max_num_seqs, config.max_total_tokens) for config in configs)
