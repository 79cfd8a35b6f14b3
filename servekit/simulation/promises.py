"""Check the promises of a policy, from plans and sequences only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

from servekit.protocol.messages import StepPlan
from servekit.scheduler.policy import Fair, Shortest
from servekit.scheduler.sequence import Sequence, Status
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.scenario import Client
from servekit.simulation.worker import Violation


class ServiceLag:
    """Measures, from plans alone, how far the service of two tenants drifts apart while both wait."""

    def __init__(self) -> None:
        self.worst = 0  # by how many tokens one was served more, over any such span from its beginning
        self._service: defaultdict[str, int] = defaultdict(int)
        self._spans: dict[tuple[str, str], int] = {}  # two tenants that both wait: their difference when that began

    def observe(self, plan: StepPlan, clients: Iterable[Client]) -> None:
        sequences = [client.sequence for client in clients]
        tenants = {sequence.slot: sequence.tenant for sequence in sequences}
        for chunk in plan.chunks:
            self._service[tenants[chunk.slot]] += chunk.num_tokens - chunk.num_drafts
        waiting = {s.tenant for s in sequences if s.status is Status.WAITING and s.leader is None}
        spans = {}
        for pair in combinations(sorted(waiting), 2):
            apart = self._service[pair[0]] - self._service[pair[1]]
            spans[pair] = self._spans.get(pair, apart)
            self.worst = max(self.worst, abs(apart - spans[pair]))
        self._spans = spans

    def accept(self, tenant: str, num_drafts: int) -> None:
        """Count drafts that were accepted. Rejected drafts count for no tenant."""
        self._service[tenant] += num_drafts


class Promise:
    """Checks the policy's promise, from plans and sequences alone."""

    def __init__(self, manager: WorkloadManager, lag: ServiceLag | None) -> None:
        """`lag` is None for one of several replicas: a tenant may be served on the others meanwhile."""
        self._manager = manager
        self._lag = lag
        self._policy = manager.config.scheduling_policy
        self._first: Sequence | None = None
        self._is_quarantined = False
        self._oldest: Sequence | None = None
        self._num_overtaking = self._longest = 0
        self._num_suspect_tokens = 0  # computed by suspects, which run alone whatever the order
        self._entitled: Sequence | None = None  # it should start soon
        self._num_steps_entitled = 0
        self._kept: list[tuple[Sequence, int]] = []  # the first-ranked of each tenant, and its share preemptions

    def before_plan(self, clients: Iterable[Client]) -> None:
        clients = list(clients)
        running = [client.sequence for client in clients if client.sequence.status is Status.RUNNING]
        # Suspects run one after the other, whatever their rank, and no other sequence runs.
        self._is_quarantined = bool(self._manager.quarantine)
        self._first = None
        if running and not self._is_quarantined:
            self._first = min(running, key=self._manager.waiting_queue.rank)
        if self._policy == "fair":
            firsts = {each.tenant: each for each in sorted(running, key=lambda each: each.sequence_id, reverse=True)}
            self._kept = [(each, each.num_share_preemptions) for each in firsts.values()]
            entitled = self._find_entitled([client.sequence for client in clients], running)
            if entitled is not self._entitled:
                self._entitled, self._num_steps_entitled = entitled, 0

    def _find_entitled(self, alive: list[Sequence], running: list[Sequence]) -> Sequence | None:
        """The sequence that has a right to start: of the tenant that was served least, within its share of everything.

        Its tenant has a right to an equal part of the slots, and of the blocks less the longest running sequence: in
        whole sequences the others cannot always be reduced to an equal part. Forks may have to wait for their leader.
        """
        queue = self._manager.waiting_queue
        assert isinstance(queue, Fair)
        if self._is_quarantined:
            return None
        # A tenant is not counted before one of its sequences has waited here.
        num_served = {each.tenant: queue.num_served_tokens.get(each.tenant, 0) for each in alive}
        tenants = sorted(num_served, key=num_served.__getitem__)
        if len(tenants) < 2 or num_served[tenants[0]] == num_served[tenants[1]]:
            return None
        own = [each for each in alive if each.tenant == tenants[0]]
        sequence = min((s for s in own if s.status is Status.WAITING), key=lambda s: s.sequence_id, default=None)
        if sequence is None or sequence.leader is not None:
            return None
        config = self._manager.config
        own = [sequence, *(each for each in own if each.status is Status.RUNNING)]

        def max_blocks(sequences: list[Sequence]) -> list[int]:
            return [-(-each.max_length // config.block_size) for each in sequences]

        found = {block for each in running for block in each.kv.table[: each.kv.num_found]}
        num_blocks = config.num_blocks - len(found) - config.max_num_seqs  # rounding costs a block for each sequence
        has_slot = len(own) <= config.max_num_seqs // len(tenants)
        is_small = len(tenants) * (sum(max_blocks(own)) + max(max_blocks(running), default=0)) <= num_blocks
        return sequence if has_slot and is_small else None

    def after_plan(self, plan: StepPlan, now: float, clients: Iterable[Client]) -> None:
        if self._first is not None and self._first.status is Status.WAITING:
            raise Violation(f"{self._first} was preempted, but was the first-ranked")
        new_slots = {assignment.slot for assignment in plan.slot_assignments}
        if len(new_slots) > self._manager.config.max_admissions_per_step:
            raise Violation(f"a step admits {len(new_slots)} sequences")
        admitted, waiting = [], []
        for client in clients:
            sequence = client.sequence
            if sequence.last_step_id == plan.step_id:
                if sequence.deadline_s <= now or (sequence.ttft_deadline_s <= now and not client.received):
                    raise Violation(f"{sequence} is computed after its deadline")
                if sequence.slot in new_slots:
                    admitted.append(sequence)
            if sequence.status is Status.WAITING:
                waiting.append(sequence)
        if self._policy == "fair":
            self._check_lag(plan)
            self._check_shares(plan, [client.sequence for client in clients])
        elif not admitted or not waiting or self._is_quarantined:
            return
        elif self._policy == "shortest":
            self._check_overtaking(admitted, waiting)
        else:
            rank = self._manager.waiting_queue.rank
            last = max(admitted, key=rank)
            for sequence in waiting:  # forks may wait for their leader instead
                if sequence.leader is None and rank(sequence) < rank(last):
                    raise Violation(f"{last} was admitted before {sequence}")

    def _check_lag(self, plan: StepPlan) -> None:
        if self._lag is None:
            return
        config = self._manager.config
        if self._is_quarantined:
            self._num_suspect_tokens += plan.num_tokens
        max_lag = Fair.max_lag(config.max_num_seqs, config.max_total_tokens)
        max_lag += 2 * (self._manager.num_deferrals * config.max_steps_in_flight + self._num_suspect_tokens)
        if self._lag.worst > max_lag:
            raise Violation(f"two tenants drifted {self._lag.worst} tokens apart, the bound is {max_lag}")

    def _check_shares(self, plan: StepPlan, alive: list[Sequence]) -> None:
        for sequence, num_share_preemptions in self._kept:
            if sequence.num_share_preemptions > num_share_preemptions:
                raise Violation(f"{sequence} was preempted for a share, but was the first-ranked of its tenant")
        if self._entitled is None or self._entitled.status is not Status.WAITING:
            return
        in_step = [sequence for sequence in alive if sequence.last_step_id == plan.step_id]
        has_prefill = any(sequence.first_sampled_step_id in (None, plan.step_id) for sequence in in_step)
        if not has_prefill and plan.num_tokens < self._manager.step_token_limit:
            self._num_steps_entitled += 1
        max_num_steps = self._manager.config.max_steps_in_flight + 2
        if self._num_steps_entitled > max_num_steps:
            raise Violation(f"{self._entitled} waits for its share for more than {max_num_steps} steps")

    def _check_overtaking(self, admitted: list[Sequence], waiting: list[Sequence]) -> None:
        # Forks that wait for their leader's prompt are not in the queue: they have nothing to compute yet.
        queued = [sequence for sequence in waiting if sequence.num_missing]
        if not queued:
            return
        oldest = min(queued, key=lambda sequence: sequence.sequence_id)
        if oldest is not self._oldest:
            self._oldest, self._num_overtaking, self._longest = oldest, 0, 0
        lengths = [sequence.num_missing for sequence in admitted if sequence.sequence_id > oldest.sequence_id]
        self._num_overtaking += sum(lengths)
        self._longest = max(self._longest, *lengths, 0)
        # The policy's limit, and once more while it is overdue and a running prompt is first. In both cases the last
        # prompt may exceed the limit.
        limit = 2 * Shortest.max_overtaking_tokens(oldest) + 2 * self._longest
        if self._num_overtaking > limit:
            raise Violation(f"{self._num_overtaking} tokens overtook {oldest}, at most {limit:.0f} may")
