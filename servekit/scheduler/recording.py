"""Record the workload manager's commands and plans, and replay them on another manager.

The manager is a function of its commands, so a recording of them repeats every plan. A record holds what decisions
depend on, and no more: times, lengths, and the ids of sequences, steps and blocks. It holds no text, and no token ids
unless they are asked for. Three inputs of the manager are replaced:

- Token ids. A sampled token either stops its sequence or does not, so a replayed sequence consists of CONTINUES tokens
  and stops at an ENDS token (checkpoint.py).
- Hashes of blocks. The prefix cache only compares them. In service `chain_hash` computes them from token ids; a record
  has the hashes that its command computed, in order, and the replay takes them from there. They are truncated, and
  keyed with a secret that is not in the recording: otherwise a reader could confirm a guessed prompt by hashing it.
- Sampling parameters. Only those that the manager reads are kept.

`RecordedManager` makes a record of each command at once, and puts it into a sink. Making the records later, in another
thread, would cost three times as much: while plans are kept, each step takes new memory, instead of the memory that the
step before it has freed. `Replayer` applies records to its own manager, and compares.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, NoReturn, Protocol

import msgspec
from msgspec import Struct

from servekit.errors import ServekitError
from servekit.protocol.messages import StepPlan
from servekit.scheduler.checkpoint import (
    NO_LOGPROBS,
    ManagerState,
    ResultState,
    SampledSequences,
    map_hashes,
    replay_prompt,
    replay_result,
    replay_sampling,
    restore_manager,
    save_manager,
    summarize_result,
)
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
from servekit.scheduler.crash_quarantine import CrashRecord
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.prefix_cache import chain_hash
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason, Progress, Sequence
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager

HASH_BYTES = 8  # of a block, and of a long column of a plan

# -- records -----------------------------------------------------------------------------------------------------------


class ProgressRecord(Struct, frozen=True, array_like=True):
    """A Progress, with the number of its tokens, and the crashes that came with it."""

    num_output_tokens: int
    num_prompt_logprobs: int
    first_scheduled_s: float | None
    num_cached_tokens: int | None
    num_preemptions: int
    num_share_preemptions: int
    incarnation: int
    crashes: tuple[int, int] | None  # (number of crashes, tokens known at the last one)
    output_token_ids: bytes | None = None  # int32, if asked for


class AddRecord(Struct, frozen=True, array_like=True, tag=0):
    """An AddSequence, with the length of its prompt."""

    sequence_id: int
    prompt_length: int
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
    hashes: bytes  # of the blocks that were hashed during the command, as in all records
    block_hashes: bytes  # of the command itself
    token_ids: bytes | None = None  # int32, if asked for
    progress: ProgressRecord | None = None
    max_drafts: int | None = None


class PlanRecord(Struct, frozen=True, array_like=True, tag=1):
    """A Plan and its outcome: the columns of `plan_columns`, or None."""

    now_s: float
    columns: list[Any] | None
    hashes: bytes


class CommitRecord(Struct, frozen=True, array_like=True, tag=2):
    """A Commit."""

    now_s: float
    result: ResultState
    hashes: bytes
    token_ids: bytes | None = None  # int32, if asked for


class ExpireRecord(Struct, frozen=True, array_like=True, tag=3):
    """An Expire that ended sequences."""

    now_s: float
    sequence_ids: list[int]
    hashes: bytes


class FinishRecord(Struct, frozen=True, array_like=True, tag=4):
    """A Finish that ended a sequence."""

    sequence_id: int
    reason: FinishReason
    hashes: bytes
    num_output_tokens: int | None = None


class RestartRecord(Struct, frozen=True, array_like=True, tag=5):
    """A Restart, and the sequences that it found to crash workers."""

    is_out_of_memory: bool
    failed_ids: list[int]
    hashes: bytes


class WithdrawRecord(Struct, frozen=True, array_like=True, tag=8):
    """A Withdraw, with the ids of its outcome."""

    sequence_ids: list[int]
    hashes: bytes


class ChargeElsewhereRecord(Struct, frozen=True, array_like=True, tag=9):
    """A ChargeElsewhere."""

    num_tokens: dict[str, int]
    max_lead: int
    hashes: bytes


class AnnounceBlocksRecord(Struct, frozen=True, array_like=True, tag=10):
    """An AnnounceBlocks."""

    keys: bytes
    hashes: bytes


CommandRecord = (
    AddRecord
    | PlanRecord
    | CommitRecord
    | ExpireRecord
    | FinishRecord
    | RestartRecord
    | WithdrawRecord
    | ChargeElsewhereRecord
    | AnnounceBlocksRecord
)


class ErrorRecord(Struct, frozen=True, array_like=True, tag=6):
    """A command at which the manager raised an unexpected error."""

    record: CommandRecord
    error: str


class CheckpointRecord(Struct, frozen=True, array_like=True, tag=7):
    """The manager's state before the next record."""

    state: ManagerState


