"""Claims about recorded commands: a replay repeats every plan, from the start and from every checkpoint."""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from servekit.errors import ContextTooLong
from servekit.protocol.messages import ScheduledChunk, StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.block_pool import BlockPool
from servekit.scheduler.checkpoint import ManagerState, ResultState, restore_manager, save_manager
from servekit.scheduler.commands import AddSequence, Commit, Expire, Finish, Operation, Plan
from servekit.scheduler.lazy_heap import LazyHeap
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.recording import (
    PLAN_COLUMNS,
    AddRecord,
    CheckpointRecord,
    CommandRecord,
    CommitRecord,
    ErrorRecord,
    ExpireRecord,
    FinishRecord,
    PlanRecord,
    Record,
    RecordedManager,
    RecordEncoder,
    ReplayDifferenceError,
    Replayer,
    ReplayWatcher,
    RestartRecord,
    plan_columns,
    shorten,
)
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason, Sequence, Status
from servekit.scheduler.step import SequenceToken, Step
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.scenario import Scenario
from servekit.simulation.service import RecklessPredictor, Simulation
from tests.servekit.simulation.recorded import KEY, ListSink, record_scenario, replay
from tests.servekit.simulation.scenarios import make_scenario, recordable


@pytest.mark.parametrize("shard", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_scenario_is_replayed_with_identical_plans(shard: int) -> None:
    num_plans = num_restarts = num_bytes = 0
    for seed in range(shard * 20, (shard + 1) * 20):
        scenario = make_scenario(seed)
        records = record_scenario(scenario).records()
        replayer = replay(scenario, records)
        assert replayer.error is None and replayer.num_sequences == len(scenario.arrivals)
        num_plans += replayer.num_plans
        num_restarts += replayer.num_restarts
        num_bytes += len(msgspec.msgpack.encode(records))
    assert num_plans > 5_000 and num_restarts > 10
    assert num_bytes < 150 * num_plans


@pytest.mark.parametrize("shard", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_replay_from_any_checkpoint_gives_the_same_plans(shard: int) -> None:
    num_checkpoints = 0
    for seed in range(shard * 20, (shard + 1) * 20):
        scenario = make_scenario(seed)
        records = record_scenario(scenario, checkpoint_rate=0.01).records()
        for index, record in enumerate(records):
            if isinstance(record, CheckpointRecord):
                num_checkpoints += 1
                replay(scenario, records[index : index + 150])
        replay(scenario, records)  # checkpoints included
    assert num_checkpoints > 50


# -- checkpoints -------------------------------------------------------------------------------------------------------

# What a restored manager has otherwise, by design: tokens and their logprobs, functions, and parts of a planned step
# that nothing reads once it is sent.
_NOT_COMPARED = {
    *("token_ids", "prompt_logprobs", "sampling", "stop_set", "stop_token_id", "result"),
    *("_hash_block", "_on_reuse", "_sink", "_encoder", "_hashes", "_output_lengths"),
    *("budget", "slot_assignments", "chunks", "copies", "sampled"),
    "_fitted_s",  # computed from the fields beside it
    # A restored manager writes them when they are needed, from the sequences.
    *("_future_peak", "_changed", "_unsteady", "_has_advanced", "peak_entry"),
    *("log", "history", "prefills", "left_out"),  # no decision depends on these: they explain
    "_prefetches",  # nor on these: a worker that does not get them reads later
}


def comparable(value: Any) -> Any:
    """A value as lists, dicts and numbers, with sequences by id; entries of heaps without effect are left out."""
    if isinstance(value, Sequence):
        return None if value.status is Status.FINISHED else value.sequence_id
    if isinstance(value, LazyHeap):
        valid = [(key, each) for key, _, version, each in value._entries if value._is_valid(each, version)]
        # A deadline to the first token has no effect once there is a token.
        return sorted(
            (key, each.sequence_id)
            for key, each in valid
            if key != each.ttft_deadline_s or key == each.deadline_s or not each.num_output_tokens
        )
    if isinstance(value, dict):
        compared = {key: comparable(each) for key, each in value.items()}
        return {key: each for key, each in compared.items() if each != []}
    if isinstance(value, list | tuple | deque):
        ended = [each for each in value if isinstance(each, Sequence) and each.status is Status.FINISHED]
        return [comparable(each) for each in value if each not in ended]
    if isinstance(value, set):
        return sorted(value)
    is_compared_whole = isinstance(value, Struct) and not isinstance(value, Step)
    if is_compared_whole or value is None or isinstance(value, int | float | str | bytes | frozenset):
        return value
    return {name: comparable(getattr(value, name)) for name in fields_of(value)}


def fields_of(value: Any) -> list[str]:
    names = value.__struct_fields__ if isinstance(value, Step) else getattr(value, "__slots__", None) or vars(value)
    return [name for name in names if name not in _NOT_COMPARED]


def all_of(manager: WorkloadManager) -> dict[str, Any]:
    sequences = {
        sequence.sequence_id: {name: comparable(getattr(sequence, name)) for name in fields_of(sequence)}
        for sequence in manager._sequences.values()
    }
    return {"sequences": sequences, "manager": comparable(manager)}


def test_a_restored_manager_has_every_field_of_the_saved_one() -> None:
    """Also fields that are added later: none is named here unless it is left out on purpose."""
    num_compared = 0

    class ComparingSink(ListSink):
        def put(self, record: CommandRecord | ErrorRecord | ManagerState) -> None:
            nonlocal num_compared
            super().put(record)
            if isinstance(record, ManagerState):
                predictor = RecklessPredictor if scenario.is_reckless else OutputLengthPredictor
                config = scenario.scheduler
                restored = restore_manager(config, record, predictor(config.block_size))
                restored.check()
                assert all_of(restored) == all_of(managers[-1])
                assert save_manager(restored) == record
                num_compared += 1

    def make_manager(config: SchedulerConfig, predictor: OutputLengthPredictor) -> WorkloadManager:
        managers.append(RecordedManager(config, ComparingSink(0.02, seed), RecordEncoder(KEY), predictor))
        return managers[-1]

    managers: list[WorkloadManager] = []
    for seed in range(20):
        scenario = recordable(make_scenario(seed))
        Simulation(scenario, check=False, make_manager=make_manager).run()
    assert num_compared > 100


# -- differences are found ---------------------------------------------------------------------------------------------


def find_difference(scenario: Scenario, records: list[Record]) -> ReplayDifferenceError:
    with pytest.raises(ReplayDifferenceError) as caught:
        replay(scenario, records)
    return caught.value


def test_a_bug_in_the_replayed_manager_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fences of a step are lifted one step too early, so other blocks are leased."""
    scenario = next(make_scenario(seed) for seed in range(100) if make_scenario(seed).scheduler.max_steps_in_flight > 1)
    records = record_scenario(scenario).records()
    settle = BlockPool.settle
    monkeypatch.setattr(BlockPool, "settle", lambda self, step_id: settle(self, step_id + 1))
    difference = find_difference(scenario, records)
    assert difference.step_id > 0 and str(difference).startswith(f"step {difference.step_id}: {difference.field}: ")


def change(records: list[Record], kind: type, number: int, **changes: Any) -> list[Record]:
    """The records with one of them changed: the one with this number of its kind."""
    index = [index for index, record in enumerate(records) if isinstance(record, kind)][number]
    return [*records[:index], replace(records[index], **changes), *records[index + 1 :]]


def test_the_first_difference_names_step_field_expected_and_got() -> None:
    scenario = make_scenario(0)
    records = record_scenario(scenario).records()
    plans = [record for record in records if isinstance(record, PlanRecord) and record.columns is not None]
    columns = plans[0].columns
    assert columns is not None
    number = [record for record in records if isinstance(record, PlanRecord)].index(plans[0])
    column = PLAN_COLUMNS.index("chunks.num_tokens")
    wrong = [*columns[:column], [77], *columns[column + 1 :]]
    difference = find_difference(scenario, change(records, PlanRecord, number, columns=wrong))
    assert str(difference) == f"step 0: chunks.num_tokens: expected [77], got {columns[column]}"
    wrong = [*columns[:column], bytes(8), *columns[column + 1 :]]
    difference = find_difference(scenario, change(records, PlanRecord, number, columns=wrong))
    assert str(difference) == f"step 0: chunks.num_tokens: expected digest 0000000000000000, got {columns[column]}"
    difference = find_difference(scenario, change(records, PlanRecord, number, columns=None))
    assert str(difference) == "step 0: plan: expected none, got a step"


def test_differences_in_other_outcomes_are_found() -> None:
    @functools.cache
    def recorded(seed: int) -> tuple[Scenario, list[Record]]:
        scenario = make_scenario(seed)
        return scenario, record_scenario(scenario).records()

    def first(condition: Callable[[Scenario, list[Record]], bool]) -> tuple[Scenario, list[Record]]:
        return next(each for each in map(recorded, range(60)) if condition(*each))

    for kind, changes, field in (
        (ExpireRecord, {"sequence_ids": [999]}, "expired sequences"),
        (FinishRecord, {"sequence_id": 999}, "finished"),
        (RestartRecord, {"failed_ids": [999]}, "failed sequences"),
        (CommitRecord, {"result": ResultState(0, 0, 99, [], [], [])}, "error"),
    ):
        scenario, records = first(lambda _, records, kind=kind: any(isinstance(each, kind) for each in records))
        assert find_difference(scenario, change(records, kind, 0, **changes)).field == field
    scenario, records = first(lambda scenario, _: scenario.scheduler.enable_prefix_caching)
    number = next(i for i, record in enumerate(r for r in records if isinstance(r, AddRecord)) if record.hashes)
    for hashes, message in ((b"", "expected no more, got one more"), (bytes(800), "expected")):
        difference = find_difference(scenario, change(records, AddRecord, number, hashes=hashes))
        assert difference.field == "hashes of blocks" and message in str(difference)


def test_an_expiry_that_was_not_recorded_is_a_difference() -> None:
    scenario, records = next(
        (scenario, records)
        for scenario, records in ((each, record_scenario(each).records()) for each in map(make_scenario, range(60)))
        if any(isinstance(record, ExpireRecord) for record in records)
    )
    without = [record for record in records if not isinstance(record, ExpireRecord)]
    assert find_difference(scenario, without).field == "expired sequences"


class SeenSteps(ReplayWatcher):
    """A watcher that keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def before(self, manager: WorkloadManager, record: Record) -> None:
        self.seen.append((type(record).__name__,))

    def restored(self, manager: WorkloadManager) -> None:
        self.seen.append(("restored", manager.sequence_ids))

    def added(self, manager: WorkloadManager, sequence: Sequence) -> None:
        self.seen.append(("added", sequence.sequence_id))

    def planned(self, manager: WorkloadManager, plan: StepPlan, now_s: float) -> None:
        self.seen.append(("planned", plan.step_id, now_s))

    def committed(self, manager: WorkloadManager, tokens: list[SequenceToken], now_s: float) -> None:
        self.seen.append(("committed", len(tokens), now_s))


def test_a_watcher_sees_what_the_replayed_manager_adds_plans_and_commits() -> None:
    _, records = record_one_answer()
    config, watcher = make_recorded_manager()[0].config, SeenSteps()
    replayer = Replayer(config, watcher=watcher)
    for record in records:
        replayer.apply(record)
    assert watcher.seen == [
        ("AddRecord",),
        ("added", 0),
        ("PlanRecord",),
        ("planned", 0, 0.0),
        ("CommitRecord",),
        ("committed", 1, 0.1),
        ("CheckpointRecord",),
        ("restored", [0]),
        ("FinishRecord",),
    ]


# -- what is recorded --------------------------------------------------------------------------------------------------


def make_recorded_manager(key: bytes = KEY, keeps_token_ids: bool = False) -> tuple[RecordedManager, ListSink]:
    sink = ListSink()
    config = SchedulerConfig(num_blocks=8, block_size=4, max_model_len=99, max_num_seqs=2, max_num_batched_tokens=16)
    return RecordedManager(config, sink, RecordEncoder(key, keeps_token_ids)), sink


PROMPT = tuple(range(70_000, 70_010))


def record_one_answer(key: bytes = KEY, keeps_token_ids: bool = False) -> tuple[Sequence, list[Record]]:
    manager, sink = make_recorded_manager(key, keeps_token_ids)
    sampling = SamplingParams(max_tokens=2, stop=("secret",))
    sequence = manager.apply(AddSequence(sequence_id=0, prompt_token_ids=PROMPT, sampling=sampling))
    manager.apply(Plan(0.0))
    manager.apply(Commit(StepResult(0, 0, (70_123,), 0.0), 0.1))
    sink.put(save_manager(manager))
    manager.apply(Finish(0, FinishReason.ABORT))
    return sequence, sink.records()


def test_records_hold_no_token_ids_unless_asked_and_no_hash_that_can_be_guessed() -> None:
    sequence, records = record_one_answer()
    plain = msgspec.msgpack.encode(records)
    as_msgpack = msgspec.msgpack.encode(PROMPT[0])
    for secret in (array("I", PROMPT[:1]).tobytes(), as_msgpack, b"secret", *sequence.kv.hashes):
        assert secret[:8] not in plain
    _, otherwise_keyed = record_one_answer(bytes(15) + b"1")
    assert isinstance(records[0], AddRecord) and isinstance(otherwise_keyed[0], AddRecord)
    assert records[0].hashes and records[0].hashes != otherwise_keyed[0].hashes
    add, _, commit, *_ = record_one_answer(keeps_token_ids=True)[1]
    assert isinstance(add, AddRecord) and array("I", add.token_ids or b"").tolist() == list(PROMPT)
    assert isinstance(commit, CommitRecord) and array("I", commit.token_ids or b"").tolist() == [70_123]


def test_a_long_plan_is_recorded_as_digests_of_its_long_columns() -> None:
    chunks = [ScheduledChunk(slot, 10 * slot, 1, (7,), (), True) for slot in range(40)]
    columns = plan_columns(StepPlan(3, 9, (), tuple(chunks)))
    shortened = dict(zip(PLAN_COLUMNS, shorten(columns), strict=True))
    assert shortened["step_id"] == 9 and shortened["slot_assignments.slot"] == []
    assert isinstance(shortened["chunks.start"], bytes) and len(msgspec.msgpack.encode(shortened)) < 400
    chunks[17] = replace(chunks[17], start=171)
    others = dict(zip(PLAN_COLUMNS, shorten(plan_columns(StepPlan(3, 9, (), tuple(chunks)))), strict=True))
    assert [name for name in PLAN_COLUMNS if others[name] != shortened[name]] == ["chunks.start"]
    short = plan_columns(StepPlan(3, 9, (), tuple(chunks[:2])))
    assert shorten(short) is short


def test_commands_without_effect_are_not_recorded() -> None:
    manager, sink = make_recorded_manager()
    manager.apply(Expire(0.0))
    manager.apply(Finish(0, FinishReason.ABORT))
    with pytest.raises(ContextTooLong):
        manager.apply(AddSequence(sequence_id=0, prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=90)))
    assert sink.records() == []


def test_a_manager_goes_on_without_records_when_its_sink_has_stopped() -> None:
    manager, sink = make_recorded_manager()
    sink.is_recording = False
    manager.apply(AddSequence(sequence_id=0, prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=2)))
    assert manager.apply(Plan(0.0)) is not None and not sink.kept


