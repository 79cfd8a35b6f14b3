"""Drive prefix cache and workload manager with random orders of operations, by Hypothesis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence, ChargeElsewhere, Commit, Expire, Finish, Plan, Restart
from servekit.scheduler.crash_quarantine import CRASHES_TO_FAIL
from servekit.scheduler.prefix_cache import PrefixCache, chain_hash, salt_hash
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import NEVER, FinishReason, Sequence, Status
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.service import RecklessPredictor
from servekit.simulation.worker import NaiveReference, SimulatedWorker

NUM_BLOCKS = 6


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences of a few words take blocks, write them, publish them and go; what is found is what was meant.

    The model of it: which chain of words each block really holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prefixes = PrefixCache(NUM_BLOCKS)
        self.written: dict[int, tuple[str, ...]] = {}
        self.tables: list[list[int]] = []

    def hashes(self, chain: tuple[str, ...]) -> list[bytes]:
        hashes = [salt_hash(chain[0])]
        for word in chain[1:]:
            hashes.append(chain_hash(hashes[-1], memoryview(word.encode())))
        return hashes[1:]

    @rule(salt=st.sampled_from("xy"), words=st.text("ab", min_size=1, max_size=4))
    def ask(self, salt: str, words: str) -> None:
        """A sequence: it shares what is found, computes the rest and publishes it."""
        chain = (salt, *words)
        hashes = self.hashes(chain)
        found = self.prefixes.find(hashes)
        for index, block in enumerate(found):
            assert self.written[block] == chain[: index + 2], "a block is found that holds something else"
        pool = self.prefixes.pool
        missing = len(hashes) - len(found)
        if missing > pool.num_available - pool.count_cached(found):
            return
        pool.share(found)
        table = found + pool.lease(missing)
        for index in range(len(found), len(hashes)):
            self.written[table[index]] = chain[: index + 2]
            self.prefixes.publish(table[index], hashes[index])
        self.tables.append(table)
        if not pool.num_fenced:  # a fenced block keeps its name, but cannot be had until its step is settled
            assert len(self.prefixes.find(hashes)) == len(hashes), "what was just published is not found"

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), fenced=st.booleans())
    def leave(self, data: st.DataObject, fenced: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.prefixes.pool.release(table[::-1], 0 if fenced else None)

    @rule()
    def settle(self) -> None:
        self.prefixes.pool.settle(0)

    @invariant()
    def invariants_hold(self) -> None:
        self.prefixes.check()


class ManagerMachine(RuleBasedStateMachine):
    """In any order of operations: invariants hold, every token is the reference's, and every sequence is served."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "shortest", "fair"]),
        depth=st.integers(1, 3),
        budget=st.sampled_from([1, 5, 32]),
        caching=st.booleans(),
        max_drafts=st.sampled_from([0, 1, 5]),
    )
    def start(self, policy: str, depth: int, budget: int, caching: bool, max_drafts: int) -> None:
        config = SchedulerConfig(
            num_blocks=8,
            block_size=2,
            max_model_len=100,
            max_num_seqs=3,
            max_num_batched_tokens=budget,
            max_steps_in_flight=depth,
            scheduling_policy=policy,
            enable_prefix_caching=caching,
            max_preemptions=2,
            max_drafts=max_drafts,
        )
        self.manager = WorkloadManager(config, RecklessPredictor(config.block_size))
        self.worker = self.new_worker()
        self.now = 0.0
        self.sequences: list[Sequence] = []
        self.plans: list[StepPlan] = []
        self.num_crashes = 0
        self.last_result = StepResult(0, -1, (), 0.0)

    def new_worker(self) -> SimulatedWorker:
        config = self.manager.config
        return SimulatedWorker(config.num_blocks, config.block_size, config.max_num_batched_tokens)

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        max_tokens=st.integers(1, 9),
        tenant=st.sampled_from("ab"),
        priority=st.integers(-1, 1),
        patience_s=st.sampled_from([3.0, NEVER]),
    )
    def add(self, prompt: list[int], max_tokens: int, tenant: str, priority: int, patience_s: float) -> None:
        command = AddSequence(
            sequence_id=len(self.sequences),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_s=self.now,
            tenant=tenant,
            priority=priority,
            deadline_s=self.now + patience_s,
            has_length_bound=False,
        )
        self.sequences.append(self.manager.apply(command))

    @rule(num_tokens=st.dictionaries(st.sampled_from("abc"), st.integers(0, 500)), max_lead=st.integers(0, 500))
    def charge_elsewhere(self, num_tokens: dict[str, int], max_lead: int) -> None:
        self.manager.apply(ChargeElsewhere(num_tokens, max_lead))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), max_tokens=st.integers(1, 9))
    def fork(self, data: st.DataObject, max_tokens: int) -> None:
        leader = data.draw(st.sampled_from(self.sequences))
        command = AddSequence(
            sequence_id=len(self.sequences),
            prompt_token_ids=tuple(leader.token_ids[: leader.prompt_length]),
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_s=self.now,
            tenant=leader.tenant,
            leader_id=leader.sequence_id,
        )
        self.sequences.append(self.manager.apply(command))

    @rule()
    def plan(self) -> None:
        self.manager.apply(Expire(self.now))
        if (plan := self.manager.apply(Plan(self.now))) is not None:
            self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule(
        deferring=st.sets(st.integers(0, 2)),
        drafts=st.dictionaries(st.integers(0, 2), st.tuples(st.integers(0, 5), st.integers(0, 5))),
    )
    def execute(
        self, deferring: Iterable[int] = (), drafts: Mapping[int, tuple[int, int]] = MappingProxyType({})
    ) -> None:
        self.last_result = self.worker.execute(self.plans.pop(0), frozenset(deferring), drafts)
        self.now += 0.5
        self.manager.apply(Commit(self.last_result, self.now))

    @rule(epochs=st.integers(-1, 0))
    def repeat_a_result(self, epochs: int) -> None:
        result = self.last_result
        stale = StepResult(result.epoch + epochs, result.step_id, result.token_ids, 0.0)
        assert self.manager.commit(stale, self.now) == []

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        was_alive = sequence.status is not Status.FINISHED
        assert self.manager.apply(Finish(sequence.sequence_id, FinishReason.ABORT)) == was_alive
        assert not self.manager.apply(Finish(sequence.sequence_id, FinishReason.ABORT))

    @rule()
    def kill_the_worker(self) -> None:
        self.num_crashes += 1
        failed = self.manager.apply(Restart())
        assert not failed or self.num_crashes >= CRASHES_TO_FAIL
        for sequence in failed:
            self.manager.apply(Finish(sequence.sequence_id, FinishReason.ERROR))
        self.plans.clear()
        self.worker = self.new_worker()

    @invariant()
    def invariants_hold(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for _ in range(2000):
            if not self.manager.has_work:
                break
            self.plan()
            if self.plans:
                self.execute()
        assert not self.manager.has_work, "a sequence is never served"
        assert self.manager.kv_cache.pool.num_available == 8
        for sequence in self.sequences:
            expected = NaiveReference().output(sequence.token_ids[: sequence.prompt_length], sequence.sampling)
            if sequence.finish_reason is not FinishReason.LENGTH:
                expected = expected[: sequence.num_output_tokens]
            assert sequence.output_token_ids == expected


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