Record = CommandRecord | ErrorRecord | CheckpointRecord

# -- plans as columns --------------------------------------------------------------------------------------------------

_MAX_COLUMN_BYTES = 24  # a longer column is recorded as its digest, in a plan that is longer than this:
_MAX_PLAN_BYTES = 96

# The drafts of a chunk are in no column: it is a chunk of one position with that many more, for which no ids are known.
PLAN_COLUMNS = (
    "epoch",
    "step_id",
    "copies",
    "slot_assignments.slot",
    "slot_assignments.prompt_length",
    "slot_assignments.max_tokens",
    "slot_assignments.num_token_ids",
    "chunks.slot",
    "chunks.start",
    "chunks.num_tokens",
    "chunks.new_block_ids",
    "chunks.samples",
    "chunks.num_token_ids",
    "stores.block",
    "loads.block",
    "sends.block",
)

_encode = msgspec.msgpack.Encoder().encode


def plan_columns(plan: StepPlan) -> list[Any]:
    """A plan, one value for each of PLAN_COLUMNS, with the number of token ids in place of the ids.

    Each field of the plan's parts is a column: a steady stream of decodes has the same columns but for a few.
    """
    assignments, chunks = plan.slot_assignments, plan.chunks
    # Comprehensions take half the time of `map` with `attrgetter`: 40 µs for 256 chunks.
    return [
        plan.epoch,
        plan.step_id,
        plan.copies,
        [assignment.slot for assignment in assignments],
        [assignment.prompt_length for assignment in assignments],
        [assignment.sampling.max_tokens for assignment in assignments],
        [len(assignment.token_ids) for assignment in assignments],
        [chunk.slot for chunk in chunks],
        [chunk.start for chunk in chunks],
        [chunk.num_tokens for chunk in chunks],
        [chunk.new_block_ids for chunk in chunks],
        [chunk.samples for chunk in chunks],
        [len(chunk.token_ids) for chunk in chunks],
        [block for block, _ in plan.stores],
        [block for _, block in plan.loads],
        [block for block, _ in plan.sends],
    ]


def shorten(columns: list[Any]) -> list[Any]:
    """The columns of a plan, with digests in place of long ones unless the plan is short. Takes some 100 bytes."""
    if len(_encode(columns)) <= _MAX_PLAN_BYTES:
        return columns
    shortened = []
    for column in columns:
        encoded = _encode(column)
        is_short = len(encoded) <= _MAX_COLUMN_BYTES
        shortened.append(column if is_short else blake2b(encoded, digest_size=HASH_BYTES).digest())
    return shortened


# -- recording ---------------------------------------------------------------------------------------------------------


class RecordSink(Protocol):
    """Where a RecordedManager puts its records."""

    is_recording: bool
    """False if nothing more can be recorded."""

    is_checkpoint_due: bool
    """True if a checkpoint is wanted when the manager is idle."""

    is_checkpoint_overdue: bool
    """True if a checkpoint is wanted at once."""

    def put(self, record: CommandRecord | ErrorRecord | ManagerState) -> None:
        """Take a record, or a state that was asked for."""

    def fail(self, error: Exception) -> None:
        """Stop recording, because a record could not be made."""


