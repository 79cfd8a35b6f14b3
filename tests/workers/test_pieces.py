"""Claims about a device whose memory does not hold a step: in pieces it gives the same, and nobody dies of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from servekit.messages import Row, StepPlan
from servekit.model_files import DEMO_MODEL_PATH
from tests.inprocess import InProcessEngine, load
from workers.batch import Batch
from workers.model_manager import LoadedModel
from workers.model_runner import ModelRunner
from workers.pieces import in_pieces, is_out_of_memory
from workers.runner import OutOfMemory

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


def played(loaded: LoadedModel) -> list[Any]:
    engine = InProcessEngine(loaded, num_blocks=128, max_num_batched_tokens=128)
    sequences = [
        engine.add([(7 * token + number) % 500 + 5 for token in range(20 + 9 * number)], max_tokens=9, **options)
        for number, options in enumerate(OPTIONS)
    ]
    engine.run()
    return [(s.output_token_ids, s.prompt_logprobs, engine.logprobs[s.sequence_id]) for s in sequences]


@pytest.mark.parametrize("room", [100, 40, 16])
def test_a_step_in_pieces_gives_what_it_gives_at_once(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    at_once = played(demo)
    forward = ModelRunner._forward
    num_failures = 0

    def with_little_memory(self: ModelRunner, batch: Batch, token_indices: torch.Tensor) -> torch.Tensor:
        nonlocal num_failures
        if len(batch.input_ids) > room:
            num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, batch, token_indices)

    monkeypatch.setattr(ModelRunner, "_forward", with_little_memory)
    in_pieces = played(demo)
    assert num_failures
    for (tokens, of_prompt, of_output), (same, also_of_prompt, also_of_output) in zip(at_once, in_pieces, strict=True):
        assert tokens == same
        assert_alike(of_prompt, also_of_prompt)
        assert_alike(of_output, also_of_output)


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_what_does_not_fit_in_the_smallest_pieces_is_said_and_not_died_of(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = InProcessEngine(demo)
    engine.add(list(range(5, 50)), max_tokens=4)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> torch.Tensor:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory")

        patch.setattr(ModelRunner, "_forward", fail)
        with pytest.raises(OutOfMemory, match="a step of 45 tokens does not fit, not even in pieces"):
            engine.step()
    assert engine.manager.restart(is_out_of_memory=True) == []
    engine._in_flight.clear()
    engine.run()
    assert not engine.manager.has_work


def test_other_errors_are_not_taken_for_it() -> None:
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))


@pytest.mark.parametrize("most_tokens", [1, 3, 16, 100])
def test_pieces_are_the_plan_and_nothing_else(most_tokens: int) -> None:
    def cells(rows: Iterator[tuple[int, Row]]) -> list[tuple[int, int, int, bool]]:
        return [
            (source, row.slot, position, row.samples and position == row.start + row.num_tokens - 1)
            for source, row in rows
            for position in range(row.start, row.start + row.num_tokens)
        ]

    rows = (Row(3, 10, 1, (5,), (2,), True), Row(0, 4, 17, (), (), True), Row(1, 0, 9, tuple(range(9)), (1,), False))
    plan = StepPlan(2, 7, (), rows)
    pieces = list(in_pieces(plan, most_tokens))
    assert all(piece.num_tokens <= most_tokens and (piece.epoch, piece.step_id) == (2, 7) for piece, _ in pieces)
    told = [(source, row) for piece, sources in pieces for source, row in zip(sources, piece.rows, strict=True)]
    assert cells(iter(told)) == cells(iter(enumerate(rows)))
