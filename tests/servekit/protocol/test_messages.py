"""Claims about the messages between manager and worker."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from servekit.protocol.messages import (
    MAX_FAILURE_CHARACTERS,
    MAX_LISTED_KEYS,
    LoadModel,
    ModelInfo,
    PromptLogprobs,
    RankInfo,
    ScheduledChunk,
    SlotAssignment,
    StepAcknowledged,
    StepPlan,
    StepResult,
    TokenLogprobs,
    ToWorker,
    TransferReport,
    WorkerReady,
)
from servekit.protocol.sampling_params import MAX_TOP_LOGPROBS, SamplingParams


def assign(slot: int, grammar: str | None) -> SlotAssignment:
    return SlotAssignment(slot, SamplingParams(max_tokens=5, seed=slot, grammar=grammar), prompt_length=3)


def test_a_grammar_is_sent_once_for_all_slots_that_use_it() -> None:
    grammars = ["a" * 10_000, None, "b" * 10_000, "a" * 10_000, "a" * 10_000]
    plan = StepPlan(
        0,
        1,
        tuple(assign(slot, text) for slot, text in enumerate(grammars)),
        (ScheduledChunk(0, 0, 1, (5,), (), True),),
    )
    sent = msgspec.msgpack.encode(plan.pack_grammars())
    assert len(sent) < 21_000
    arrived = msgspec.msgpack.decode(sent, type=ToWorker)
    assert isinstance(arrived, StepPlan) and arrived.unpack_grammars() == plan


def test_a_plan_without_grammars_is_sent_unchanged() -> None:
    plan = StepPlan(0, 1, (assign(0, None),), ())
    assert plan.pack_grammars() is plan and plan.unpack_grammars() is plan


def test_likeliest_tokens_are_read_as_they_were_written() -> None:
    logprobs = TokenLogprobs.of(-0.5, [7, 2**31 - 1], [-0.25, -1.5])
    assert logprobs.logprob == -0.5 and logprobs.top == [(7, -0.25), (2**31 - 1, -1.5)]
    with pytest.raises(ValueError, match="multiple of"):
        _ = TokenLogprobs(-0.5, b"123").top


def test_an_acknowledgement_tells_whether_two_ranks_sampled_the_same_tokens() -> None:
    """The time that a rank took makes no difference, but which sequence a token is for does."""
    ours, same, other = StepResult(1, 2, (5, 6), 0.1), StepResult(1, 2, (5, 6), 0.2), StepResult(1, 2, (6, 5), 0.1)
    assert StepAcknowledged.of(ours) == StepAcknowledged.of(same) != StepAcknowledged.of(other)
    spans = [StepAcknowledged.of(StepResult(1, 2, (5, 6, 7), 0.1, counts=counts)) for counts in ((1, 2), (2, 1), ())]
    assert len(set(spans)) == 3


def test_a_block_is_of_use_only_where_all_ranks_have_it() -> None:
    keys = [bytes([number]) * 16 for number in range(4)]
    one = TransferReport((4, 1), (keys[0],), num_stored=5, num_received=8, num_unwritten=1, block_bytes=10)
    other = TransferReport((4, 0), (keys[2], keys[0]), num_stored=5, num_received=7, num_unwritten=3, block_bytes=20)
    both = TransferReport((0, 1, 4), (keys[0], keys[2]), num_stored=5, num_received=7, num_unwritten=3, block_bytes=30)
    assert one.with_ranks([other]) == both and one.with_ranks([]).failed_loads == (1, 4)


def test_ranks_that_drop_more_keys_than_a_message_may_have_report_as_many() -> None:
    reports = [
        TransferReport(dropped_keys=tuple((first + number).to_bytes(16) for number in range(MAX_LISTED_KEYS)))
        for first in (0, 2**40)
    ]
    assert reports[0].with_ranks(reports[1:]).dropped_keys == reports[0].dropped_keys


def test_each_rank_transfers_through_the_memory_of_the_ranks_with_its_number() -> None:
    """Of two prefill workers with three ranks each."""
    load = LoadModel("", "auto", "cpu", 16, 1, 1, None, 1, None, 0.9, tensor_parallel_size=3)
    load = replace(load, kv_transfer_fds=(10, 11, 12, 20, 21, 22))
    assert [replace(load, rank=rank).own_transfer_fds for rank in range(3)] == [(10, 20), (11, 21), (12, 22)]
    on_its_own_machine = replace(load, kv_transfer_fds=(30, 40), rank=1, local_rank=0)
    assert on_its_own_machine.own_transfer_fds == (30, 40)


def test_the_first_rank_of_the_last_stage_sends_the_results() -> None:
    """Two stages of three ranks each."""
    first = LoadModel("", "auto", "cpu", 16, 1, 1, None, 1, None, 0.9, tensor_parallel_size=3, pipeline_parallel_size=2)
    assert [replace(first, rank=rank).is_result_rank for rank in range(6)] == [False, False, False, True, False, False]


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(1, 1), (256, 2048), (500, 500)])
def test_the_largest_result_is_within_the_bound_and_the_bound_is_not_far_above(num_seqs: int, num_tokens: int) -> None:
    """Every sequence samples, fails and is deferred, and every token has all logprobs."""
    load = LoadModel("", "auto", "cpu", 16, num_seqs, num_tokens, None, 1, None, 0.9)
    largest_id = 2**31 - 1
    logprobs = TokenLogprobs.of(-1e-300, [largest_id] * MAX_TOP_LOGPROBS, [-1.5] * MAX_TOP_LOGPROBS)
    share = -(-num_tokens // num_seqs)
    result = StepResult(
        epoch=largest_id,
        step_id=2**53,
        token_ids=(largest_id,) * num_seqs,
        step_time_s=1e-300,
        logprobs=(logprobs,) * num_seqs,
        prompt_logprobs=tuple(PromptLogprobs(2**16, 2**24, (logprobs,) * share) for _ in range(num_seqs)),
        failures=((2**16, "\N{GRINNING FACE}" * MAX_FAILURE_CHARACTERS),) * num_seqs,
        deferred=tuple(range(2**16, 2**16 + num_seqs)),
        counts=(2**16,) * num_seqs,
    )
    size = len(msgspec.msgpack.encode(result))
    assert size <= load.max_answer_bytes <= 1.1 * size + 2**20


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((), "8 KV blocks, cpu"),
        ((RankInfo("cpu", "0-3"),), "8 KV blocks, cpu, cores 0-3"),
        (
            (RankInfo("cuda:2", "0-7"), RankInfo("cuda:0", "8-15")),
            "8 KV blocks in each of 2 ranks, rank 0: cuda:2, cores 0-7; rank 1: cuda:0, cores 8-15",
        ),
        (
            (RankInfo("cpu", "0", "gpu-7"), RankInfo("cpu", "0", "gpu-8")),
            "8 KV blocks in each of 2 ranks, rank 0: gpu-7, cpu, cores 0; rank 1: gpu-8, cpu, cores 0",
        ),
    ],
)
def test_a_worker_says_where_each_rank_runs(ranks: tuple[RankInfo, ...], expected: str) -> None:
    model = ModelInfo("LlamaForCausalLM", 1000, 64, 2048, (0,), 1.0, 0, 1.0)
    assert WorkerReady(model, "cpu", "float32", 8, 4, 0.5, ranks=ranks).place == expected


@pytest.mark.parametrize(
    "ranks", [(RankInfo("cpu", "0," * 2**15),), (RankInfo("c" * 101, "0"),), (RankInfo("cpu", "0"),) * 1025]
)
def test_where_a_worker_runs_is_no_longer_a_text_than_a_machine_needs(ranks: tuple[RankInfo, ...]) -> None:
    model = ModelInfo("LlamaForCausalLM", 1000, 64, 2048, (0,), 1.0, 0, 1.0)
    sent = msgspec.msgpack.encode(WorkerReady(model, "cpu", "float32", 8, 4, 0.5, ranks=ranks))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(sent, type=WorkerReady)


def test_a_result_in_which_every_position_gives_a_token_is_within_the_bound() -> None:
    num_seqs, num_tokens = 64, 512
    load = LoadModel("", "auto", "cpu", 16, num_seqs, num_tokens, None, 1, None, 0.9)
    largest_id = 2**31 - 1
    logprobs = TokenLogprobs.of(-1e-300, [largest_id] * MAX_TOP_LOGPROBS, [-1.5] * MAX_TOP_LOGPROBS)
    result = StepResult(
        epoch=largest_id,
        step_id=2**53,
        token_ids=(largest_id,) * num_tokens,
        step_time_s=1e-300,
        logprobs=(logprobs,) * num_tokens,
        counts=(num_tokens // num_seqs,) * num_seqs,
    )
    size = len(msgspec.msgpack.encode(result))
    assert size <= load.max_answer_bytes - 2**20


def test_workers_give_the_same_tokens_only_with_the_same_model_and_the_same_dtype() -> None:
    model = ModelInfo("LlamaForCausalLM", 1000, 64, 2048, (0,), 1.0, 0, 1.0, fingerprint="a")
    ready = WorkerReady(model, "cpu", "float32", num_blocks=8, kv_bytes_per_token=4, load_time_s=0.5)
    assert ready.difference(replace(ready, num_blocks=9, load_time_s=1.5, device="cuda:0")) is None
    other_model = replace(ready, model=replace(model, fingerprint="b"))
    found = ready.difference(other_model)
    assert found is not None and "fingerprint is 'a'" in found and "'b'" in found
    found = ready.difference(replace(ready, device="cuda:0", dtype="bfloat16"))
    assert found is not None and "float32 on cpu" in found and "bfloat16 on cuda:0" in found and "--dtype" in found


def test_a_plan_has_drafts_if_one_of_its_chunks_has() -> None:
    decode, verified = ScheduledChunk(0, 5, 1, (), (), True), ScheduledChunk(1, 5, 3, (), (), True, 2)
    assert not StepPlan(0, 0, (), (decode,), ()).has_drafts
    assert StepPlan(0, 0, (), (decode, verified), ()).has_drafts