class RecordedManager(WorkloadManager):
    """A workload manager whose commands are recorded. They must all be given through `apply`."""

    def __init__(
        self,
        config: SchedulerConfig,
        sink: RecordSink,
        encoder: RecordEncoder,
        output_lengths: OutputLengthPredictor | None = None,
    ) -> None:
        super().__init__(config, output_lengths, self._hash_and_note)
        self._sink = sink
        self._encoder = encoder
        self._hashes: list[bytes] = []

    def _hash_and_note(self, previous: bytes, token_ids: array[int]) -> bytes:
        block_hash = chain_hash(previous, token_ids)
        self._hashes.append(block_hash)
        return block_hash

    def apply(self, command: Operation[Outcome]) -> Outcome:
        try:
            outcome = super().apply(command)
        except ServekitError:
            raise  # refused, without any effect
        except Exception as error:
            self._note(command, error)
            raise
        self._note(command, outcome)
        return outcome

    def _note(self, command: Operation[Any], outcome: Any) -> None:
        hashes, self._hashes = self._hashes, []
        sink = self._sink
        if not sink.is_recording:
            return
        sampled = self._in_flight[-1].sampled if type(outcome) is StepPlan else ()
        try:
            record = self._encoder.encode(command, outcome, hashes, sampled)
        except Exception as error:
            sink.fail(error)
            return
        if record is not None:
            sink.put(record)
        if sink.is_checkpoint_overdue or (sink.is_checkpoint_due and not self.has_work):
            sink.put(save_manager(self))


class RecordEncoder:
    """Makes records of commands, in their order."""

    def __init__(self, key: bytes, keeps_token_ids: bool = False) -> None:
        self._key = key
        self._keeps_token_ids = keeps_token_ids
        self._sampled: dict[tuple[int, int], SampledSequences] = {}  # by epoch and step id, of steps in flight

    def encode(
        self, command: Operation[Any], outcome: Any, hashes: list[bytes], sampled: SampledSequences
    ) -> CommandRecord | ErrorRecord | None:
        """The record of a command; None if the command had no effect.

        `outcome` is the manager's answer, or the exception that it raised. `hashes` were computed meanwhile. `sampled`
        belongs to the step that was planned.
        """
        if isinstance(outcome, Exception):
            record = self._command_record(command, None, hashes, sampled)
            return ErrorRecord(record, f"{type(outcome).__name__}: {outcome}")
        if not outcome and isinstance(command, Expire | Finish | Withdraw):
            return None  # no deadline had passed, or the sequences had ended before
        return self._command_record(command, outcome, hashes, sampled)

    def encode_checkpoint(self, state: ManagerState) -> CheckpointRecord:
        """The record of a state. It keeps nothing, so another thread may call it."""
        return CheckpointRecord(map_hashes(state, self._hash))

    def _hash(self, block_hash: bytes) -> bytes:
        return blake2b(self._key + block_hash, digest_size=HASH_BYTES).digest()  # faster than with the argument `key`

    def _command_record(
        self, command: Operation[Any], outcome: Any, raw_hashes: list[bytes], sampled: SampledSequences
    ) -> CommandRecord:
        hashes = b"".join(map(self._hash, raw_hashes))
        match command:
            case Plan():
                if outcome is None:
                    return PlanRecord(command.now_s, None, hashes)
                self._sampled[outcome.epoch, outcome.step_id] = sampled
                return PlanRecord(command.now_s, shorten(plan_columns(outcome)), hashes)
            case Commit():
                result = command.result
                state = summarize_result(result, self._sampled.pop((result.epoch, result.step_id), ()), self._hash)
                return CommitRecord(command.now_s, state, hashes, self._token_ids(result.token_ids))
            case Expire():
                return ExpireRecord(command.now_s, [each.sequence_id for each in outcome or ()], hashes)
            case AddSequence():
                return AddRecord(
                    command.sequence_id,
                    len(command.prompt_token_ids),
                    command.sampling.max_tokens,
                    command.has_length_bound,
                    command.sampling.prompt_logprobs is not None,
                    command.sampling.looks_back,
                    command.arrival_s,
                    command.tenant,
                    command.priority,
                    command.ttft_deadline_s,
                    command.deadline_s,
                    command.leader_id,
                    hashes,
                    b"".join(map(self._hash, command.block_hashes)),
                    self._token_ids(command.prompt_token_ids),
                    None if command.progress is None else self._progress_record(command.progress, command.crashes),
                    command.max_drafts,
                )
            case Finish():
                return FinishRecord(command.sequence_id, command.reason, hashes, command.num_output_tokens)
            case Withdraw():
                return WithdrawRecord([each.sequence_id for each in outcome or ()], hashes)
            case ChargeElsewhere():
                return ChargeElsewhereRecord(command.num_tokens, command.max_lead, hashes)
            case AnnounceBlocks():
                return AnnounceBlocksRecord(b"".join(map(self._hash, command.keys)), hashes)
            case Restart():
                self._sampled.clear()
                return RestartRecord(command.is_out_of_memory, [each.sequence_id for each in outcome or ()], hashes)
            case _:
                raise TypeError(f"{command!r} cannot be recorded")

    def _progress_record(self, progress: Progress, crashes: CrashRecord | None) -> ProgressRecord:
        return ProgressRecord(
            len(progress.output_token_ids),
            len(progress.prompt_logprobs),
            progress.first_scheduled_s,
            progress.num_cached_tokens,
            progress.num_preemptions,
            progress.num_share_preemptions,
            progress.incarnation,
            None if crashes is None else (crashes.num_crashes, crashes.num_tokens),
            self._token_ids(progress.output_token_ids),
        )

    def _token_ids(self, token_ids: Iterable[int]) -> bytes | None:
        return array("i", token_ids).tobytes() if self._keeps_token_ids else None