def test_an_error_of_the_manager_is_recorded_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, sink = make_recorded_manager()
    manager.apply(AddSequence(sequence_id=0, prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=2)))

    def lease(self: BlockPool, num_blocks: int, is_reserved: bool = False) -> list[int]:
        raise AssertionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(BlockPool, "lease", lease)
        with pytest.raises(AssertionError, match="a bug"):
            manager.apply(Plan(0.0))
        records = sink.records()
        replayer = Replayer(manager.config)
        for record in records:
            replayer.apply(record)
        assert replayer.error == "AssertionError: a bug"
    for error in ("none", "a step"):
        replayer = Replayer(manager.config)
        replayer.apply(records[0])
        failed = records[1]
        assert isinstance(failed, ErrorRecord)
        if error == "none":  # the replayed manager raises nothing
            failed = replace(failed, record=FinishRecord(0, FinishReason.ABORT, b""))
        with pytest.raises(ReplayDifferenceError, match=f"expected AssertionError: a bug, got {error}"):
            replayer.apply(failed)
    with monkeypatch.context() as patched:
        patched.setattr(BlockPool, "lease", lease)
        replayer = Replayer(manager.config)
        replayer.apply(records[0])
        with pytest.raises(ReplayDifferenceError, match="expected x, got AssertionError: a bug"):
            replayer.apply(replace(records[1], error="x"))


def test_a_command_that_cannot_be_recorded_stops_the_recording_only() -> None:
    class Unknown(Operation[None], frozen=True):
        pass

    manager, sink = make_recorded_manager()
    with pytest.raises(TypeError, match="is not a command of the workload manager"):
        manager.apply(Unknown())
    assert [str(error) for error in sink.failures] == [f"{Unknown()!r} cannot be recorded"]
    manager.apply(AddSequence(sequence_id=0, prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=2)))
    assert manager.apply(Plan(0.0)) is not None and sink.records() == []
