"""Claims about steps that memory does not hold: executed in parts they give the same, and no worker ends."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.messages import PromptLogprobs, ScheduledChunk, StepPlan, StepResult, TokenLogprobs
from tests.support.inprocess import InProcessEngine, load
from tests.support.little_memory import LittleMemory
from workers.loading.model_manager import LoadedModel
from workers.runner import model_runner
from workers.runner.interface import OutOfMemory
from workers.runner.model_runner import ModelRunner
from workers.runner.oom_retry import merge_results, raises_out_of_memory, split_plan

OPTIONS: list[dict[str, Any]] = [
    {"logprobs": 2, "prompt_logprobs": 1},
    {},
    {"temperature": 0.8, "seed": 4},
    {"repetition_penalty": 1.4, "logprobs": 0},
    {"prompt_logprobs": 0},
]


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(DEMO_MODEL_PATH)


@pytest.fixture(scope="module")
def at_once(demo: LoadedModel) -> list[Any]:
    """The answers with enough memory."""
    return played(demo)


def played(loaded: LoadedModel) -> list[Any]:
    """Token ids, prompt logprobs and logprobs of sequences with all kinds of options."""
    engine = InProcessEngine(loaded, num_blocks=128, max_num_batched_tokens=128)
    sequences = [
        engine.add([(7 * token + number) % 500 + 5 for token in range(20 + 9 * number)], max_tokens=9, **options)
        for number, options in enumerate(OPTIONS)
    ]
    engine.run()
    return [(s.output_token_ids, s.prompt_logprobs, engine.logprobs[s.sequence_id]) for s in sequences]


@pytest.mark.parametrize("max_tokens", [100, 40, 16])
def test_step_in_parts_gives_the_same_as_at_once(
    demo: LoadedModel, at_once: list[Any], monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    num_releases = 0

    def release_memory() -> None:  # a garbage collection takes a tenth of a second here
        nonlocal num_releases
        num_releases += 1

    monkeypatch.setattr(model_runner, "release_memory", release_memory)
    memory = LittleMemory(monkeypatch, max_tokens)
    in_parts = played(demo)
    assert num_releases == memory.num_failures > 0, "memory is released before each further attempt"
    for (tokens, of_prompt, of_output), (same, also_of_prompt, also_of_output) in zip(at_once, in_parts, strict=True):
        assert tokens == same
        assert_alike(of_prompt, also_of_prompt)
        assert_alike(of_output, also_of_output)


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_step_that_does_not_fit_in_the_smallest_parts_raises_and_later_steps_run(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = InProcessEngine(demo)
    engine.add(list(range(5, 50)), max_tokens=4)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> torch.Tensor:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory")

        patch.setattr(ModelRunner, "_forward", fail)
        with pytest.raises(
            OutOfMemory,
            match=r"a step of 45 tokens does not fit into memory, not even 16 tokens at a time: .*can't allocate",
        ):
            engine.step()
    assert engine.manager.restart(is_out_of_memory=True) == []
    engine._in_flight.clear()
    engine.run()
    assert not engine.manager.has_work


class Tensors:
    """Stands for what a failed step holds; gone when nothing refers to it."""


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nDetails"), MemoryError()], ids=repr)
def test_failed_step_keeps_no_tensors(error: Exception) -> None:
    alive: list[weakref.ref[Tensors]] = []

    @raises_out_of_memory
    def fail() -> None:
        tensors = Tensors()
        alive.append(weakref.ref(tensors))
        raise error.with_traceback(None)

    with pytest.raises(OutOfMemory, match=r"^(CUDA out of memory\.|MemoryError)$") as raised:
        fail()
    error.__traceback__ = None  # this test's own reference to the frame
    assert raised.value.__context__ is None and alive[0]() is None


def test_other_errors_of_a_step_stay_as_they_are() -> None:
    @raises_out_of_memory
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        fail()


def cells(chunks: list[tuple[int, ScheduledChunk]]) -> list[tuple[int, int, int, bool]]:
    """(index, slot, position, samples) of each token."""
    return [
        (index, chunk.slot, position, chunk.samples and stop - position <= 1 + chunk.num_drafts)
        for index, chunk in chunks
        for stop in (chunk.start + chunk.num_tokens,)
        for position in range(chunk.start, chunk.start + chunk.num_tokens)
    ]


@pytest.mark.parametrize("max_tokens", [1, 3, 16, 100])
def test_parts_of_a_plan_are_the_plan_and_nothing_else(max_tokens: int) -> None:
    chunks = (
        ScheduledChunk(3, 10, 1, (5,), (2,), True),
        ScheduledChunk(0, 4, 17, (), (), True),
        ScheduledChunk(2, 30, 6, (8, 1, 2, 3, 4, 5), (), True, 5),  # with drafts
        ScheduledChunk(1, 0, 9, tuple(range(9)), (1,), False),
    )
    parts = list(split_plan(StepPlan(2, 7, (), chunks), max_tokens))
    for part in parts:
        assert part.plan.num_tokens <= max_tokens and (part.plan.epoch, part.plan.step_id) == (2, 7)
    split = [pair for part in parts for pair in zip(part.chunk_indices, part.plan.chunks, strict=True)]
    assert cells(split) == cells(list(enumerate(chunks)))


def test_merged_results_name_the_whole_plans_chunks_and_tokens() -> None:
    one, two, three = (TokenLogprobs(-float(number)) for number in (1, 2, 3))
    first = StepResult(0, 4, (7,), 0.0, (), (PromptLogprobs(1, 5, (one,)),), ((0, "too complex"),))
    second = StepResult(0, 4, (8, 9), 0.0, (None, three), (PromptLogprobs(0, 6, (two,)),), ((1, "too deep"),))
    assert merge_results([(first, [0, 1]), (second, [1, 2])]) == StepResult(
        epoch=0,
        step_id=4,
        token_ids=(7, 8, 9),
        step_time_s=0.0,
        logprobs=(None, None, three),
        prompt_logprobs=(PromptLogprobs(1, 5, (one, two)),),
        failures=((0, "too complex"), (2, "too deep")),
    )