# -- replaying ---------------------------------------------------------------------------------------------------------


class ReplayDifferenceError(Exception):
    """A replayed command had another outcome than the recorded one."""

    def __init__(self, step_id: int, field: str, expected: object, got: object) -> None:
        super().__init__(f"step {step_id}: {field}: expected {expected}, got {got}")
        self.step_id = step_id
        self.field = field
        self.expected = expected
        self.got = got


class ReplayWatcher:
    """Sees what a replayed manager does. Each method does nothing, so a watcher has only those that it needs."""

    def before(self, manager: WorkloadManager, record: Record) -> None:
        """A record is about to be applied."""

    def restored(self, manager: WorkloadManager) -> None:
        """The manager is another one, with the state of a checkpoint."""

    def added(self, manager: WorkloadManager, sequence: Sequence) -> None:
        """A sequence was added."""

    def planned(self, manager: WorkloadManager, plan: StepPlan, now_s: float) -> None:
        """A step was planned."""

    def committed(self, manager: WorkloadManager, tokens: list[SequenceToken], now_s: float) -> None:
        """A result was committed, with these tokens."""


class Replayer:
    """Applies records to a manager of its own. Each method that applies raises ReplayDifferenceError."""

    def __init__(
        self,
        config: SchedulerConfig,
        make_predictor: Callable[[int], OutputLengthPredictor] = OutputLengthPredictor,
        watcher: ReplayWatcher | None = None,
    ) -> None:
        self._config = config
        self._make_predictor = make_predictor
        self._watcher = watcher or ReplayWatcher()
        self._hashes: list[bytes] = []  # recorded with the current command, the next one last
        self._step_id = 0
        self.manager = WorkloadManager(config, make_predictor(config.block_size), self._next_hash)
        self.num_plans = 0
        self.num_sequences = 0
        self.num_restarts = 0
        self.error: str | None = None  # the error that both the recorded and the replayed manager raised

    def apply(self, record: Record) -> None:
        """Apply one record, and compare its outcome."""
        self._watcher.before(self.manager, record)
        match record:
            case CheckpointRecord():
                predictor = self._make_predictor(self._config.block_size)
                self.manager = restore_manager(self._config, record.state, predictor, self._next_hash)
                self._watcher.restored(self.manager)
            case ErrorRecord():
                self._apply_error(record)
            case _:
                self._apply_command(record)

    def _apply_command(self, record: CommandRecord) -> None:
        self._hashes = _split(record.hashes)[::-1]
        try:
            self._apply_and_compare(record)
        except (AssertionError, LookupError, TypeError, ValueError, ServekitError) as error:
            self._differ("error", "none", f"{type(error).__name__}: {error}")
        if self._hashes:
            self._differ("hashes of blocks", f"{len(self._hashes)} more", "no more")

    def _apply_error(self, record: ErrorRecord) -> None:
        try:
            self._apply_command(record.record)
        except ReplayDifferenceError as difference:
            if difference.field != "error" or difference.got != record.error:
                self._differ("error", record.error, difference.got)
            self.error = record.error
        else:
            self._differ("error", record.error, "none")

    def _apply_and_compare(self, record: CommandRecord) -> None:
        manager = self.manager
        match record:
            case PlanRecord():
                # An Expire without effect is not recorded, but always comes before a Plan.
                self._compare("expired sequences", [], [each.sequence_id for each in manager.expire(record.now_s)])
                self._step_id = manager.next_step_id
                plan = manager.plan(record.now_s)
                self._compare_plan(record.columns, plan)
                if plan is not None:
                    self._watcher.planned(manager, plan, record.now_s)
            case CommitRecord():
                tokens = manager.commit(replay_result(record.result), record.now_s)
                self._watcher.committed(manager, tokens, record.now_s)
            case AddRecord():
                self.num_sequences += 1
                self._watcher.added(manager, manager.add(_add_command(record)))
            case ExpireRecord():
                expired = [each.sequence_id for each in manager.expire(record.now_s)]
                self._compare("expired sequences", record.sequence_ids, expired)
            case FinishRecord():
                self._compare(
                    "finished", True, manager.finish(record.sequence_id, record.reason, record.num_output_tokens)
                )
            case WithdrawRecord():
                withdrawn = [each.sequence_id for each in manager.withdraw(record.sequence_ids)]
                self._compare("withdrawn sequences", record.sequence_ids, withdrawn)
            case ChargeElsewhereRecord():
                manager.apply(ChargeElsewhere(record.num_tokens, record.max_lead))
            case AnnounceBlocksRecord():
                manager.apply(AnnounceBlocks(_split(record.keys)))
            case _:
                assert isinstance(record, RestartRecord)
                self.num_restarts += 1
                failed = [each.sequence_id for each in manager.restart(record.is_out_of_memory)]
                self._compare("failed sequences", record.failed_ids, failed)

    def _compare_plan(self, expected: list[Any] | None, plan: StepPlan | None) -> None:
        if plan is None or expected is None:
            self._compare("plan", "none" if expected is None else "a step", "none" if plan is None else "a step")
            return
        columns = plan_columns(plan)
        for name, wanted, shortened, column in zip(PLAN_COLUMNS, expected, shorten(columns), columns, strict=True):
            if _encode(wanted) != _encode(shortened):
                is_digest = isinstance(wanted, bytes)
                self._differ(name, f"digest {wanted.hex()}" if is_digest else wanted, column)
        self.num_plans += 1

    def _compare(self, field: str, expected: object, got: object) -> None:
        if expected != got:
            self._differ(field, expected, got)

    def _differ(self, field: str, expected: object, got: object) -> NoReturn:
        raise ReplayDifferenceError(self._step_id, field, expected, got) from None

    def _next_hash(self, previous: bytes, token_ids: array[int]) -> bytes:
        if not self._hashes:
            self._differ("hashes of blocks", "no more", "one more")
        return self._hashes.pop()


