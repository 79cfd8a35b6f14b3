"""Decide, step by step, which tokens a worker computes next.

`plan` says what the next step does, `commit` takes in what it sampled, `finish` is the only way out for a sequence.
All three are plain functions of the state: no clock, no I/O, no randomness, no torch. The engine drives them in
production and the tests drive them by the thousand steps, with the same code.

The rules, each checked by `check` or by a test:

- Running sequences are served first, oldest first; waiting ones are admitted after, in order of arrival, and only in a
  step where nobody ran short of blocks.
- No step exceeds `max_num_batched_tokens`; no more than `max_num_seqs` sequences run.
- The oldest running sequence is never preempted, and no sequence is admitted that could not run alone, so there is
  always progress.
- A sequence that cannot grow waits in its seat; only an older one may take its blocks.

Continuous batching: Yu et al., "Orca", OSDI 2022, section 4. Chunked prefill under one token budget: Agrawal et al.,
"Sarathi-Serve", OSDI 2024, section 4.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from msgspec import Struct

from servekit.errors import ContextTooLong
from servekit.messages import Row, Seat, StepPlan, StepResult
from servekit.prefix_cache import PrefixCache, chain_hash, salt_hash
from servekit.sequence import FinishReason, Sequence, Status


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """The limits that the plan keeps."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    max_steps_in_flight: int = 1
    enable_prefix_caching: bool = True


class SequenceToken(Struct, frozen=True):
    """One committed token, and what it did to its sequence."""

    sequence: Sequence
    token_id: int
    finish_reason: FinishReason | None


@dataclass(slots=True)
class _Step:
    """A step, from its planning until its result is committed."""

    step_id: int
    budget: int  # tokens that may still be scheduled
    seats: list[Seat] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sampled: list[tuple[Sequence, int]] = field(default_factory=list)  # who samples, in which incarnation


