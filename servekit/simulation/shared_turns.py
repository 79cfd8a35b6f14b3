"""Check what `fair` promises of several replicas: none admits a tenant's sequence before that of one served less.

What counts is what all replicas computed for a tenant. What the other ones did since the last exchange is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

from servekit.protocol.messages import StepPlan
from servekit.routing.service_exchange import max_lead
from servekit.scheduler.policy import Fair
from servekit.scheduler.sequence import Status
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.scenario import Client
from servekit.simulation.worker import Violation


class _Span(Struct):
    """The time in which a tenant waits at a replica without a pause."""

    waiting: set[tuple[int, int]]  # sequences, each with its incarnation; one of them stays from each step to the next
    start: int  # its counter when that began, less what was known then of its computed positions


class _View:
    """What one replica computes, and what it knows of the others."""

    def __init__(self, manager: WorkloadManager) -> None:
        assert isinstance(manager.waiting_queue, Fair)
        self.manager = manager
        self.counters = manager.waiting_queue.num_served_tokens
        self.computed: Counter[str] = Counter()  # here, by tenant
        self.reported: Counter[str] = Counter()  # of these, what the others know
        self.known: Counter[str] = Counter()  # computed here, or reported by the others
        self.spans: dict[str, _Span] = {}  # of tenants that wait here

    def served(self, tenant: str) -> int:
        """Return what the counter of a waiting tenant must be."""
        return self.spans[tenant].start + self.known[tenant]

    def count(self, tenant: str, num_tokens: int) -> None:
        self.computed[tenant] += num_tokens
        self.known[tenant] += num_tokens

    def waiting(self, clients: Iterable[Client]) -> dict[str, set[tuple[int, int]]]:
        """Return the sequences in the queue, by tenant. Forks may wait for their leader instead."""
        found: dict[str, set[tuple[int, int]]] = {}
        for sequence in (client.sequence for client in clients):
            if sequence.status is Status.WAITING and sequence.leader is None:
                found.setdefault(sequence.tenant, set()).add((sequence.sequence_id, sequence.incarnation))
        return found

    def update_spans(self, clients: Iterable[Client], may_begin: bool) -> None:
        """End the spans of tenants that do not wait any more, and begin those of others."""
        waiting = {} if self.manager.quarantine else self.waiting(clients)  # suspects run whatever the order
        kept = {name: span for name, span in self.spans.items() if span.waiting & waiting.get(name, set())}
        self.spans = {}
        for tenant, ids in waiting.items():
            if tenant in kept:
                self.spans[tenant] = _Span(ids, kept[tenant].start)
            elif may_begin:
                self.spans[tenant] = _Span(ids, self.counters[tenant] - self.known[tenant])


class SharedTurns:
    """Watches the plans and the exchanges of all replicas."""

    def __init__(self, managers: Sequence[WorkloadManager]) -> None:
        self.num_checked = 0  # pairs of an admitted sequence and a tenant that went on waiting
        self._views = [_View(manager) for manager in managers]
        self._max_lead = max_lead(managers)

    def before_plan(self, index: int, clients: Iterable[Client]) -> None:
        """Note who waits at a replica."""
        self._views[index].update_spans(clients, may_begin=True)

    def after_plan(self, index: int, plan: StepPlan, clients: Collection[Client]) -> None:
        """Check the admissions of a plan, and count what it computes."""
        view = self._views[index]
        served = {tenant: view.served(tenant) for tenant in view.spans}
        view.update_spans(clients, may_begin=False)
        tenants = {client.sequence.slot: client.sequence.tenant for client in clients}
        for assignment in plan.slot_assignments:
            admitted = tenants[assignment.slot]
            for other in view.spans.keys() - {admitted}:
                # In the same step the other one may have been charged before the sequence was admitted.
                if admitted in served and served[admitted] - served[other] > plan.num_tokens:
                    raise Violation(
                        f"replica {index} admits a sequence of {admitted!r} ({served[admitted]} tokens) before one of "
                        f"{other!r} ({served[other]} tokens)"
                    )
                self.num_checked += 1
        for chunk in plan.chunks:
            view.count(tenants[chunk.slot], chunk.num_tokens - chunk.num_drafts)

    def accept(self, index: int, tenant: str, num_drafts: int) -> None:
        """Count drafts that were accepted. Rejected drafts count for no tenant."""
        self._views[index].count(tenant, num_drafts)

    def exchanged(self) -> None:
        """Note that each replica has learned what the others computed."""
        news = [view.computed - view.reported for view in self._views]
        total = sum(news, Counter())
        for view, own in zip(self._views, news, strict=True):
            view.known += total - own
            view.reported = view.computed.copy()
            # Where a lead may have been cut, counters are not known exactly.
            counters = view.counters.values()
            if counters and max(counters) - min(counters) + total.total() >= self._max_lead:
                view.spans = {}
