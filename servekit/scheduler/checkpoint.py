"""Save the workload manager's state, and make a manager from it that makes the same decisions afterwards.

A state holds what decisions depend on, as a recording does (recording.py): lengths in place of token ids, and hashes of
blocks. So a restored manager is for replay only. It cannot serve, because it does not know any tokens.

This is the only module that reads and writes the private fields of the scheduler's classes. State that can be computed
from other fields is not saved: heaps of waiting sequences and deadlines, counts of blocks, the number of holders of
each block. Entries of heaps that are no longer valid are left out; they have no effect on decisions.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from servekit.protocol.messages import PromptLogprobs, ScheduledChunk, StepResult, TokenLogprobs, TransferReport
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.crash_quarantine import CrashRecord
from servekit.scheduler.draft_length import DraftLengths
from servekit.scheduler.kv_cache_manager import KVCacheManager
from servekit.scheduler.kv_connector import KVConnector
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.policy import Fair, Shortest
from servekit.scheduler.prefill_limiter import PrefillLimiter
from servekit.scheduler.prefix_cache import HashBlock, chain_hash
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import Sequence, Status
from servekit.scheduler.step import Step, by_token
from servekit.scheduler.step_time import PositionTimes, StepTimes
from servekit.scheduler.workload_manager import WorkloadManager

CONTINUES, ENDS = 0, 1  # what the tokens of a replayed sequence mean
_CONTINUES = array("i", (CONTINUES,))
NO_LOGPROBS = TokenLogprobs(0.0)

SampledSequences = Iterable[tuple[Sequence, int]]
"""The sequences that sample in a step, in order, each with its incarnation."""


class ResultState(Struct, frozen=True, array_like=True):
    """The part of a StepResult on which decisions depend."""

    epoch: int
    step_id: int
    num_tokens: int
    ends: list[int]  # indices of the tokens that stop their sequence
    failures: list[int]  # numbers of the spans whose token is invalid
    prompt_logprobs: list[tuple[int, int, int]]  # (index of the chunk, first position, number of positions)
    deferred: tuple[int, ...] = ()  # numbers of the spans whose token was not sampled
    counts: tuple[int, ...] = ()  # tokens of each span, if not all have one
    num_drafts: tuple[int, ...] = ()  # verified ones of each span, if there are any
    draft_time_s: float = 0.0
    draft_prompt_time_s: float = 0.0
    failed_loads: tuple[int, ...] = ()  # indices of the plan's loads
    dropped_keys: tuple[bytes, ...] = ()  # keys of blocks that the KV connector cannot load any more


class SequenceState(Struct, frozen=True, array_like=True):
    """A living sequence. The fields are those of `Sequence` and `SequenceBlocks`."""

    sequence_id: int
    prompt_length: int
    num_tokens: int
    max_tokens: int
    has_length_bound: bool
    needs_prompt_logprobs: bool
    looks_back: bool
    arrival_s: float
    tenant: str
    priority: int
    ttft_deadline_s: float
    deadline_s: float
    leader_id: int | None
    num_prompt_logprobs: int
    status: Status
    first_scheduled_s: float | None
    num_cached_tokens: int | None
    num_missing: int
    num_preemptions: int
    incarnation: int
    slot: int | None
    num_computed: int
    num_pending: int
    first_sampled_step_id: int | None
    last_step_id: int
    block_table: list[int]
    num_found_blocks: int
    num_published_blocks: int
    block_hashes: list[bytes]
    num_share_preemptions: int = 0
    num_reserved_blocks: int = 0
    max_drafts: int = 0
    acceptance: float = 0.0
    acceptance_weight: float = 0.0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


class StepState(Struct, frozen=True, array_like=True):
    """A step in flight."""

    step_id: int
    planned_s: float
    num_decodes: int
    num_prefill_tokens: int
    sampled: list[tuple[int, int]]  # (sequence id, incarnation)
    # (index, sequence id, incarnation, prompt length, start, number of tokens) of each chunk with prompt logprobs
    prompt_chunks: list[tuple[int, int, int, int, int, int]]
    result: ResultState | None
    num_drafts: dict[int, int] = {}  # by index into `sampled`
    loads: list[tuple[bytes, int]] = []  # (key, block)
    copies: list[tuple[int, int]] = []  # (from, to)
    sends: list[tuple[int, bytes]] = []  # (block, key)


class PoolState(Struct, frozen=True, array_like=True):
    """Block pool and prefix cache."""

    free: list[int]  # in the order in which they are leased
    cached: list[int]  # least recently used first
    fenced: list[tuple[int, list[int]]]  # (step id, blocks)
    published: dict[int, bytes]  # the hash of each published block, the first published first
    unsettled: list[tuple[int, list[int]]] = []  # (step in flight, blocks published since it was planned)


class QueueState(Struct, frozen=True, array_like=True):
    """What a policy remembers besides the sequences that wait."""

    oldest_id: int | None = None  # Shortest
    num_overtaking_tokens: int = 0
    num_served_tokens: dict[str, int] = {}  # Fair
    turns: list[tuple[int, str]] = []
    last_left: int = 0
    num_raised_tokens: dict[str, int] = {}


class ConnectorState(Struct, frozen=True, array_like=True):
    """What KVConnector knows between two commands."""

    keys: list[bytes]
    num_loaded_blocks: int
    num_failed_loads: int
    pending: list[tuple[int, bytes]] = []  # (block, key) that the next step sends
    num_sent_blocks: int = 0


class DraftState(Struct, frozen=True, array_like=True):
    """What DraftLengths has learned."""

    mean_acceptance: float
    mean_weight: float
    num_drafted: list[int]
    num_accepted: list[int]
    times: tuple[list[int], list[float], list[float], float]  # classes, means, weights and spread of PositionTimes
    round_times: tuple[list[int], list[float], list[float], float]
    is_drafting: bool
    num_paying: int
    explored_id: int
    explored_stop: int
    explored_length: int
    num_explored: int
    prompt_s: float
    num_begun: float
    prompt_debt: float
    debt: float


class ManagerState(Struct, frozen=True, array_like=True):
    """Everything that the decisions of a workload manager depend on, besides its configuration."""

    epoch: int
    next_step_id: int
    step_token_limit: int
    last_commit_s: float
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_stale_results: int
    sequences: list[SequenceState]  # in the order in which they were added
    running: list[int]  # ids, by rank
    followers: list[tuple[int, list[int]]]  # (leader's id, ids)
    leaders_ready: list[int]
    blocked_id: int | None
    free_slots: list[int]
    in_flight: list[StepState]
    pool: PoolState
    queue: QueueState
    suspects: list[int]  # ids, the oldest suspicion first
    crashes: list[tuple[int, int, int]]  # (sequence id, number of crashes, tokens known at the last one)
    recent_lengths: list[int]
    safety_factor: float
    mean_length: float
    prefill_limiter: list[float]
    step_times: list[list[float]]
    num_deferrals: int = 0
    num_share_preemptions: int = 0
    drafts: DraftState | None = None  # None without speculative decoding
    connector: ConnectorState | None = None  # None without a KV connector


# The fields that PrefillLimiter and its StepTimes learn, in the order in which ManagerState has them.
_LEARNED = ("_margin", "_largest_chunk")
_LEARNED_STEP_TIMES = ("prefill_s", "base_s", "decode_s", "num_decodes")


# -- saving ------------------------------------------------------------------------------------------------------------


def save_manager(manager: WorkloadManager) -> ManagerState:
    """The state between two commands. Takes some 3 µs for each sequence, and 30 ns for each block."""
    sequences = manager._sequences
    pool = manager.kv_cache.pool
    return ManagerState(
        epoch=manager.epoch,
        next_step_id=manager.next_step_id,
        step_token_limit=manager.step_token_limit,
        last_commit_s=manager._last_commit_s,
        num_preemptions=manager.num_preemptions,
        num_prompt_tokens=manager.num_prompt_tokens,
        num_cached_tokens=manager.num_cached_tokens,
        num_stale_results=manager.num_stale_results,
        sequences=[_save_sequence(sequence, manager.config.block_size) for sequence in sequences.values()],
        running=[sequence.sequence_id for sequence in manager._running],
        followers=[
            (leader_id, [each.sequence_id for each in followers if each.status is Status.WAITING])
            for leader_id, followers in manager._followers.items()
        ],
        leaders_ready=[each.sequence_id for each in manager._leaders_ready if each.status is not Status.FINISHED],
        blocked_id=_alive_id(manager._blocked),
        free_slots=manager._free_slots.copy(),
        in_flight=[_save_step(step) for step in manager._in_flight],
        pool=PoolState(
            free=list(pool._free),
            cached=list(pool._cached),
            fenced=[(step_id, blocks.copy()) for step_id, blocks in pool._fenced],
            published=manager.kv_cache.prefixes._hash_of.copy(),
            unsettled=[(step_id, blocks.copy()) for step_id, blocks in manager.kv_cache.prefixes._unsettled],
        ),
        queue=_save_queue(manager),
        suspects=[sequence.sequence_id for sequence in manager.quarantine._suspects],
        crashes=[
            (sequence_id, record.num_crashes, record.num_tokens)
            for sequence_id, record in manager.quarantine._records.items()
        ],
        recent_lengths=list(manager.output_lengths._recent),
        safety_factor=manager.output_lengths.safety_factor,
        mean_length=manager.output_lengths.mean_length,
        prefill_limiter=[getattr(manager.prefill_limiter, name) for name in _LEARNED],
        step_times=_save_step_times(manager.prefill_limiter.step_times),
        num_deferrals=manager.num_deferrals,
        num_share_preemptions=manager.num_share_preemptions,
        drafts=_save_drafts(manager.draft_lengths) if manager.config.max_drafts else None,
        connector=_save_connector(manager.kv_connector) if manager.kv_connector.is_on else None,
    )


def _alive_id(sequence: Sequence | None) -> int | None:
    """A reference to a sequence that has ended has no effect on decisions."""
    return None if sequence is None or sequence.status is Status.FINISHED else sequence.sequence_id


def _save_sequence(sequence: Sequence, block_size: int) -> SequenceState:
    kv, leader, hashes = sequence.kv, sequence.leader, sequence.kv.hashes
    if leader is not None and leader.status is Status.FINISHED and not hashes:
        # A leader that has ended is not saved. A fork takes the leader's hashes before it computes any of its own.
        hashes = leader.kv.hashes[: sequence.prompt_length // block_size]
    return SequenceState(
        sequence_id=sequence.sequence_id,
        prompt_length=sequence.prompt_length,
        num_tokens=sequence.num_tokens,
        max_tokens=sequence.sampling.max_tokens,
        has_length_bound=sequence.has_length_bound,
        needs_prompt_logprobs=sequence.sampling.prompt_logprobs is not None,
        looks_back=sequence.sampling.looks_back,
        arrival_s=sequence.arrival_s,
        tenant=sequence.tenant,
        priority=sequence.priority,
        ttft_deadline_s=sequence.ttft_deadline_s,
        deadline_s=sequence.deadline_s,
        leader_id=_alive_id(leader),
        num_prompt_logprobs=len(sequence.prompt_logprobs),
        status=sequence.status,
        first_scheduled_s=sequence.first_scheduled_s,
        num_cached_tokens=sequence.num_cached_tokens,
        num_missing=sequence.num_missing,
        num_preemptions=sequence.num_preemptions,
        incarnation=sequence.incarnation,
        slot=sequence.slot,
        num_computed=sequence.num_computed,
        num_pending=sequence.num_pending,
        first_sampled_step_id=sequence.first_sampled_step_id,
        last_step_id=sequence.last_step_id,
        block_table=kv.table.copy(),
        num_found_blocks=kv.num_found,
        num_published_blocks=kv.num_published,
        block_hashes=hashes.copy(),
        num_share_preemptions=sequence.num_share_preemptions,
        num_reserved_blocks=kv.num_reserved,
        max_drafts=sequence.max_drafts,
        acceptance=sequence.acceptance,
        acceptance_weight=sequence.acceptance_weight,
        num_drafted_tokens=sequence.num_drafted_tokens,
        num_accepted_tokens=sequence.num_accepted_tokens,
    )


def _save_step(step: Step) -> StepState:
    prompt_chunks = []
    for index, (sequence, incarnation) in step.prompt_logprobs.items():
        chunk = step.chunks[index]
        prompt_chunks.append(
            (index, sequence.sequence_id, incarnation, sequence.prompt_length, chunk.start, chunk.num_tokens)
        )
    return StepState(
        step_id=step.step_id,
        planned_s=step.planned_s,
        num_decodes=step.num_decodes,
        num_prefill_tokens=step.num_prefill_tokens,
        sampled=[(sequence.sequence_id, incarnation) for sequence, incarnation in step.sampled],
        prompt_chunks=prompt_chunks,
        result=None if step.result is None else summarize_result(step.result, step.sampled),
        num_drafts=step.num_drafts.copy(),
        loads=list(step.loads),
        copies=step.copies.copy(),
        sends=list(step.sends),
    )


def summarize_result(
    result: StepResult, sampled: SampledSequences, hash_key: Callable[[bytes], bytes] = bytes
) -> ResultState:
    """The part of a result on which decisions depend, for a step in which these sequences sample.

    `hash_key` gives the hash that a recording has in place of a block's.
    """
    transfers = result.transfers or TransferReport()
    of_tokens = zip(by_token(sampled, result.counts), result.token_ids, strict=False)
    ends = [index for index, ((sequence, _), token_id) in enumerate(of_tokens) if token_id in sequence.stop_set]
    return ResultState(
        result.epoch,
        result.step_id,
        len(result.token_ids),
        ends,
        [index for index, _ in result.failures],
        [(part.chunk_index, part.start, len(part.logprobs)) for part in result.prompt_logprobs],
        result.deferred,
        result.counts,
        result.num_drafts,
        result.draft_time_s,
        result.draft_prompt_time_s,
        transfers.failed_loads,
        tuple(map(hash_key, transfers.dropped_keys)),
    )


def _save_step_times(step_times: StepTimes) -> list[list[float]]:
    learned = [getattr(step_times, name) for name in _LEARNED_STEP_TIMES]
    return [learned, step_times.prefills.sums.copy(), step_times.decodes.sums.copy()]


def _save_drafts(draft_lengths: DraftLengths) -> DraftState:
    return DraftState(
        mean_acceptance=draft_lengths.mean_acceptance,
        mean_weight=draft_lengths.mean_weight,
        num_drafted=draft_lengths.num_drafted.copy(),
        num_accepted=draft_lengths.num_accepted.copy(),
        times=_save_position_times(draft_lengths.times),
        round_times=_save_position_times(draft_lengths.round_times),
        is_drafting=draft_lengths.is_drafting,
        num_paying=draft_lengths.num_paying,
        explored_id=draft_lengths.explored_id,
        explored_stop=draft_lengths.explored_stop,
        explored_length=draft_lengths.explored_length,
        num_explored=draft_lengths.num_explored,
        prompt_s=draft_lengths.prompt_s,
        num_begun=draft_lengths.num_begun,
        prompt_debt=draft_lengths.prompt_debt,
        debt=draft_lengths.debt,
    )


def _save_connector(connector: KVConnector) -> ConnectorState:
    return ConnectorState(
        list(connector._keys),
        connector.num_loaded_blocks,
        connector.num_failed_loads,
        list(connector._pending.items()),
        connector.num_sent_blocks,
    )


def _save_position_times(times: PositionTimes) -> tuple[list[int], list[float], list[float], float]:
    return times.classes.copy(), times.means_s.copy(), times.weights.copy(), times.spread


def _save_queue(manager: WorkloadManager) -> QueueState:
    queue = manager.waiting_queue
    if isinstance(queue, Shortest):
        return QueueState(oldest_id=_alive_id(queue._oldest), num_overtaking_tokens=queue._num_overtaking_tokens)
    if isinstance(queue, Fair):
        return QueueState(
            num_served_tokens=queue.num_served_tokens.copy(),
            turns=queue._turns.copy(),
            last_left=queue._last_left,
            num_raised_tokens=queue._num_raised_tokens.copy(),
        )
    return QueueState()


def map_hashes(state: ManagerState, function: Callable[[bytes], bytes]) -> ManagerState:
    """The same state with other hashes. It decides the same if different hashes stay different."""
    sequences = [replace(each, block_hashes=list(map(function, each.block_hashes))) for each in state.sequences]
    published = {block: function(block_hash) for block, block_hash in state.pool.published.items()}
    in_flight = [_map_hashes_of_step(step, function) for step in state.in_flight]
    connector = state.connector
    if connector is not None:
        pending = [(block, function(key)) for block, key in connector.pending]
        connector = replace(connector, keys=list(map(function, connector.keys)), pending=pending)
    pool = replace(state.pool, published=published)
    return replace(state, sequences=sequences, pool=pool, in_flight=in_flight, connector=connector)


def _map_hashes_of_step(step: StepState, function: Callable[[bytes], bytes]) -> StepState:
    result = step.result
    if result is not None:
        result = replace(result, dropped_keys=tuple(map(function, result.dropped_keys)))
    return replace(
        step,
        loads=[(function(key), block) for key, block in step.loads],
        result=result,
        sends=[(block, function(key)) for block, key in step.sends],
    )


# -- restoring ---------------------------------------------------------------------------------------------------------


def restore_manager(
    config: SchedulerConfig,
    state: ManagerState,
    output_lengths: OutputLengthPredictor | None = None,
    hash_block: HashBlock = chain_hash,
) -> WorkloadManager:
    """A manager that decides as the saved one would, given commands in the form of a replay."""
    manager = WorkloadManager(config, output_lengths, hash_block)
    sequences = {each.sequence_id: _restore_sequence(each, config.block_size) for each in state.sequences}
    for each in state.sequences:
        if each.leader_id is not None:
            sequences[each.sequence_id].leader = sequences[each.leader_id]
    manager.epoch = state.epoch
    manager.step_token_limit = state.step_token_limit
    manager.num_preemptions = state.num_preemptions
    manager.num_prompt_tokens = state.num_prompt_tokens
    manager.num_cached_tokens = state.num_cached_tokens
    manager.num_stale_results = state.num_stale_results
    manager.num_deferrals = state.num_deferrals
    manager.num_share_preemptions = state.num_share_preemptions
    for sequence in sequences.values():
        if sequence.first_scheduled_s is None:
            manager.queued.add(sequence)
    manager.num_prefill_tokens = sum(map(manager.prefill_left, sequences.values()))
    manager.next_step_id = state.next_step_id
    manager._last_commit_s = state.last_commit_s
    manager._sequences = sequences
    manager._running = [sequences[sequence_id] for sequence_id in state.running]
    for leader_id, followers in state.followers:
        manager._followers[leader_id] = [sequences[sequence_id] for sequence_id in followers]
    manager._leaders_ready = [sequences[sequence_id] for sequence_id in state.leaders_ready]
    manager._blocked = None if state.blocked_id is None else sequences[state.blocked_id]
    manager._free_slots = state.free_slots.copy()
    manager._in_flight = deque(_restore_step(step, sequences) for step in state.in_flight)
    for sequence in sequences.values():
        manager._deadlines.add(sequence)
    manager.quarantine._suspects = deque(sequences[sequence_id] for sequence_id in state.suspects)
    manager.quarantine._records = {
        sequence_id: CrashRecord(num_crashes, num_tokens) for sequence_id, num_crashes, num_tokens in state.crashes
    }
    manager.output_lengths._recent.extend(state.recent_lengths)
    manager.output_lengths._update()
    manager.output_lengths.safety_factor = state.safety_factor
    manager.output_lengths.mean_length = state.mean_length
    _restore_limiter(manager.prefill_limiter, state)
    if state.drafts is not None:
        _restore_drafts(manager.draft_lengths, state.drafts)
    if state.connector is not None:
        _restore_connector(manager.kv_connector, state.connector, manager._in_flight)
    _restore_pool(manager.kv_cache, state.pool, manager._running)
    _restore_queue(manager, state)
    return manager


def replay_prompt(length: int) -> array[int]:
    """A prompt to which the manager reacts as to the recorded one of this length."""
    return _CONTINUES * length


def replay_sampling(max_tokens: int, needs_prompt_logprobs: bool, looks_back: bool) -> SamplingParams:
    """Sampling parameters to which the manager reacts as to the recorded ones. A sequence stops at ENDS."""
    return SamplingParams(
        max_tokens=max_tokens,
        repetition_penalty=2.0 if looks_back else 1.0,
        ignore_eos=True,
        stop_token_ids=(ENDS,),
        prompt_logprobs=0 if needs_prompt_logprobs else None,
    )


def replay_result(state: ResultState) -> StepResult:
    """A result to which the manager reacts as to the recorded one."""
    ends = set(state.ends)
    return StepResult(
        state.epoch,
        state.step_id,
        tuple(ENDS if index in ends else CONTINUES for index in range(state.num_tokens)),
        0.0,
        prompt_logprobs=tuple(
            PromptLogprobs(index, start, (NO_LOGPROBS,) * num_positions)
            for index, start, num_positions in state.prompt_logprobs
        ),
        failures=tuple((index, "") for index in state.failures),
        deferred=state.deferred,
        counts=state.counts,
        num_drafts=state.num_drafts,
        draft_time_s=state.draft_time_s,
        draft_prompt_time_s=state.draft_prompt_time_s,
        transfers=TransferReport(state.failed_loads, state.dropped_keys),
    )


def _restore_sequence(state: SequenceState, block_size: int) -> Sequence:
    sequence = Sequence(
        state.sequence_id,
        replay_prompt(state.prompt_length),
        replay_sampling(state.max_tokens, state.needs_prompt_logprobs, state.looks_back),
        state.arrival_s,
        tenant=state.tenant,
        priority=state.priority,
        ttft_deadline_s=state.ttft_deadline_s,
        deadline_s=state.deadline_s,
        has_length_bound=state.has_length_bound,
        stop_set=frozenset({ENDS}),
        max_drafts=state.max_drafts,
    )
    sequence.token_ids = replay_prompt(state.num_tokens)
    sequence.prompt_logprobs = [NO_LOGPROBS] * state.num_prompt_logprobs
    sequence.status = state.status
    sequence.first_scheduled_s = state.first_scheduled_s
    sequence.num_cached_tokens = state.num_cached_tokens
    sequence.num_missing = state.num_missing
    sequence.num_preemptions = state.num_preemptions
    sequence.num_share_preemptions = state.num_share_preemptions
    sequence.acceptance = state.acceptance
    sequence.acceptance_weight = state.acceptance_weight
    sequence.num_drafted_tokens = state.num_drafted_tokens
    sequence.num_accepted_tokens = state.num_accepted_tokens
    sequence.incarnation = state.incarnation
    sequence.slot = state.slot
    sequence.num_computed = state.num_computed
    sequence.num_pending = state.num_pending
    sequence.first_sampled_step_id = state.first_sampled_step_id
    sequence.last_step_id = state.last_step_id
    sequence.kv.table = state.block_table.copy()
    sequence.kv.capacity = len(state.block_table) * block_size
    sequence.kv.num_reserved = state.num_reserved_blocks
    sequence.kv.num_found = state.num_found_blocks
    sequence.kv.num_published = state.num_published_blocks
    sequence.kv.hashes = state.block_hashes.copy()
    return sequence


def _restore_step(state: StepState, sequences: dict[int, Sequence]) -> Step:
    step = Step(state.step_id, state.planned_s, 0)
    step.num_decodes = state.num_decodes
    step.num_prefill_tokens = state.num_prefill_tokens
    step.num_drafts = state.num_drafts.copy()
    step.loads = tuple(state.loads)
    step.copies = state.copies.copy()
    step.sends = tuple(state.sends)
    step.sampled = [
        (_find(sequences, sequence_id, incarnation), incarnation) for sequence_id, incarnation in state.sampled
    ]
    for index, sequence_id, incarnation, prompt_length, start, num_tokens in state.prompt_chunks:
        # Only the chunks with prompt logprobs are looked up again.
        step.chunks += [ScheduledChunk(-1, 0, 0, (), (), False)] * (index - len(step.chunks))
        step.chunks.append(ScheduledChunk(-1, start, num_tokens, (), (), False))
        step.prompt_logprobs[index] = _find(sequences, sequence_id, incarnation, prompt_length), incarnation
    step.result = None if state.result is None else replay_result(state.result)
    return step


def _find(sequences: dict[int, Sequence], sequence_id: int, incarnation: int, prompt_length: int = 1) -> Sequence:
    """A sequence; in place of one that has ended since its step was planned, another one that ignores the result."""
    sequence = sequences.get(sequence_id)
    if sequence is None:
        sequence = Sequence(sequence_id, replay_prompt(prompt_length), replay_sampling(1, False, False))
        sequence.incarnation = incarnation + 1
    return sequence


def _restore_limiter(limiter: PrefillLimiter, state: ManagerState) -> None:
    for name, value in zip(_LEARNED, state.prefill_limiter, strict=True):
        setattr(limiter, name, value)
    learned, prefill_sums, decode_sums = state.step_times
    for name, value in zip(_LEARNED_STEP_TIMES, learned, strict=True):
        setattr(limiter.step_times, name, value)
    limiter.step_times.prefills.sums = prefill_sums.copy()
    limiter.step_times.decodes.sums = decode_sums.copy()


def _restore_drafts(draft_lengths: DraftLengths, state: DraftState) -> None:
    draft_lengths.mean_acceptance = state.mean_acceptance
    draft_lengths.mean_weight = state.mean_weight
    draft_lengths.num_drafted = state.num_drafted.copy()
    draft_lengths.num_accepted = state.num_accepted.copy()
    draft_lengths.is_drafting = state.is_drafting
    draft_lengths.num_paying = state.num_paying
    draft_lengths.explored_id = state.explored_id
    draft_lengths.explored_stop = state.explored_stop
    draft_lengths.explored_length = state.explored_length
    draft_lengths.num_explored = state.num_explored
    draft_lengths.prompt_s = state.prompt_s
    draft_lengths.num_begun = state.num_begun
    draft_lengths.prompt_debt = state.prompt_debt
    draft_lengths.debt = state.debt
    for times, learned in (
        (draft_lengths.times, state.times),
        (draft_lengths.round_times, state.round_times),
    ):
        times.restore(*learned)


def _restore_connector(connector: KVConnector, state: ConnectorState, in_flight: Iterable[Step]) -> None:
    connector.announce(state.keys)
    connector.num_loaded_blocks = state.num_loaded_blocks
    connector.num_failed_loads = state.num_failed_loads
    connector.num_sent_blocks = state.num_sent_blocks
    for block, key in state.pending:
        connector.send(block, key)
    connector._on_the_way.update(key for step in in_flight for _, key in step.sends)


def _restore_pool(kv_cache: KVCacheManager, state: PoolState, running: list[Sequence]) -> None:
    pool = kv_cache.pool
    pool._free = deque(state.free)
    pool._cached = OrderedDict.fromkeys(state.cached)
    pool._fenced = deque((step_id, blocks.copy()) for step_id, blocks in state.fenced)
    for sequence in running:
        for block in sequence.kv.table:
            pool._holders[block] += 1
        kv_cache._num_blocks_to_come += kv_cache._max_blocks(sequence) - len(sequence.kv.table)
        kv_cache._num_own_blocks += len(sequence.kv.table) - sequence.kv.num_found
        kv_cache._changed[sequence] = None
    pool.num_reserved = sum(sequence.kv.num_reserved for sequence in running)
    pool.num_leased = sum(map(bool, pool._holders))
    pool.num_fenced = sum(len(blocks) for _, blocks in state.fenced)
    kv_cache.prefixes._hash_of = state.published.copy()
    kv_cache.prefixes._block_of = {block_hash: block for block, block_hash in state.published.items()}
    pool._kept = set(kv_cache.prefixes._hash_of)
    kv_cache.prefixes._unsettled = deque((step_id, blocks.copy()) for step_id, blocks in state.unsettled)


def _restore_queue(manager: WorkloadManager, state: ManagerState) -> None:
    queue, sequences = manager.waiting_queue, manager._sequences
    elsewhere = {*state.suspects, *(sequence_id for _, followers in state.followers for sequence_id in followers)}
    if isinstance(queue, Fair):
        queue.num_served_tokens = state.queue.num_served_tokens.copy()
        queue._turns = state.queue.turns.copy()
        queue._queues = {tenant: queue.new_queue() for _, tenant in state.queue.turns}
        queue._last_left = state.queue.last_left
        queue._num_raised_tokens = state.queue.num_raised_tokens.copy()
    for sequence in sequences.values():
        if sequence.status is not Status.WAITING or sequence.sequence_id in elsewhere:
            continue
        if isinstance(queue, Fair):
            # Not by Fair.push, which would drop the queues that are still empty.
            queue._queues[sequence.tenant].push(sequence)
        else:
            queue.push(sequence)
    if isinstance(queue, Shortest):
        queue._oldest = None if state.queue.oldest_id is None else sequences[state.queue.oldest_id]
        queue._num_overtaking_tokens = state.queue.num_overtaking_tokens
