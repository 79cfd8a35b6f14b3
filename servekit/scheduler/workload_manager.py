"""Decide, step by step, which tokens a worker computes next.

`plan` says what the next step computes, `commit` applies what it sampled. A sequence leaves the manager only by
`finish` (it ends) or `withdraw` (it continues on another manager). All of this depends only on the state and the
commands: no clock, no I/O, no randomness, no torch. The engine in production and the simulation use the same code and
the same commands.

How one step is decided (docs/ARCHITECTURE.md has a picture, with the same numbers):

1. Every running sequence that has computed its prompt computes one position, by rank. If it needs a block and none is
   available, the last-ranked running sequence is preempted for it. If no sequence of lower rank may be preempted, or if
   fenced blocks are about to become available, it keeps its slot and waits.
2. The rest of `max_num_batched_tokens` is for prefill; the inter-token latency target may limit it further. Before the
   first unfinished prompt come waiting sequences that outrank it; or, under a policy with a share for short prompts,
   all shorter prompts, up to that share.
3. Then the first unfinished prompt, and the other running ones.
4. Then the sequences that the waiting queue proposes, as long as there are tokens, slots and memory, up to
   `max_admissions_per_step`.
5. Tokens that are still left are for drafts (speculative decoding): a sequence of part 1 computes positions after its
  own, for tokens that the worker guesses. No sequence waits or is preempted for a draft.

No sequence is admitted in a step in which a running one found no block: then none is left, and an admitted sequence
takes at least one.

Invariants, each checked by `check` or by the simulation:

- The first-ranked running sequence is never preempted, and no sequence is accepted that could not run alone, so there
  is always progress.
- A sequence is preempted at most `max_preemptions` times for a shortage of blocks. After that it is admitted only with
  all the blocks it can ever need, so no shortage can stop it again.
- The first-ranked running sequence of each tenant is never preempted for another tenant's share.
- The result of a step is applied once, in order, to the incarnations that it was planned for.
- A sequence whose token the worker deferred continues from its last known position, in a new incarnation.
- No token is committed that was computed from a block which the KV connector failed to load.

Continuous batching: Yu et al., "Orca", OSDI 2022, section 4. Chunked prefill under one token budget: Agrawal et al.,
"Sarathi-Serve", OSDI 2024, section 4.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from itertools import accumulate
from math import inf
from typing import Any, cast

from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan, StepResult, TransferReport
from servekit.requests.time_causes import TimeCause
from servekit.scheduler.commands import (
    AddSequence,
    AnnounceBlocks,
    ChargeElsewhere,
    Commit,
    Expire,
    Finish,
    Operation,
    Outcome,
    Plan,
    Restart,
    Withdraw,
)
from servekit.scheduler.crash_quarantine import CrashQuarantine
from servekit.scheduler.deadlines import Deadlines
from servekit.scheduler.draft_length import DraftLengths
from servekit.scheduler.kv_cache_manager import KVCacheManager, PrefixMatch
from servekit.scheduler.kv_connector import KVConnector, Stored
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.policy import POLICIES
from servekit.scheduler.prefill_limiter import PrefillLimiter
from servekit.scheduler.prefix_cache import HashBlock, chain_hash
from servekit.scheduler.queued_work import QueuedWork
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason, Sequence, Status
from servekit.scheduler.sequence_history import ManagerLog, SequenceHistory
from servekit.scheduler.step import SequenceToken, Step, by_token


class WorkloadManager:
    """Owns every sequence and every block of one worker.

    `epoch` names the worker's incarnation; plans carry it and results must match it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        output_lengths: OutputLengthPredictor | None = None,
        hash_block: HashBlock = chain_hash,
    ) -> None:
        self.config = config
        self.epoch = 0
        self.output_lengths = output_lengths or OutputLengthPredictor(config.block_size)
        self._hash_block = hash_block
        self.kv_connector = KVConnector(config.has_kv_connector, config.role, config.num_transfer_blocks)
        self.kv_cache = self._new_kv_cache()
        self.waiting_queue = POLICIES[config.scheduling_policy]()
        self.prefill_limiter = PrefillLimiter(config.itl_target_s, config.max_num_batched_tokens)
        self.draft_lengths = DraftLengths(config.max_drafts, config.max_steps_in_flight)
        self.quarantine = CrashQuarantine(config.max_steps_in_flight)
        self.step_token_limit = config.max_num_batched_tokens  # reduced for a while after a step ran out of memory
        self.num_preemptions = 0
        self.num_share_preemptions = 0  # preemptions among these for a tenant that held less
        self.num_prompt_tokens = 0  # looked up in the prefix cache
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache
        self.num_stale_results = 0
        self.num_deferrals = 0  # times that the worker sampled no token for a sequence, to do it in a later step
        # What must be computed before all waiting sequences, and all running ones in their prompts, sample a token. Of
        # waiting ones, as far as was known when they were queued. Steps in flight count as done.
        self.num_prefill_tokens = 0
        self.queued = QueuedWork()  # sequences that were never admitted
        self._sequences: dict[int, Sequence] = {}  # alive: running, queued, or waiting for their leader
        self._running: list[Sequence] = []  # by rank
        self._followers: defaultdict[int, list[Sequence]] = defaultdict(list)  # by the leader they wait for
        self._leaders_ready: list[Sequence] = []  # leaders whose prompts the newest step completes
        # The first in the queue, if there was no room for it and no block has been released since.
        self._blocked: Sequence | None = None
        self._deadlines = Deadlines()
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[Step] = deque()
        self.next_step_id = 0
        self._last_commit_s = 0.0
        # No decision depends on it. It explains where the time of sequences went.
        self.log = ManagerLog(config.scheduling_policy)

    # -- what others may read -------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def num_followers(self) -> int:
        """How many of the waiting sequences wait for their leader's prompt, and not in the queue."""
        return sum(map(len, self._followers.values()))

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def steps_in_flight(self) -> deque[Step]:
        """The steps in flight, the oldest first. Only the manager writes them."""
        return self._in_flight

    @property
    def num_prefill_tokens_in_flight(self) -> int:
        """How many tokens of prompts the steps in flight compute."""
        return sum(step.num_prefill_tokens for step in self._in_flight)

    def find(self, sequence_id: int) -> Sequence | None:
        """The sequence with this id; None if it has ended, or was never here."""
        return self._sequences.get(sequence_id)

    @property
    def sequence_ids(self) -> list[int]:
        """The ids of all living sequences, in order of arrival."""
        return sorted(self._sequences)

    @property
    def past_prompt(self) -> list[Sequence]:
        """The running sequences that have tokens, by rank: another replica could go on with them."""
        return [sequence for sequence in self._running if sequence.num_output_tokens]

    @property
    def num_waiting_blocks(self) -> int:
        """How many blocks the waiting sequences need at once. Takes time linear in the number of all sequences."""
        block_size = self.config.block_size
        return sum(
            -(-sequence.num_tokens // block_size)
            for sequence in self._sequences.values()
            if sequence.status is Status.WAITING
        )

    def slots_by_tenant(self) -> Counter[str]:
        """How many running sequences each tenant has. Takes time linear in their number."""
        return Counter(sequence.tenant for sequence in self._running)

    @staticmethod
    def prefill_left(sequence: Sequence) -> int:
        """What a sequence contributes to `num_prefill_tokens`."""
        if sequence.status is Status.WAITING:
            return sequence.num_missing
        return sequence.num_needed if sequence.first_sampled_step_id is None else 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight)

    @property
    def num_leaked(self) -> int:
        """Blocks and slots that are neither held nor available, or counted twice. Any number but 0 is a bug."""
        pool = self.kv_cache.pool
        num_held = pool.num_leased + pool.num_fenced + pool.num_reserved if self.has_work else 0
        num_blocks = abs(pool.num_blocks - pool.num_available - num_held)
        return num_blocks + abs(self.config.max_num_seqs - len(self._free_slots) - len(self._running))

    @property
    def next_deadline_s(self) -> float:
        """The next deadline; infinite if there is none."""
        return self._deadlines.next_s

    # -- the commands ---------------------------------------------------------------------------------------------

    def apply(self, command: Operation[Outcome]) -> Outcome:
        """Carry out one command: call the method of its name, and return what that returns."""
        outcome: Any = None
        match command:
            case Plan():
                outcome = self.plan(command.now_s)
            case Commit():
                outcome = self.commit(command.result, command.now_s)
            case Expire():
                outcome = self.expire(command.now_s)
            case AddSequence():
                outcome = self.add(command)
            case Finish():
                outcome = self.finish(command.sequence_id, command.reason, command.num_output_tokens)
            case Withdraw():
                outcome = self.withdraw(command.sequence_ids, command.is_hand_over)
            case ChargeElsewhere():
                self.waiting_queue.charge_elsewhere(command.num_tokens, command.max_lead)
            case AnnounceBlocks():
                self.kv_connector.announce(command.keys)
            case Restart():
                outcome = self.restart(command.is_out_of_memory)
            case _:
                raise TypeError(f"{command!r} is not a command of the workload manager")
        return cast(Outcome, outcome)

    def add(self, command: AddSequence) -> Sequence:
        """Make a sequence; it starts when its turn comes, or continues its progress. Raises ContextTooLong."""
        sampling = command.sampling
        self.config.check_fits(len(command.prompt_token_ids), sampling.max_tokens)
        assert command.sequence_id not in self._sequences, f"sequence id {command.sequence_id} is in use"
        # A leader that has ended has nothing to share; what it computed may still be found in the prefix cache.
        leader = None if command.leader_id is None else self._sequences.get(command.leader_id)
        history = None if command.progress is None else command.progress.history
        if history is None:
            history = SequenceHistory(command.arrival_s, self.log)
        else:
            history.moved(self.log)
        sequence = Sequence(
            command.sequence_id,
            command.prompt_token_ids,
            sampling,
            command.arrival_s,
            tenant=command.tenant,
            priority=command.priority,
            ttft_deadline_s=command.ttft_deadline_s,
            deadline_s=command.deadline_s,
            leader=leader,
            has_length_bound=command.has_length_bound,
            stop_set=sampling.stop_set(self.config.eos_token_ids),
            block_hashes=command.block_hashes,
            progress=command.progress,
            history=history,
            adapter=command.adapter,
        )
        self.draft_lengths.admit(sequence, command.max_drafts)
        self._sequences[sequence.sequence_id] = sequence
        self._deadlines.add(sequence)
        if sequence.first_scheduled_s is None:
            self.queued.add(sequence)
        if command.crashes is not None:
            self.quarantine.add(sequence, command.crashes)
        sequence.num_missing = 0  # until it is in the queue; before that, its leader's prompt is counted
        if sequence in self.quarantine:
            self._displace_bystanders()
        elif leader is not None and leader.first_sampled_step_id is None:
            self._followers[leader.sequence_id].append(sequence)
        else:
            self._enqueue(sequence)
        return sequence

    def expire(self, now_s: float) -> list[Sequence]:
        """Finish every sequence whose deadline has passed. Must be called with the same `now_s` before `plan`."""
        return [
            sequence
            for sequence in self._deadlines.pop_overdue(now_s)
            # False for the second deadline of the same sequence.
            if self.finish(sequence.sequence_id, FinishReason.DEADLINE)
        ]

    def plan(self, now_s: float) -> StepPlan | None:
        """Plan the next step; None when there is nothing to dispatch.

        Advances `num_computed` as if the step were done, so that the next one can be planned while it runs.
        """
        self.log.now_s = now_s
        has_suspects = bool(self.quarantine)
        if len(self._in_flight) >= (1 if has_suspects else self.config.max_steps_in_flight):
            return None
        if self._in_flight and self.draft_lengths.is_awaited(self._in_flight[-1], self._position_s):
            return None
        assert self.next_deadline_s > now_s, "expired work is never computed: `expire` comes before `plan`"
        while self._leaders_ready:
            leader = self._leaders_ready.pop()
            if leader.status is not Status.FINISHED:  # it may have been withdrawn, and may be back with its followers
                self._release_followers(leader)
        if has_suspects and (cleared := self.quarantine.clear()) is not None:
            self._release_from_quarantine(cleared)
            has_suspects = bool(self.quarantine)
        if self.waiting_queue.has_shares and not has_suspects:
            self._preempt_for_share()
        step = Step(self.next_step_id, now_s, self.step_token_limit)
        if self.kv_connector.is_on:
            self.kv_cache.prefixes.begin_step(step.step_id)
        prefills = self._schedule_decodes(step)
        self.kv_cache.decodes_scheduled()
        prefill_limit = self.prefill_limiter.prefill_limit()
        prefill_rule = "itl_target_ms" if prefill_limit < step.budget else "max_num_batched_tokens"
        step.budget = min(step.budget, prefill_limit)
        if has_suspects:
            self._schedule_suspect(step, prefills)
        elif prefills or self.num_waiting:
            self._schedule_prefills(step, prefills)
        if self.config.max_drafts and step.num_decodes:
            self._schedule_drafts(step)
        for sequence in prefills:
            if sequence.last_step_id != step.step_id:
                step.left_out.append((sequence, sequence.incarnation, TimeCause.STEP_TOKENS, prefill_rule))
        self._note_queue(step, prefill_rule)
        if not step.chunks:
            return None
        self.next_step_id += 1
        self._in_flight.append(step)
        stores: tuple[Stored, ...] = ()
        prefetches: tuple[bytes, ...] = ()
        if self.kv_connector.is_on:
            stores, step.loads, step.sends = self.kv_connector.take_transfers()
            prefetches = self.kv_connector.take_prefetches()
        return StepPlan(
            self.epoch,
            step.step_id,
            tuple(step.slot_assignments),
            tuple(step.chunks),
            tuple(step.copies),
            stores=stores,
            loads=step.loads,
            sends=step.sends,
            prefetches=prefetches,
        )

    def commit(self, result: StepResult, now_s: float) -> list[SequenceToken]:
        """Apply what a step sampled. Each result counts once; a repeated one, or one of another epoch, is dropped.

        Raises WorkerLost for a result that does not fit its step; then nothing is changed.
        """
        step = self._find_in_flight(result.step_id)
        if step is None or step.result is not None or result.epoch != self.epoch:
            self.num_stale_results += 1
            return []
        step.check_fits(result)
        step.result = result
        tokens: list[SequenceToken] = []
        # Steps are executed in order, and over pipes their results come in order; should that ever change, they are
        # still applied in order.
        while self._in_flight and self._in_flight[0].result is not None:
            self._settle(self._in_flight.popleft(), now_s, tokens)
        return tokens

    def _find_in_flight(self, step_id: int) -> Step | None:
        for step in self._in_flight:
            if step.step_id == step_id:
                return step
        return None

    def finish(self, sequence_id: int, reason: FinishReason, num_output_tokens: int | None = None) -> bool:
        """End a sequence, whatever its state, and release all it holds. False if it had ended before or never existed.

        Idempotent. `num_output_tokens` is the length of the answer, if the sequence has tokens after its end.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        sequence.finish_reason = reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.output_lengths.record_end(sequence, num_output_tokens)
        self._remove(sequence)
        return True

    def withdraw(self, sequence_ids: Iterable[int] | None, is_hand_over: bool = False) -> list[AddSequence]:
        """Forget these sequences, or all, whatever their state, and release what they hold.

        Returns the commands that continue them on another manager, in order of arrival. Tokens that steps in flight
        sample for them are ignored here, and sampled again there.
        """
        ids = self._sequences if sequence_ids is None else self._sequences.keys() & sequence_ids
        sequences = [self._sequences[sequence_id] for sequence_id in sorted(ids)]
        commands = [
            AddSequence(
                sequence_id=sequence.sequence_id,
                prompt_token_ids=sequence.token_ids[: sequence.prompt_length],
                sampling=sequence.sampling,
                arrival_s=sequence.arrival_s,
                tenant=sequence.tenant,
                priority=sequence.priority,
                ttft_deadline_s=sequence.ttft_deadline_s,
                deadline_s=sequence.deadline_s,
                leader_id=None if sequence.leader is None else sequence.leader.sequence_id,
                has_length_bound=sequence.has_length_bound,
                block_hashes=tuple(sequence.kv.hashes),
                progress=sequence.progress(),
                crashes=self.quarantine.record_of(sequence),
                max_drafts=sequence.max_drafts,
                adapter=sequence.adapter,
            )
            for sequence in sequences
        ]
        cause, rule = (TimeCause.HAND_OVER, "prefill_replicas") if is_hand_over else (TimeCause.WORKER_LOSS, "moved")
        for sequence in sequences:
            sequence.history.set_back(sequence.num_computed, cause, rule)
        for sequence in reversed(sequences):  # followers first, which a leader that leaves would put into the queue
            self._remove(sequence)
        return commands

    def _remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and release all it holds."""
        sequence.history.ended()
        del self._sequences[sequence.sequence_id]
        was_running = sequence.status is Status.RUNNING
        if not was_running:
            self.num_prefill_tokens -= sequence.num_missing
        sequence.status = Status.FINISHED
        sequence.leader = None  # otherwise forks of forks would keep all their ancestors
        self._deadlines.discard(sequence)
        if was_running:
            self._stop_running(sequence)
            self._release(sequence)
        elif sequence not in self.quarantine:
            self.waiting_queue.discard(sequence)
        if sequence.first_scheduled_s is None:
            self.queued.remove(sequence)
        self.quarantine.discard(sequence)
        self._release_followers(sequence)

    def restart(self, is_out_of_memory: bool = False) -> list[Sequence]:
        """Forget everything that the worker held; all sequences are computed again, and keep their tokens.

        Returns the sequences that crash workers, which the caller must finish. After an out-of-memory error the worker
        lives, and steps are half as large from then on; each step that fits raises the limit by a token.
        """
        if is_out_of_memory:
            self.step_token_limit = max(1, self.step_token_limit // 2)
        in_flight = [s for s in self._running if self._in_flight and s.last_step_id >= self._in_flight[0].step_id]
        failed = self.quarantine.record_crash(in_flight)
        self.epoch += 1
        self._in_flight.clear()
        self._blocked = None
        self.kv_connector.restarted(is_worker_lost=not is_out_of_memory)
        self.kv_cache = self._new_kv_cache()
        self._free_slots = list(range(self.config.max_num_seqs - 1, -1, -1))
        rule = "out_of_memory" if is_out_of_memory else "worker_lost"
        self.log.note(TimeCause.WORKER_LOSS, rule)
        displaced, self._running = self._running, []
        for sequence in displaced:
            self.num_prefill_tokens -= self.prefill_left(sequence)
            self.kv_cache.forget(sequence)
            history, lost_since_s = sequence.history, self._last_commit_s
            history.set_back(sequence.num_computed, TimeCause.WORKER_LOSS, rule, lost_since_s=lost_since_s)
            history.queued()
            sequence.reset_computation()
            sequence.status, sequence.num_missing = Status.WAITING, 0
            if sequence not in self.quarantine:
                self._enqueue(sequence)
        return failed

    def _new_kv_cache(self) -> KVCacheManager:
        config = self.config
        return KVCacheManager(
            config.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            config.max_preemptions,
            self.output_lengths,
            self._hash_block,
            is_pipeline=config.pipeline_parallel_size > 1,
            connector=self.kv_connector,
        )

    # -- one step -------------------------------------------------------------------------------------------------

    def _schedule_decodes(self, step: Step) -> list[Sequence]:
        """Schedule one position for every sequence that is past its prompt; return the others.

        This is the one loop that costs time for each running sequence in each step, hence flat. `_grow` preempts from
        the far end of the list that the loop walks along, so no sequence is met twice or skipped.

        In a pipeline, the first stage knows a token only when its step has passed through all stages. A sequence that
        waits for such a token would stop the pipeline, so it is left out of the steps until then. A step takes only its
        part of the sequences, so that some are left for the next steps.
        """
        chunks, sampled, budget, step_id = step.chunks, step.sampled, step.budget, step.step_id
        block_size, num_stages = self.config.block_size, self.config.pipeline_parallel_size
        num_left, not_grown = min(budget, -(-len(self._running) // num_stages)), self.kv_cache.not_grown
        left_pipeline_id = step_id - num_stages  # the newest step whose tokens the first stage knows
        prefills: list[Sequence] = []
        for sequence in self._running:
            if sequence.first_sampled_step_id is None:
                prefills.append(sequence)
                continue
            start = sequence.num_computed
            stop = start + 1
            if stop >= sequence.max_length:
                not_grown(sequence)
                continue  # a step in flight ends it, or may do so by accepted drafts
            if not num_left:
                if num_stages == 1:  # in a pipeline, it is another step's turn
                    not_grown(sequence)
                    step.left_out.append(
                        (sequence, sequence.incarnation, TimeCause.STEP_TOKENS, "max_num_batched_tokens")
                    )
                continue
            num_pending = sequence.num_pending
            if num_pending and sequence.last_step_id > left_pipeline_id:
                continue  # its newest token is still in the pipeline
            new_blocks: tuple[int, ...] = ()
            if start == sequence.kv.capacity:
                if not self._grow(sequence):
                    not_grown(sequence)
                    step.left_out.append((sequence, sequence.incarnation, TimeCause.MEMORY, "kv_blocks"))
                    continue  # no block is left, so no sequence will be admitted in this step either
                new_blocks = (sequence.kv.table[-1],)
            assert sequence.slot is not None
            known = () if num_pending else (sequence.token_ids[start],)  # a step in flight samples what is not known
            chunks.append(ScheduledChunk(sequence.slot, start, 1, known, new_blocks, True))
            sampled.append((sequence, sequence.incarnation))
            num_left -= 1
            sequence.num_computed = stop
            sequence.num_pending = num_pending + 1
            sequence.last_step_id = step_id
            # If the block's last token is not known yet, the commit of that token publishes it.
            if known and not stop % block_size:
                self.kv_cache.publish(sequence)
        step.budget = budget - len(chunks)
        step.num_decodes = len(chunks)
        if self.waiting_queue.has_shares:
            for sequence, _ in sampled:
                self.waiting_queue.charge(sequence, 1)
        return prefills

    def _schedule_prefills(self, step: Step, prefills: list[Sequence]) -> None:
        """Spend the rest of the budget on prompts: by rank, whether they run or wait.

        If the policy has a share for short prompts, those that need less than the first one go before it, but take at
        most that share of the budget. So a long prompt delays short ones little, and still makes progress.
        """
        share = self.waiting_queue.short_share
        if prefills and not share:
            self._admit_waiting(step, ahead_of=prefills[0])
        if prefills and share:
            num_needed = prefills[0].num_needed
            reserve = min(num_needed, step.budget - int(step.budget * share))
            shorter = [sequence for sequence in prefills if sequence.num_needed < num_needed]
            # Shortest first, whether running or waiting: a second long prompt must not take the share for itself.
            for sequence in sorted(shorter, key=lambda sequence: sequence.num_needed):
                self._admit_waiting(step, reserve, shorter_than=sequence.num_needed)
                self._schedule_running(step, [sequence], reserve)
            self._admit_waiting(step, reserve, shorter_than=num_needed)
        self._schedule_running(step, prefills)
        self._admit_waiting(step)

    def _schedule_suspect(self, step: Step, prefills: list[Sequence]) -> None:
        """Schedule the first suspect, and nothing else; while there are suspects, no other sequence runs."""
        suspect = self.quarantine.first
        if suspect.status is Status.WAITING:
            self._admit(step, suspect, self.kv_cache.find_prefix_match(suspect, step.step_id))
            self._schedule(step, suspect, min(suspect.num_needed, step.budget), is_new=True)
        else:
            self._schedule_running(step, prefills)

    def _displace_bystanders(self) -> None:
        """Return all running sequences but suspects to the waiting queue, because a suspect runs alone."""
        for sequence in [each for each in self._running if each not in self.quarantine]:
            self._stop_running(sequence)
            self._isolate(sequence)
            self._release(sequence)
            self._enqueue(sequence)

    def _release_from_quarantine(self, cleared: Sequence) -> None:
        """Return a harmless suspect to the others. It keeps running, unless there is another suspect to run alone."""
        if cleared.status is Status.RUNNING:
            if not self.quarantine:
                return
            self._stop_running(cleared)
            self._isolate(cleared)
            self._release(cleared)
        self._enqueue(cleared)

    def _isolate(self, sequence: Sequence) -> None:
        """Note that a sequence gives its slot to a suspect."""
        sequence.history.set_back(sequence.num_computed, TimeCause.QUARANTINE, "crash_quarantine")
        sequence.history.queued()

    def _schedule_running(self, step: Step, sequences: list[Sequence], reserve: int = 0) -> None:
        """Schedule a chunk for each running sequence in turn, as long as more than `reserve` tokens are left."""
        for sequence in sequences:
            if step.budget > reserve and sequence.last_step_id != step.step_id:
                self._schedule(step, sequence, min(sequence.num_needed, step.budget - reserve))

    def _admit_waiting(
        self, step: Step, reserve: int = 0, shorter_than: int | None = None, ahead_of: Sequence | None = None
    ) -> None:
        """Admit the sequences that the waiting queue proposes, as long as there are slots, tokens and memory.

        At most `max_admissions_per_step` are admitted in one step; the others wait for the next one. Prompts in the
        prefix cache cost few tokens, so the token budget alone would let one plan admit as many as there are slots.

        Only those with fewer tokens to compute than `shorter_than`, or that outrank `ahead_of`, if that is given.

        The order is strict: if there is no memory for the first in the queue, none after it gets any. Otherwise the
        first would starve.
        """
        num_left = self._num_admissible(step)
        while step.budget > reserve and num_left:
            sequence = self.waiting_queue.first(shorter_than)
            if sequence is None or sequence is self._blocked:
                return
            if ahead_of is not None and self.waiting_queue.rank(sequence) > self.waiting_queue.rank(ahead_of):
                return
            match = self.kv_cache.find_prefix_match(sequence, step.step_id)
            if not self.kv_cache.has_room(sequence, match, self._running):
                self._blocked = sequence
                return
            self._admit(step, sequence, match)
            self._schedule(step, sequence, min(sequence.num_needed, step.budget - reserve), is_new=True)
            num_left -= 1

    def _num_admissible(self, step: Step) -> int:
        """How many more sequences the step may admit: there is a slot for each."""
        return min(len(self._free_slots), self.config.max_admissions_per_step - len(step.slot_assignments))

    def _schedule(self, step: Step, sequence: Sequence, num_tokens: int, is_new: bool = False) -> None:
        """Schedule positions [num_computed, num_computed + num_tokens) of a prompt.

        If it is new in its slot, the worker does not know any of its blocks.
        """
        assert sequence.slot is not None
        start, stop = sequence.num_computed, sequence.num_computed + num_tokens
        leased = self.kv_cache.cover(sequence, stop)
        new_blocks = tuple(sequence.kv.table if is_new else leased)
        samples = stop == len(sequence.token_ids)
        needs_logprobs = sequence.sampling.prompt_logprobs is not None
        if needs_logprobs:
            step.prompt_logprobs[len(step.chunks)] = sequence, sequence.incarnation
        # Logits predict the token after their own, so a chunk with prompt logprobs also has the next token.
        known = tuple(sequence.token_ids[start : stop + needs_logprobs])
        step.chunks.append(ScheduledChunk(sequence.slot, start, num_tokens, known, new_blocks, samples))
        step.prefills.append((sequence, sequence.incarnation, start, num_tokens, samples))
        step.budget -= num_tokens
        step.num_prefill_tokens += num_tokens
        self.num_prefill_tokens -= num_tokens
        sequence.num_computed = stop
        sequence.last_step_id = step.step_id
        if samples:
            sequence.num_pending += 1
            sequence.first_sampled_step_id = step.step_id
            step.sampled.append((sequence, sequence.incarnation))
            if sequence.sequence_id in self._followers:
                self._leaders_ready.append(sequence)
        self.waiting_queue.charge(sequence, num_tokens)
        self.kv_cache.publish(sequence)

    @property
    def _position_s(self) -> float:
        """The time in seconds that each position is expected to take beyond those of the steps that were measured."""
        return self.prefill_limiter.step_times.prefill_s

    def _schedule_drafts(self, step: Step) -> None:
        """Add drafts to the decodes of a step, as far as it has tokens left and blocks are available."""
        decodes = step.sampled[: step.num_decodes]
        sequences = [sequence for sequence, _ in decodes]
        wanted = self.draft_lengths.choose(
            sequences, step.step_id, self._position_s, step.num_prefill_tokens, self.output_lengths.mean_length or inf
        )
        for index, num_wanted in enumerate(wanted):
            sequence = sequences[index]
            if num_wanted:
                num_wanted = min(num_wanted, step.budget, self._max_drafts(sequence))
            if num_wanted > 0:
                self._add_drafts(step, index, sequence, num_wanted)

    def _add_drafts(self, step: Step, index: int, sequence: Sequence, num_wanted: int) -> None:
        """Add up to so many drafts to one of a step's decodes, as far as there are blocks."""
        start, num_blocks = sequence.num_computed, len(sequence.kv.table)
        num_drafts = self.kv_cache.extend(sequence, start + num_wanted) - start
        if not num_drafts:
            return
        chunk = step.chunks[index]
        new_blocks = (*chunk.new_block_ids, *sequence.kv.table[num_blocks:])
        step.chunks[index] = ScheduledChunk(
            chunk.slot, chunk.start, 1 + num_drafts, chunk.token_ids, new_blocks, True, num_drafts
        )
        step.num_drafts[index] = num_drafts
        step.budget -= num_drafts
        sequence.num_computed += num_drafts
        sequence.num_pending += num_drafts

    def _max_drafts(self, sequence: Sequence) -> int:
        """How many drafts a sequence may have in a step in which its next position is scheduled.

        They end before the position of the last token that it may have, so the block table stays within what was
        counted when it was admitted.

        A sequence that was in flight when a worker crashed gets none from then on. Otherwise each try would end at
        another position, and the quarantine would take longer to find the sequence that crashes workers.
        """
        if self.quarantine.record_of(sequence) is not None:
            return 0
        return min(sequence.max_drafts, sequence.max_length - 1 - sequence.num_computed)

    def _settle(self, step: Step, now_s: float, tokens: list[SequenceToken]) -> None:
        """Apply a step's result: append its tokens to `tokens` and to the sequences, and finish those that end."""
        assert step.result is not None
        step_time_s = self._settle_times(step, now_s)
        self.step_token_limit = min(self.config.max_num_batched_tokens, self.step_token_limit + 1)
        if self.kv_cache.num_fenced:
            self.kv_cache.settle(step.step_id)
            self._blocked = None
        block_size, result = self.config.block_size, step.result
        if self.kv_connector.is_on:
            self._settle_transfers(step)
        for part in result.prompt_logprobs:
            sequence, incarnation = step.prompt_logprobs[part.chunk_index]
            if sequence.incarnation == incarnation:
                sequence.add_prompt_logprobs(part)
        for index, failure in result.failures:
            sequence, incarnation = step.sampled[index]
            if sequence.incarnation == incarnation:
                self.finish(sequence.sequence_id, FinishReason.ERROR)
                token_id = result.token_ids[sum(result.counts[:index]) if result.counts else index]
                tokens.append(SequenceToken(sequence, token_id, FinishReason.ERROR, failure=failure))
        for index in result.deferred:
            sequence, incarnation = step.sampled[index]
            if sequence.incarnation == incarnation:
                sequence.rewind()
                self.kv_cache.not_grown(sequence)
                self.num_deferrals += 1
        if step.num_drafts:
            self._settle_drafts(step)
        if self.config.max_drafts:
            mean_length = self.output_lengths.mean_length or inf
            self.draft_lengths.observe(step, step_time_s, self._position_s, mean_length)
        logprobs = result.logprobs or (None,) * len(result.token_ids)
        sampled = by_token(step.sampled, result.counts)
        for (sequence, incarnation), token_id, of_token in zip(sampled, result.token_ids, logprobs, strict=True):
            # Also false for the rest of a span, once one of its tokens has ended the sequence.
            if sequence.incarnation != incarnation:
                continue
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            num_tokens = len(token_ids)
            sequence.num_pending = num_pending = sequence.num_pending - 1
            # Otherwise the next step computes the block's last position, and publishes the block.
            if num_pending and not num_tokens % block_size:
                self.kv_cache.publish(sequence)
            reason = None
            if num_tokens >= sequence.max_length or token_id in sequence.stop_set:
                reason = self._end(sequence, token_id)
            tokens.append(SequenceToken(sequence, token_id, reason, of_token))

    def _settle_times(self, step: Step, now_s: float) -> float:
        """Learn from the time of a step that is done now. Returns how much time it has cost its sequences."""
        # From when the worker could begin with it: when it was sent, or when the step before it was done.
        before_s, began_s = self._last_commit_s, max(step.planned_s, self._last_commit_s)
        if not step.loads:  # what they take says nothing of other steps
            self.prefill_limiter.observe(step.num_prefill_tokens, step.num_decodes, now_s - began_s)
        self._last_commit_s = self.log.now_s = now_s
        self._record(step, began_s)
        # A step that continues answers and was sent while none was in flight has awaited the result before it. Its
        # sequences waited from that result until the step was sent, so this time counts, too.
        return now_s - (before_s if step.num_decodes else began_s)

    def _settle_transfers(self, step: Step) -> None:
        """Compute the sequences again for which a step could not load a block, before its tokens are appended.

        Results in flight for them are ignored, so no token is committed that was computed from such a block.
        """
        assert step.result is not None
        report = step.result.transfers or TransferReport()
        self.kv_connector.sent(step.sends)
        failed = [step.loads[index] for index in report.failed_loads]
        copies = [copy for each in self._in_flight for copy in each.copies]
        for sequence in self.kv_cache.settle_transfers(
            step.step_id, failed, report.dropped_keys, copies, self._running
        ):
            sequence.history.set_back(sequence.num_computed, TimeCause.PREEMPTED, "failed_load")
            self._stop_running(sequence)
            # They share blocks, and one of them may be in a later step than another: the fence is for all of them.
            sequence.last_step_id = max(sequence.last_step_id, self.next_step_id - 1)
            self._release(sequence)
            sequence.status, sequence.num_missing = Status.WAITING, 0
            if sequence not in self.quarantine:
                self._enqueue(sequence)

    def _record(self, step: Step, began_s: float) -> None:
        """Record in histories what a step has done for sequences, but for those that decode in it."""
        num_sequences = len(step.chunks)
        before = self.log.count(num_sequences, step.num_prefill_tokens)
        for sequence, incarnation, first, num_tokens, samples in step.prefills:
            if sequence.incarnation == incarnation:
                sequence.history.prefilled(began_s, first, num_tokens, num_sequences - 1)
                if samples:
                    sequence.history.decodes()
        for sequence, incarnation, cause, rule in step.left_out:
            if sequence.incarnation == incarnation:
                sequence.history.left_out(began_s, cause, rule, before)

    def _settle_drafts(self, step: Step) -> None:
        """Subtract what a step rejected from the bounds of its sequences, before the accepted tokens are appended.

        The tokens of a span are then appended like those of as many steps. So a block is published when it is full of
        committed tokens, and a draft is never published. Blocks stay: they are for positions that will come.

        Accepted drafts are charged to the tenant here, and rejected ones are not: shares count tokens, as without
        speculation.
        """
        assert step.result is not None
        counts, token_ids = step.result.counts, step.result.token_ids
        stops = list(accumulate(counts)) if counts else range(1, len(token_ids) + 1)  # where spans end
        for index, num_planned in step.num_drafts.items():
            sequence, incarnation = step.sampled[index]
            if sequence.incarnation == incarnation:
                num_verified, num_accepted = step.num_verified(index), step.num_accepted(index)
                sequence.settle_drafts(num_planned, num_verified, num_accepted)
                ends = token_ids[stops[index] - 1] in sequence.stop_set
                self.draft_lengths.record(sequence, num_planned, num_verified, num_accepted, ends)
                self.waiting_queue.charge(sequence, num_accepted)

    def _end(self, sequence: Sequence, token_id: int) -> FinishReason:
        """Finish a sequence with its own last token."""
        reason = FinishReason.STOP if token_id in sequence.stop_set else FinishReason.LENGTH
        if token_id in sequence.sampling.stop_token_ids:
            sequence.stop_token_id = token_id
        self.finish(sequence.sequence_id, reason)
        return reason

    # -- slots and blocks -----------------------------------------------------------------------------------------

    def _admit(self, step: Step, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a sequence a slot, the blocks of `match`, and reserve blocks for its other known tokens."""
        self.kv_cache.allocate(sequence, match)
        sequence.num_computed = match.num_tokens
        if match.partial is not None:
            assert sequence.leader is not None
            sequence.leader.last_step_id = step.step_id
            step.copies.append((match.partial, sequence.kv.table[sequence.kv.num_found]))
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = step.planned_s
            self.queued.remove(sequence)
            sequence.num_cached_tokens = match.num_tokens
            if sequence.leader is None and self.config.enable_prefix_caching:
                self.num_prompt_tokens += sequence.prompt_length
                self.num_cached_tokens += match.num_tokens
        self.num_prefill_tokens += sequence.num_needed - sequence.num_missing
        sequence.num_missing = sequence.num_needed
        sequence.history.admitted()
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.RUNNING
        rank = self.waiting_queue.rank
        if self._running and rank(sequence) < rank(self._running[-1]):
            insort(self._running, sequence, key=rank)
        else:  # as most are: they came last
            self._running.append(sequence)
        self.waiting_queue.admitted(sequence)
        sampling = sequence.sampling
        stop_token_ids = tuple(sequence.stop_set) if sampling.min_tokens else ()
        # Sampling may look back at them, and drafts may repeat them.
        is_read = sequence.num_computed and (sampling.looks_back or sequence.max_drafts)
        known = tuple(sequence.token_ids[: sequence.num_computed]) if is_read else ()
        group_id = (sequence.leader or sequence).sequence_id
        step.slot_assignments.append(
            SlotAssignment(
                sequence.slot,
                sampling,
                sequence.prompt_length,
                stop_token_ids,
                known,
                tenant=sequence.tenant,
                group_id=group_id,
                adapter=sequence.adapter,
            )
        )

    def _stop_running(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones. Ranks differ, so it is found without looking at all of them."""
        rank = self.waiting_queue.rank
        index = bisect_left(self._running, rank(sequence), key=rank)
        assert self._running[index] is sequence
        del self._running[index]

    def _release(self, sequence: Sequence) -> None:
        """Take slot and blocks from a sequence. Results in flight for it will be ignored."""
        in_flight = self._in_flight and sequence.last_step_id >= self._in_flight[0].step_id
        self.kv_cache.release(sequence, self._in_flight[-1].step_id if in_flight else None)
        self.num_prefill_tokens -= self.prefill_left(sequence)
        assert sequence.slot is not None
        # The slot needs no fence: the worker executes steps in order, and a slot assignment resets the slot.
        self._free_slots.append(sequence.slot)
        self._blocked = None
        sequence.reset_computation()

    def _preempt(self, victim: Sequence, behind: Sequence, rule: str) -> None:
        """Return a running sequence to the waiting queue, to be computed again from its tokens."""
        assert victim is not self._running[0], "the first-ranked sequence is never preempted"
        victim.history.set_back(victim.num_computed, TimeCause.PREEMPTED, rule, behind.sequence_id)
        self._stop_running(victim)
        self._release(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(victim)

    def _preempt_for_share(self) -> None:
        """Preempt other tenants' sequences for the first in the queue, as far as the policy allows.

        It is done before anything is scheduled, because what is in a step cannot be taken out of it. The first in the
        queue is usually admitted in the same step. It waits longer if its blocks are fenced, and if the step has no
        token left for it. If it would not fit after all, nothing is preempted.
        """
        sequence, kv_cache = self.waiting_queue.first(), self.kv_cache
        has_slot = len(self._running) < self.config.max_num_seqs
        if sequence is None or (has_slot and sequence is not self._blocked):
            return
        victims: list[Sequence] = []
        if not has_slot:
            victim = self.waiting_queue.find_victim(sequence.tenant, 1, self._running, lambda _: 1)
            if victim is None:
                return
            victims.append(victim)
        match = kv_cache.find_prefix_match(sequence, self.next_step_id)
        num_blocks = kv_cache.num_blocks_at_end(sequence, len(match.blocks))
        staying = [other for other in self._running if other not in victims]
        while not kv_cache.fits(sequence, match, staying):
            victim = self.waiting_queue.find_victim(
                sequence.tenant,
                num_blocks,
                staying,
                lambda other: kv_cache.num_blocks_at_end(other, other.kv.num_found),
            )
            if victim is None:
                return
            victims.append(victim)
            staying.remove(victim)
        for victim in victims:
            self._preempt(victim, sequence, "tenant_share")
            victim.num_share_preemptions += 1
            self.num_share_preemptions += 1

    def _note_queue(self, step: Step, prefill_rule: str) -> None:
        """Note why the first in the queue was not admitted in this step."""
        first = self._blocked
        if self.quarantine:
            cause, rule, first = TimeCause.QUARANTINE, "crash_quarantine", self.quarantine.first
        elif self.num_waiting == (self.num_followers if self._followers else 0):
            # No request waits in the queue. One that comes now waits until the next step is planned, and that waits for
            # a result: of a long step with drafts, or of any step if as many are in flight as may be.
            is_awaited = self.config.max_steps_in_flight > 1 and self.draft_lengths.is_awaited(step, self._position_s)
            cause, rule = TimeCause.NEXT_STEP, "long_speculative_step" if is_awaited else "max_steps_in_flight"
        elif first is not None:
            cause, rule = TimeCause.MEMORY, "kv_blocks"
        elif not self._free_slots:
            cause, rule = TimeCause.SLOTS, "max_num_seqs"
        elif not self._num_admissible(step):
            cause, rule = TimeCause.ADMISSION_RATE, "max_admissions_per_step"
        else:
            cause, rule = TimeCause.STEP_TOKENS, prefill_rule
        if not self.log.is_held_by(cause, rule):
            if first is None and not self.waiting_queue.has_shares:  # with shares, `first` may change the turns
                first = self.waiting_queue.first()
            self.log.note(cause, rule, None if first is None else first.sequence_id)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        found = self.kv_cache.find_prefix_match(sequence, self.next_step_id)
        if found.num_loads and self.config.prefetches_blocks:
            num_blocks = len(found.blocks)
            self.kv_connector.prefetch(sequence.kv.hashes[num_blocks : num_blocks + found.num_loads])
        sequence.num_missing = sequence.num_tokens - found.num_tokens
        self.num_prefill_tokens += sequence.num_missing
        self.waiting_queue.push(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """Lease one more block, if need be by preempting a lower-ranked sequence. False if none is available yet."""
        while not self.kv_cache.grow(sequence):
            # Fenced blocks become available when a step in flight is done. Preempting a second victim before that would
            # preempt more sequences than one shortage needs.
            victim = None if self.kv_cache.num_fenced else self._find_victim(sequence)
            if victim is None:
                # It keeps its slot and waits. Self-preemption would force a recompute, and would free blocks only for
                # sequences that could preempt it anyway.
                return False
            self._preempt(victim, sequence, "kv_blocks")
            self.output_lengths.record_preemption()
        return True

    def _find_victim(self, sequence: Sequence) -> Sequence | None:
        """The last-ranked sequence below `sequence` that may be preempted; None if there is none."""
        assert len(self._running) > 1, f"{sequence} cannot run alone in {self.config.num_blocks} blocks"
        behind = self._running[self._running.index(sequence) + 1 :]
        return next((victim for victim in reversed(behind) if not self.kv_cache.is_pinned(victim)), None)

    def _release_followers(self, leader: Sequence) -> None:
        """Enqueue those that waited for a leader's prompt: it is dispatched, or it never will be."""
        for follower in self._followers.pop(leader.sequence_id, ()):
            if follower.status is Status.WAITING:
                follower.history.waited_for_prompt()
                self._enqueue(follower)

    # -- the invariants -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of the state. Linear in all there is: for tests and simulations."""
        config, running = self.config, self._running
        self.kv_cache.check(running)
        assert len(running) + len(self._free_slots) == config.max_num_seqs
        assert len({*self._free_slots, *[sequence.slot for sequence in running]}) == config.max_num_seqs, (
            "a slot is held twice, or lost"
        )
        ranks = list(map(self.waiting_queue.rank, running))
        assert ranks == sorted(ranks), "running sequences are out of order"
        for sequence in running:
            assert sequence.status is Status.RUNNING and self._sequences[sequence.sequence_id] is sequence
            assert 0 <= sequence.num_pending <= config.max_steps_in_flight * (1 + sequence.max_drafts)
            assert 0 <= sequence.num_computed < len(sequence.token_ids) + sequence.num_pending <= sequence.max_length
            assert sequence.first_sampled_step_id is None or sequence.num_needed == 1, "a decode is not one token"
            assert sequence.num_preemptions - sequence.num_share_preemptions <= config.max_preemptions
        waiting = [sequence for sequence in self._sequences.values() if sequence.status is Status.WAITING]
        assert len(waiting) + len(running) == len(self._sequences), "a sequence is neither running nor waiting"
        queued = [sequence for sequence in waiting if sequence.first_scheduled_s is None]
        assert self.queued.total.num_sequences == len(queued), "queued sequences are not counted right"
        num_missing = sum([sequence.num_missing for sequence in waiting])
        assert self.num_prefill_tokens == num_missing + sum(map(self.prefill_left, running))
        for sequence in waiting:
            assert sequence.slot is None and not sequence.kv.table and not sequence.num_pending