class WorkloadManager:
    """Owns every sequence and every block of one worker.

    `epoch` names the worker's incarnation; plans carry it and results must match it.
    """

    def __init__(self, config: SchedulerConfig, epoch: int = 0) -> None:
        self.config = config
        self.epoch = epoch
        self.prefixes = PrefixCache(config.num_blocks)
        self.pool = self.prefixes.pool
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of sequences that were admitted, and how many of them were found in the cache
        self.num_cached_tokens = 0
        self.num_stale_results = 0
        self._sequences: dict[int, Sequence] = {}  # alive: waiting or running
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()  # by arrival; aborts come from anywhere in it
        self._running: list[Sequence] = []  # by arrival, all of it before all of `_waiting`
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[_Step] = deque()
        self._next_step_id = 0

    # -- what others may know -------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight)

    @property
    def max_total_tokens(self) -> int:
        """The longest sequence that could run alone: prompt and output together.

        The last output token is never fed back, so it needs no KV position: hence the one more than the pool holds.
        """
        return min(self.config.max_model_len, self.config.num_blocks * self.config.block_size + 1)

    def check_fits(self, prompt_length: int, max_tokens: int) -> None:
        """Raise ContextTooLong for what can never be served, so that `plan` never meets it."""
        limit = self.max_total_tokens
        if prompt_length + max_tokens <= limit:
            return
        # The first sentence is the one that clients of other servers already search for.
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_length + max_tokens} tokens ({prompt_length} in the prompt, {max_tokens} for the output). "
            "Please reduce the length of the prompt or max_tokens."
        )

    # -- the four verbs -------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in; it starts when its turn comes. Raises ContextTooLong."""
        self.check_fits(sequence.prompt_length, sequence.sampling.max_tokens)
        assert sequence.sequence_id not in self._sequences
        self._sequences[sequence.sequence_id] = sequence
        self._waiting[sequence.sequence_id] = sequence

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to dispatch. Advances `computed` as if it were done."""
        if len(self._in_flight) >= self.config.max_steps_in_flight:
            return None
        step = _Step(self._next_step_id, self.config.max_num_batched_tokens)
        ran_short = False

        for sequence in tuple(self._running):
            if step.budget == 0:
                break
            num_tokens = min(sequence.num_needed, step.budget)
            if num_tokens == 0 or sequence.status is not Status.RUNNING:
                continue
            new_blocks = self._grow(sequence, sequence.num_computed + num_tokens)
            if new_blocks is None:
                ran_short = True
                continue
            self._schedule(step, sequence, num_tokens, new_blocks)

        while step.budget and not ran_short and (found := self._room_for_first_waiting()) is not None:
            _, sequence = self._waiting.popitem(last=False)
            step.seats.append(self._seat(sequence, found, now))
            self._schedule(step, sequence, min(sequence.num_needed, step.budget), sequence.block_table)

        if not step.rows:
            return None
        self._next_step_id += 1
        self._in_flight.append(step)
        return StepPlan(self.epoch, step.step_id, tuple(step.seats), tuple(step.rows))

    def commit(self, result: StepResult) -> list[SequenceToken]:
        """Take in what a step sampled. A result that is not the one awaited is counted and dropped."""
        if not self._in_flight or (result.epoch, result.step_id) != (self.epoch, self._in_flight[0].step_id):
            self.num_stale_results += 1
            return []
        step = self._in_flight.popleft()
        self.pool.settle(step.step_id)
        return [
            self._accept(sequence, token_id)
            for (sequence, incarnation), token_id in zip(step.sampled, result.token_ids, strict=True)
            if sequence.incarnation == incarnation
        ]

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End a sequence, whatever its state, and give back all it holds. False if it had ended before."""
        if sequence.status is Status.FINISHED:
            return False
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._unseat(sequence)
        else:
            del self._waiting[sequence.sequence_id]
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        del self._sequences[sequence.sequence_id]
        return True

    # -- blocks and seats -----------------------------------------------------------------------------------------

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _lease_for(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Extend the block table to cover `num_tokens` positions; the caller has seen that there is room."""
        blocks = self.pool.lease(self._num_blocks_for(num_tokens) - len(sequence.block_table))
        sequence.block_table.extend(blocks)
        return blocks

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Blocks for `num_tokens` positions, at the expense of newer sequences; None where it has to wait."""
        missing = self._num_blocks_for(num_tokens) - len(sequence.block_table)
        if missing <= 0:
            return []
        while missing > self.pool.num_available:
            # Fenced blocks come back by themselves when a step in flight is done. Preempting a second victim
            # before they did is how one shortage becomes a cascade.
            if missing <= self.pool.num_available + self.pool.num_fenced:
                return None
            victim = self._running[-1]
            if victim is sequence:
                # The newest waits in its seat. Giving up its blocks would cost a recompute and help nobody
                # who is not about to preempt it anyway.
                assert len(self._running) > 1, f"{sequence} cannot run alone in {self.pool.num_blocks} blocks"
                return None
            self._preempt(victim)
        return self._lease_for(sequence, num_tokens)

    def _room_for_first_waiting(self) -> list[int] | None:
        """Whether the first waiting sequence may run; if so, the blocks that hold the beginning of it already.

        The blocks for every known token are leased at once, so that prefill chunks never run short half way. One
        more is left for each running sequence, which may ask for its next block any step; without that reserve the
        newcomer would be prefilled only to be preempted.
        """
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return None
        sequence = next(iter(self._waiting.values()))
        found = self._find_prefix(sequence)
        available = self.pool.num_available - sum(map(self.pool.is_cached, found))
        missing = self._num_blocks_for(sequence.num_tokens) - len(found)
        return found if missing + len(self._running) <= available else None

    def _seat(self, sequence: Sequence, found: list[int], now: float) -> Seat:
        """Give a sequence a slot and the blocks for all of its known tokens, the first of them `found` ones."""
        for block in found:
            self.pool.share(block)
        sequence.block_table = found
        sequence.num_published = len(found)
        sequence.num_computed = len(found) * self.config.block_size
        self._lease_for(sequence, sequence.num_tokens)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now
            sequence.num_cached_tokens = sequence.num_computed
            self.num_prompt_tokens += sequence.prompt_length
            self.num_cached_tokens += sequence.num_computed
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.RUNNING
        self._running.append(sequence)
        sampling = sequence.sampling
        return Seat(sequence.slot, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)

    def _unseat(self, sequence: Sequence) -> None:
        """Take slot and blocks from a sequence. What is in flight for it is void from here on."""
        in_flight = self._in_flight and sequence.last_step_id >= self._in_flight[0].step_id
        # Tail first: what a prefix of many continuations holds is to be reused last.
        self.pool.release(reversed(sequence.block_table), self._in_flight[-1].step_id if in_flight else None)
        assert sequence.slot is not None
        # No fence for the slot: the worker executes steps in order, and a seat resets it.
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        sequence.block_table = []
        sequence.num_computed = sequence.num_pending = 0
        sequence.incarnation += 1

    def _preempt(self, victim: Sequence) -> None:
        """Send a running sequence back to the head of the queue, to be computed again from its tokens."""
        assert victim is self._running[-1] and len(self._running) > 1, "the oldest is never preempted"
        self._running.pop()
        self._unseat(victim)
        victim.status = Status.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[victim.sequence_id] = victim
        self._waiting.move_to_end(victim.sequence_id, last=False)

    # -- the prefix cache ---------------------------------------------------------------------------------------------

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold the beginning of a sequence; at least one token is left to be computed."""
        if not self.config.enable_prefix_caching:
            return []
        num_blocks = (sequence.num_tokens - 1) // self.config.block_size
        self._hash_blocks(sequence, num_blocks)
        return self.prefixes.find(sequence.block_hashes[:num_blocks])

    def _publish(self, sequence: Sequence) -> None:
        """Let others find the blocks whose tokens are all committed and computed by a dispatched step."""
        num_full = min(sequence.num_computed, sequence.num_tokens) // self.config.block_size
        if num_full == sequence.num_published or not self.config.enable_prefix_caching:
            return
        self._hash_blocks(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            self.prefixes.publish(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_published = num_full

    def _hash_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        """Continue a sequence's chain of hashes to its first `num_blocks` blocks."""
        block_size, hashes = self.config.block_size, sequence.block_hashes
        for index in range(len(hashes), num_blocks):
            previous = hashes[-1] if hashes else salt_hash(sequence.salt)
            hashes.append(chain_hash(previous, sequence.token_ids[index * block_size : (index + 1) * block_size]))

    # -- tokens ---------------------------------------------------------------------------------------------------

    def _schedule(self, step: _Step, sequence: Sequence, num_tokens: int, new_blocks: list[int]) -> None:
        """Put positions [num_computed, num_computed + num_tokens) of a sequence into the step."""
        assert sequence.slot is not None
        start, stop = sequence.num_computed, sequence.num_computed + num_tokens
        samples = stop == len(sequence.token_ids) + sequence.num_pending
        known = tuple(sequence.token_ids[start:stop])
        step.rows.append(Row(sequence.slot, start, num_tokens, known, tuple(new_blocks), samples))
        step.budget -= num_tokens
        sequence.num_computed = stop
        sequence.last_step_id = step.step_id
        if samples:
            sequence.num_pending += 1
            step.sampled.append((sequence, sequence.incarnation))
        self._publish(sequence)

    def _accept(self, sequence: Sequence, token_id: int) -> SequenceToken:
        """Append a sampled token and see whether the sequence ends with it."""
        sequence.num_pending -= 1
        sequence.token_ids.append(token_id)
        self._publish(sequence)
        reason = self._reason_to_stop(sequence, token_id)
        if reason is FinishReason.STOP and token_id in sequence.sampling.stop_token_ids:
            sequence.stop_token_id = token_id
        if reason is not None:
            self.finish(sequence, reason)
        return SequenceToken(sequence, token_id, reason)

    def _reason_to_stop(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.sampling
        if token_id in self.config.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_output_tokens >= sampling.max_tokens else None

    # -- the laws -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every law the state must obey. Linear in all there is: for tests and simulations."""
        self.prefixes.check()
        held = Counter(block for sequence in self._running for block in sequence.block_table)
        assert held == self.pool.holders(), "block tables and pool disagree on who holds what"
        assert len(self._running) <= self.config.max_num_seqs
        slots = [sequence.slot for sequence in self._running if sequence.slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self.config.max_num_seqs)), "a slot was lost"
        assert {s.sequence_id for s in (*self._running, *self._waiting.values())} == set(self._sequences)
        arrivals = [sequence.sequence_id for sequence in (*self._running, *self._waiting.values())]
        assert arrivals == sorted(arrivals), "someone overtook"
        for sequence in self._running:
            assert sequence.status is Status.RUNNING
            assert sequence.num_computed <= sequence.num_tokens + sequence.num_pending
            assert len(sequence.block_table) * self.config.block_size >= sequence.num_computed
        for sequence in self._waiting.values():
            assert sequence.status is Status.WAITING and not sequence.block_table and sequence.slot is None
