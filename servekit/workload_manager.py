"""Decide, step by step, which tokens a worker computes next.

`plan` says what the next step does, `commit` takes in what it sampled, `finish` is the only way out for a sequence.
All of it is a plain function of the state: no clock, no I/O, no randomness, no torch. The engine drives it in
production and the simulation drives it by the million steps, with the same code.

How one step is decided (docs/ARCHITECTURE.md has a picture, with the same numbers):

1. Every running sequence that is past its prompt computes one position, by rank. One that needs a block and finds none
   takes it from the last-ranked; if nobody behind may be preempted, or blocks are on their way, it waits in its seat.
2. What is left of `max_num_batched_tokens`, or of what the inter-token latency target allows, is prefill. Before the
   first unfinished prompt come those in line who outrank it or, under a policy with a share for the short, up to that
   share, whatever is shorter.
3. Then the first unfinished prompt, and the other seated ones.
4. Then whomever the waiting line proposes, as long as there are tokens, seats and memory.

What holds whatever happens, each checked by `check` or by the simulation:

- The first-ranked running sequence is never preempted, and no sequence is taken in that could not run alone, so there
  is always progress.
- A sequence is preempted at most `max_preemptions` times: then it is seated only with all the blocks it can ever need,
  and there is nothing left for which anybody could take its place.
- A step is in flight or it is not; its result is applied once, in order, to the incarnations it was planned for.

Continuous batching: Yu et al., "Orca", OSDI 2022, section 4. Chunked prefill under one token budget: Agrawal et al.,
"Sarathi-Serve", OSDI 2024, section 4.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterable

from servekit.admission import OutputForecast
from servekit.deadlines import Deadlines
from servekit.kv_memory import Beginning, KVMemory
from servekit.messages import Row, Seat, StepPlan, StepResult
from servekit.pacing import Pacer
from servekit.policy import POLICIES
from servekit.quarantine import Quarantine
from servekit.scheduler_config import SchedulerConfig
from servekit.sequence import FinishReason, Sequence, Status
from servekit.step import SequenceToken, Step


class WorkloadManager:
    """Owns every sequence and every block of one worker.

    `epoch` names the worker's incarnation; plans carry it and results must match it.
    """

    def __init__(self, config: SchedulerConfig, forecast: OutputForecast | None = None) -> None:
        self.config = config
        self.epoch = 0
        self.forecast = forecast or OutputForecast(config.block_size)
        self.memory = self._new_memory()
        self.line = POLICIES[config.scheduling_policy]()
        self.pacer = Pacer(config.itl_target_s, config.max_num_batched_tokens)
        self.quarantine = Quarantine(config.max_steps_in_flight)
        self.step_token_limit = config.max_num_batched_tokens  # less for a while when a step did not fit into memory
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # looked up in the prefix cache, and how many of them were found
        self.num_cached_tokens = 0
        self.num_stale_results = 0
        self.num_queued_tokens = 0  # prompt tokens of those who were never seated
        self._sequences: dict[int, Sequence] = {}  # alive: running, in line, or behind their leader
        self._running: list[Sequence] = []  # by rank
        self._followers: defaultdict[int, list[Sequence]] = defaultdict(list)  # wait for their leader's prompt
        self._leaders_ready: list[Sequence] = []  # the newest step computes the rest of their prompts
        self._misfit: Sequence | None = None  # first in line, and found too large since anybody gave up blocks
        self._deadlines = Deadlines()
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[Step] = deque()
        self._next_step_id = 0
        self._last_commit_s = 0.0

    # -- what others may know -------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def num_deferred(self) -> int:
        """Of those who wait: for their leader's prompt, and not for a turn."""
        return sum(map(len, self._followers.values()))

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight)

    @property
    def num_lost(self) -> int:
        """Blocks and slots that are nobody's, or somebody's twice; a law was broken if there are any."""
        pool, num_seated = self.memory.pool, len(self._running)
        num_leased = pool.num_leased + pool.num_fenced if self.has_work else 0
        num_blocks = abs(pool.num_blocks - pool.num_available - num_leased)
        return num_blocks + abs(self.config.max_num_seqs - len(self._free_slots) - num_seated)

    @property
    def next_deadline_s(self) -> float:
        """When `expire` has something to do; later than any clock if never."""
        return self._deadlines.next_s

    # -- the verbs ------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in; it starts when its turn comes. Raises ContextTooLong."""
        self.config.check_fits(sequence.prompt_length, sequence.sampling.max_tokens)
        assert sequence.sequence_id not in self._sequences
        eos = self.config.eos_token_ids if sequence.sampling.ends_at_eos else frozenset()
        sequence.stop_set = eos.union(sequence.sampling.stop_token_ids)
        self._sequences[sequence.sequence_id] = sequence
        self._deadlines.add(sequence)
        self.num_queued_tokens += sequence.prompt_length
        leader = sequence.leader
        if leader is not None and leader.sequence_id in self._sequences and leader.first_sampled_step_id is None:
            self._followers[leader.sequence_id].append(sequence)
        else:
            self._line_up(sequence)

    def expire(self, now: float) -> list[Sequence]:
        """Finish every sequence whose deadline has passed; to be called with the same `now` before `plan`."""
        return [
            sequence
            for sequence in self._deadlines.pop_overdue(now)
            if self.finish(sequence, FinishReason.DEADLINE)  # False for the second deadline of the same sequence
        ]

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to dispatch. Advances `computed` as if it were done."""
        if len(self._in_flight) >= (1 if self.quarantine else self.config.max_steps_in_flight):
            return None
        assert self.next_deadline_s > now, "expired work is never computed: `expire` comes before `plan`"
        while self._leaders_ready:
            self._release_followers(self._leaders_ready.pop())
        if (acquitted := self.quarantine.acquit()) is not None:
            self._let_go(acquitted)
        step = Step(self._next_step_id, now, self.step_token_limit)
        prefills = self._schedule_decodes(step)
        step.budget = min(step.budget, self.pacer.prefill_limit())
        if self.quarantine:
            self._schedule_suspect(step, prefills)
        else:
            self._schedule_prefills(step, prefills)
        if not step.rows:
            return None
        self._next_step_id += 1
        self._in_flight.append(step)
        return StepPlan(self.epoch, step.step_id, tuple(step.seats), tuple(step.rows), tuple(step.copies))

    def commit(self, result: StepResult, now: float) -> list[SequenceToken]:
        """Take in what a step sampled. Each result counts once; one from another epoch, or a second one, is dropped.

        Raises WorkerLost for one that is no answer to its step.
        """
        step = next((step for step in self._in_flight if step.step_id == result.step_id), None)
        if step is None or step.result is not None or result.epoch != self.epoch:
            self.num_stale_results += 1
            return []
        step.check_fits(result)
        step.result = result
        tokens: list[SequenceToken] = []
        # Steps are executed in order, and their results come in order; should that change, they are applied in order.
        while self._in_flight and self._in_flight[0].result is not None:
            self._settle(self._in_flight.popleft(), now, tokens)
        return tokens

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End a sequence, whatever its state, and give back all it holds. False if it had ended before."""
        if sequence.status is Status.FINISHED:
            return False
        was_running = sequence.status is Status.RUNNING
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.leader = None  # or forks of forks would keep all their ancestors
        del self._sequences[sequence.sequence_id]
        self._deadlines.discard(sequence)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.forecast.ended(sequence)
        if was_running:
            self._running.remove(sequence)
            self._unseat(sequence)
        elif sequence not in self.quarantine:
            self.line.discard(sequence)
        if sequence.first_scheduled_s is None:
            self.num_queued_tokens -= sequence.prompt_length
        self.quarantine.discard(sequence)
        self._release_followers(sequence)
        return True

    def restart(self, is_out_of_memory: bool = False) -> list[Sequence]:
        """What the worker held is gone, and maybe the worker; everything is computed again, token for token.

        Gives those that are not, because they are what workers are lost over: finish them. When the step did not fit
        into memory the worker lives, and steps are half as large from now on; each one that fits adds a token.
        """
        if is_out_of_memory:
            self.step_token_limit = max(1, self.step_token_limit // 2)
        under_way = [s for s in self._running if self._in_flight and s.last_step_id >= self._in_flight[0].step_id]
        convicted = self.quarantine.judge(under_way)
        self.epoch += 1
        self._in_flight.clear()
        self._misfit = None
        self.memory = self._new_memory()
        self._free_slots = list(range(self.config.max_num_seqs - 1, -1, -1))
        displaced, self._running = self._running, []
        for sequence in displaced:
            sequence.forget_seat()
            if sequence in self.quarantine:
                sequence.status = Status.WAITING
            else:
                self._line_up(sequence)
        return convicted

    def _new_memory(self) -> KVMemory:
        config = self.config
        return KVMemory(
            config.num_blocks, config.block_size, config.enable_prefix_caching, config.max_preemptions, self.forecast
        )

    # -- one step -------------------------------------------------------------------------------------------------

    def _schedule_decodes(self, step: Step) -> list[Sequence]:
        """One position for everybody who is past the prompt; returns those who are not.

        The one loop that costs something for each running sequence in each step, hence flat. `_grow` preempts from
        the far end of the list it walks along, so it meets nobody twice and passes nobody over.
        """
        rows, sampled, budget, step_id = step.rows, step.sampled, step.budget, step.step_id
        block_size = self.config.block_size
        prefills: list[Sequence] = []
        for sequence in self._running:
            if sequence.first_sampled_step_id is None:
                prefills.append(sequence)
                continue
            start, token_ids = sequence.num_computed, sequence.token_ids
            if start + 1 >= sequence.max_length or not budget:
                continue  # a step in flight is certain to end it, or the step is full
            new_blocks: tuple[int, ...] = ()
            if start == sequence.capacity:
                if not self._grow(sequence):
                    continue  # no block is left, and a seat takes at least one: nobody new will get any
                new_blocks = (sequence.block_table[-1],)
            assert sequence.slot is not None
            known = (token_ids[start],) if start < len(token_ids) else ()
            rows.append(Row(sequence.slot, start, 1, known, new_blocks, True))
            sampled.append((sequence, sequence.incarnation))
            budget -= 1
            sequence.num_computed = start = start + 1
            sequence.num_pending += 1
            sequence.last_step_id = step_id
            if not start % block_size:
                self.memory.publish(sequence)
        step.budget = budget
        step.num_decodes = len(rows)
        if self.line.keeps_accounts:
            for sequence, _ in sampled:
                self.line.charge(sequence, 1)
        return prefills

    def _schedule_prefills(self, step: Step, prefills: list[Sequence]) -> None:
        """What is left of the budget, for prompts: by rank, whether they are seated or in line.

        Where the policy has a share for short prompts, those that need less than the first one go before it, but
        leave it the rest of the budget: a long prompt costs the short ones little, and they cost it at most that share.
        """
        share = self.line.short_share
        if prefills and not share:
            self._seat_waiting(step, ahead_of=prefills[0])
        if prefills and share:
            num_needed = prefills[0].num_needed
            reserve = min(num_needed, step.budget - int(step.budget * share))
            shorter = [sequence for sequence in prefills if sequence.num_needed < num_needed]
            # Shortest first, whether seated or in line: a second long prompt must not take the share for itself.
            for sequence in sorted(shorter, key=lambda sequence: sequence.num_needed):
                self._seat_waiting(step, reserve, shorter_than=sequence.num_needed)
                self._serve(step, [sequence], reserve)
            self._seat_waiting(step, reserve, shorter_than=num_needed)
        self._serve(step, prefills)
        self._seat_waiting(step)

    def _schedule_suspect(self, step: Step, prefills: list[Sequence]) -> None:
        """All of the step for the first suspect; others have no seats while there are suspects."""
        suspect = self.quarantine.first
        if suspect.status is Status.WAITING:
            self._seat(step, suspect, self.memory.find_beginning(suspect, step.step_id))
            self._schedule(step, suspect, min(suspect.num_needed, step.budget), suspect.block_table)
        else:
            self._serve(step, prefills)

    def _let_go(self, acquitted: Sequence) -> None:
        """A suspect has proved harmless. It keeps its seat, unless another one needs the worker for itself."""
        if acquitted.status is Status.RUNNING:
            if not self.quarantine:
                return
            self._running.remove(acquitted)
            self._unseat(acquitted)
        self._line_up(acquitted)

    def _serve(self, step: Step, sequences: list[Sequence], reserve: int = 0) -> None:
        """A chunk for each of the seated, as long as more than `reserve` tokens are left."""
        for sequence in sequences:
            if step.budget > reserve and sequence.last_step_id != step.step_id:
                self._schedule(step, sequence, min(sequence.num_needed, step.budget - reserve))

    def _seat_waiting(
        self, step: Step, reserve: int = 0, shorter_than: int | None = None, ahead_of: Sequence | None = None
    ) -> None:
        """Seats for those that the line proposes, as long as there are seats, tokens and memory.

        Only for those with fewer tokens to compute than `shorter_than`, or who outrank `ahead_of`, if that is given.
        The line is strict: if there is no memory for its first, nobody behind gets any, or the first would starve.
        """
        while step.budget > reserve and len(self._running) < self.config.max_num_seqs:
            sequence = self.line.first(shorter_than)
            if sequence is None or sequence is self._misfit:
                return
            if ahead_of is not None and self.line.rank(sequence) > self.line.rank(ahead_of):
                return
            beginning = self.memory.find_beginning(sequence, step.step_id)
            if not self.memory.has_room(sequence, beginning, self._running):
                self._misfit = sequence
                return
            self._seat(step, sequence, beginning)
            self._schedule(step, sequence, min(sequence.num_needed, step.budget - reserve), sequence.block_table)

    def _schedule(self, step: Step, sequence: Sequence, num_tokens: int, new_blocks: Iterable[int] = ()) -> None:
        """Put positions [num_computed, num_computed + num_tokens) of a prompt into the step."""
        assert sequence.slot is not None
        start, stop = sequence.num_computed, sequence.num_computed + num_tokens
        samples = stop == len(sequence.token_ids)
        explains = sequence.sampling.prompt_logprobs is not None
        if explains:
            step.explained[len(step.rows)] = sequence, sequence.incarnation
        # Logits foretell the token after their own, so a chunk that is explained brings along the one behind it.
        known = tuple(sequence.token_ids[start : stop + explains])
        step.rows.append(Row(sequence.slot, start, num_tokens, known, tuple(new_blocks), samples))
        step.budget -= num_tokens
        step.num_prefill_tokens += num_tokens
        sequence.num_computed = stop
        sequence.last_step_id = step.step_id
        if samples:
            sequence.num_pending += 1
            sequence.first_sampled_step_id = step.step_id
            step.sampled.append((sequence, sequence.incarnation))
            if sequence.sequence_id in self._followers:
                self._leaders_ready.append(sequence)
        self.line.charge(sequence, num_tokens)
        self.memory.publish(sequence)

    def _settle(self, step: Step, now: float, tokens: list[SequenceToken]) -> None:
        """Apply a step's result: append what it sampled to `tokens` and to the sequences, and see who ends with it."""
        assert step.result is not None
        # From the moment the worker could begin with it: when it was sent, or when the step before it was done.
        self.pacer.observe(step.num_prefill_tokens, step.num_decodes, now - max(step.planned_s, self._last_commit_s))
        self._last_commit_s = now
        self.step_token_limit = min(self.config.max_num_batched_tokens, self.step_token_limit + 1)
        if self.memory.num_fenced:
            self.memory.settle(step.step_id)
            self._misfit = None
        block_size, result = self.config.block_size, step.result
        for told in result.prompt_logprobs:
            sequence, incarnation = step.explained[told.row]
            if sequence.incarnation == incarnation:
                sequence.explain_prompt(told)
        for index, failure in result.failures:
            sequence, incarnation = step.sampled[index]
            if sequence.incarnation == incarnation:
                self.finish(sequence, FinishReason.ERROR)
                tokens.append(SequenceToken(sequence, result.token_ids[index], FinishReason.ERROR, failure=failure))
        logprobs = result.logprobs or (None,) * len(result.token_ids)
        for (sequence, incarnation), token_id, of_token in zip(step.sampled, result.token_ids, logprobs, strict=True):
            if sequence.incarnation != incarnation:
                continue
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            sequence.num_pending -= 1
            if not len(token_ids) % block_size:
                self.memory.publish(sequence)
            reason = None
            if token_id in sequence.stop_set or len(token_ids) >= sequence.max_length:
                reason = self._end(sequence, token_id)
            tokens.append(SequenceToken(sequence, token_id, reason, of_token))

    def _end(self, sequence: Sequence, token_id: int) -> FinishReason:
        """A sequence comes to its own end with this token."""
        reason = FinishReason.STOP if token_id in sequence.stop_set else FinishReason.LENGTH
        if token_id in sequence.sampling.stop_token_ids:
            sequence.stop_token_id = token_id
        self.finish(sequence, reason)
        return reason

    # -- seats ----------------------------------------------------------------------------------------------------

    def _seat(self, step: Step, sequence: Sequence, beginning: Beginning) -> None:
        """Give a sequence a slot, what is there of it already, and blocks for the rest."""
        self.memory.move_in(sequence, beginning)
        if beginning.partial is not None:
            assert sequence.leader is not None
            sequence.leader.last_step_id = step.step_id
            step.copies.append((beginning.partial, sequence.block_table[sequence.num_found_blocks]))
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = step.planned_s
            self.num_queued_tokens -= sequence.prompt_length
            sequence.num_cached_tokens = beginning.num_tokens
            if sequence.leader is None and self.config.enable_prefix_caching:
                self.num_prompt_tokens += sequence.prompt_length
                self.num_cached_tokens += beginning.num_tokens
        sequence.num_missing = sequence.num_needed
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=self.line.rank)
        self.line.seated(sequence)
        sampling = sequence.sampling
        forbidden = tuple(sequence.stop_set) if sampling.min_tokens else ()
        known = tuple(sequence.token_ids[: sequence.num_computed]) if sampling.looks_back else ()
        step.seats.append(Seat(sequence.slot, sampling, sequence.prompt_length, forbidden, known))

    def _unseat(self, sequence: Sequence) -> None:
        """Take slot and blocks from a sequence. What is in flight for it is void from here on."""
        in_flight = self._in_flight and sequence.last_step_id >= self._in_flight[0].step_id
        self.memory.move_out(sequence, self._in_flight[-1].step_id if in_flight else None)
        assert sequence.slot is not None
        # No fence for the slot: the worker executes steps in order, and a seat resets it.
        self._free_slots.append(sequence.slot)
        self._misfit = None
        sequence.forget_seat()

    def _preempt(self, victim: Sequence) -> None:
        """Send a running sequence back into line, to be computed again from its tokens."""
        assert victim is not self._running[0], "the first is never preempted"
        self._running.remove(victim)
        self._unseat(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.forecast.preempted()
        self._line_up(victim)

    def _line_up(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        found = self.memory.find_beginning(sequence, self._next_step_id)
        sequence.num_missing = sequence.num_tokens - found.num_tokens
        self.line.push(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """One more block, if need be at the expense of somebody ranked behind; False if it has to wait for it."""
        while not self.memory.grow(sequence):
            # Fenced blocks come back by themselves when a step in flight is done. Preempting a second victim
            # before they did is how one shortage becomes a cascade.
            victim = None if self.memory.num_fenced else self._find_victim(sequence)
            if victim is None:
                # Giving up its own blocks would cost a recompute, and help only who is about to preempt it anyway.
                return False
            self._preempt(victim)
        return True

    def _find_victim(self, sequence: Sequence) -> Sequence | None:
        """The last of those ranked behind `sequence`, except who was preempted often enough."""
        assert len(self._running) > 1, f"{sequence} cannot run alone in {self.config.num_blocks} blocks"
        behind = self._running[self._running.index(sequence) + 1 :]
        return next((victim for victim in reversed(behind) if not self.memory.is_pinned(victim)), None)

    def _release_followers(self, leader: Sequence) -> None:
        """What they waited for is dispatched, or will never be."""
        for follower in self._followers.pop(leader.sequence_id, ()):
            if follower.status is Status.WAITING:
                self._line_up(follower)

    # -- the laws -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every law the state must obey. Linear in all there is: for tests and simulations."""
        config, running, most_in_flight = self.config, self._running, self.config.max_steps_in_flight
        self.memory.check(running)
        assert len(running) + len(self._free_slots) == config.max_num_seqs
        assert len({*self._free_slots, *[sequence.slot for sequence in running]}) == config.max_num_seqs, "slots lost"
        ranks = list(map(self.line.rank, running))
        assert ranks == sorted(ranks), "the running are out of order"
        for sequence in running:
            assert sequence.status is Status.RUNNING and self._sequences[sequence.sequence_id] is sequence
            assert 0 <= sequence.num_pending <= most_in_flight
            assert 0 <= sequence.num_computed < len(sequence.token_ids) + sequence.num_pending <= sequence.max_length
            assert sequence.num_preemptions <= config.max_preemptions
        waiting = [sequence for sequence in self._sequences.values() if sequence.status is Status.WAITING]
        assert len(waiting) + len(running) == len(self._sequences), "somebody is neither running nor waiting"
        for sequence in waiting:
            assert sequence.slot is None and not sequence.block_table and not sequence.num_pending