def _add_command(record: AddRecord) -> AddSequence:
    progress = record.progress
    return AddSequence(
        sequence_id=record.sequence_id,
        prompt_token_ids=replay_prompt(record.prompt_length),
        sampling=replay_sampling(record.max_tokens, record.needs_prompt_logprobs, record.looks_back),
        arrival_s=record.arrival_s,
        tenant=record.tenant,
        priority=record.priority,
        ttft_deadline_s=record.ttft_deadline_s,
        deadline_s=record.deadline_s,
        leader_id=record.leader_id,
        has_length_bound=record.has_length_bound,
        block_hashes=_split(record.block_hashes),
        progress=None if progress is None else _replay_progress(progress),
        crashes=CrashRecord(*progress.crashes) if progress is not None and progress.crashes is not None else None,
        max_drafts=record.max_drafts,
    )


def _replay_progress(record: ProgressRecord) -> Progress:
    return Progress(
        output_token_ids=replay_prompt(record.num_output_tokens),
        prompt_logprobs=(NO_LOGPROBS,) * record.num_prompt_logprobs,
        first_scheduled_s=record.first_scheduled_s,
        num_cached_tokens=record.num_cached_tokens,
        num_preemptions=record.num_preemptions,
        num_share_preemptions=record.num_share_preemptions,
        incarnation=record.incarnation,
    )


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
