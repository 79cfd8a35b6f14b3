"""Claims about launches: nothing in them waits for the device, whatever the step's rows ask for.

On a GPU torch says so (`set_sync_debug_mode`). Without one the same steps run on a simulated GPU, which says so, too,
and whose answers are compared with the CPU's. What it cannot see stands in simulated_gpu.py; torch's mode does not see
that an event is waited for, nor what is no operation of torch.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from servekit.generation_request import GrammarKind
from servekit.messages import StepPlan, StepResult
from servekit.model_files import DEMO_MODEL_PATH
from servekit.sampling_params import SamplingParams
from tests.inprocess import InProcessEngine, load
from tests.workers.simulated_gpu import CUDA, NONSENSE, SimulatedGpu, Waits, likeness_of
from tests.workers.test_constraints import compile_one, prompt_of
from tests.workers.test_decode_graphs import Repeated
from workers import model_runner, sampler, surgery
from workers.batch import Batch
from workers.decode_graphs import CudaCapture
from workers.fused_layers import FusedDecoder, fuse_layers
from workers.model_manager import LoadedModel, ModelManager
from workers.packed_linear import DenseWeight
from workers.page_dtype import PlainPages
from workers.paged_step import PagedStep, Score, StepRows
from workers.runner import Pending
from workers.staging import Mark, on_host, waiting_refused
from workers.torch_attention import QueryGroup, TorchAttention

HAS_GPU = torch.cuda.is_available()
HOT: dict[str, Any] = {"temperature": 0.9, "seed": 5}
GRAMMAR = "grammar"
# What may wait within a launch, and why.
MAY_WAIT = {
    GRAMMAR: "what may come next is known when the newest token is: the step before chooses it, and is waited for",
}
WISHES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "temperature": [HOT],
    "top-k": [HOT | {"top_k": 7}],
    "top-p": [HOT | {"top_p": 0.7}],
    "min-p": [HOT | {"min_p": 0.1}],
    "typical-p": [HOT | {"typical_p": 0.5}, HOT | {"top_k": 9}, HOT],
    "penalties": [{"repetition_penalty": 1.3}, HOT | {"presence_penalty": 0.4, "frequency_penalty": 0.7}],
    "biases": [{"logit_bias": ((7, 30.0), (9, -4.0), (2**31 - 1, 5.0))}],
    "allowed tokens": [{"allowed_token_ids": (40, 41, 42)}, HOT | {"allowed_token_ids": (50, 51)}],
    "bad words": [HOT | {"allowed_token_ids": (40, 41, 42), "bad_words": ((40, 41), (42,), (41, 41, 40))}],
    "min tokens": [{"min_tokens": 4, "allowed_token_ids": (2, 40)}],
    "logprobs": [{"logprobs": 3}, {}, HOT | {"logprobs": 0}],
    "prompt logprobs": [{"prompt_logprobs": 2}, {"logprobs": 1, "prompt_logprobs": 0}],
    GRAMMAR: [HOT | {"regex": "[a-z]{3,9}"}, {"regex": "(yes|no)!", "bad_words": ((5,),)}],
    "everything": [
        *({"logprobs": 1, "repetition_penalty": 1.2}, HOT | {"min_p": 0.05, "bad_words": ((40,), (41, 42))}),
        *({"min_tokens": 3, "logit_bias": ((40, 2.0),)}, {"prompt_logprobs": 1}, HOT | {"typical_p": 0.8}),
    ],
}


class EngineAhead(InProcessEngine):
    """Launches each step as soon as it is planned, and then waits for the oldest."""

    def __init__(
        self, loaded: LoadedModel, launching: Callable[[], AbstractContextManager[None]], **sizes: int
    ) -> None:
        self._launching = launching
        self._pending: deque[Pending[StepResult]] = deque()
        self.most_in_flight = 0
        super().__init__(loaded, max_steps_in_flight=2, **sizes)

    def step(self) -> None:
        while (plan := self.manager.plan(0.0)) is not None:
            with self._launching():
                self._pending.append(self.runner.launch(plan))
            self.num_copies += len(plan.copies)
        self.most_in_flight = max(self.most_in_flight, len(self._pending))
        for token in self.manager.commit(self._pending.popleft().finish(), 0.0):
            self.logprobs[token.sequence.sequence_id].append(token.logprobs)
        self.manager.check()


def play(engine: EngineAhead, wishes: list[dict[str, Any]], num_forks: int = 0) -> list[Any]:
    """Each wish beside one who has none; what all of them were told, as far as it is no rounding."""
    sequences = []
    for number, wish in enumerate([*wishes, {}]):
        options = {"max_tokens": 6, **wish}
        if regex := options.pop("regex", None):
            options["grammar"] = compile_one(GrammarKind.REGEX, regex)
        leader = engine.add(prompt_of(number), **options)
        sequences += [leader, *(engine.add(prompt_of(number), leader, **options) for _ in range(num_forks))]
    engine.run()
    assert engine.most_in_flight == 2
    return [
        (
            sequence.output_token_ids,
            [round(one.logprob, 2) for one in sequence.prompt_logprobs],
            [one and (round(one.logprob, 2), len(one.top)) for one in engine.logprobs[sequence.sequence_id]],
        )
        for sequence in sequences
    ]


# -- the machine that has no GPU ---------------------------------------------------------------------------------------


class TorchLayers:
    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, epsilon)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class AttentionInGraphs(TorchAttention):
    """Which rows there are stands in tensors alone: what is repeated sees what they hold then. For decode steps."""

    captures = True

    def prepare(self, rows: StepRows) -> list[QueryGroup]:
        if rows.num_queries.max() > 1:
            return super().prepare(rows)
        at = torch.arange(len(rows.num_queries), device=rows.lengths.device)[:, None]
        return [QueryGroup(at, (rows.lengths.long() - 1)[:, None].clamp(min=0), rows.block_table)]

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, score: Score
    ) -> Tensor:
        # No cell is -1 to torch: padding goes to the last one, in a block that nobody has.
        rows, last_cell = step.rows, step.cache.num_blocks * step.cache.block_size - 1
        cells = torch.where(rows.slot_mapping < 0, last_cell, rows.slot_mapping)
        written = PagedStep(self, step.cache, replace(rows, slot_mapping=cells))
        return super().attend(written, layer, queries, keys, values, score)


def sample_as_triton_does(logits: Tensor, temperatures: Tensor, uniforms: Tensor, *filters: Tensor) -> Tensor:
    """With top_k, top_p and min_p as filters, or none."""
    probabilities = torch.softmax(logits.double() / temperatures.double().clamp(min=1e-5)[:, None], dim=-1)
    token_ids = sampler._invert(probabilities, uniforms)
    if filters:
        options = zip(*(each.tolist() for each in filters), strict=True)
        params = [
            SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p) for top_k, top_p, min_p in options
        ]
        is_filtered = torch.tensor([each != SamplingParams(max_tokens=1) for each in params])
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
        ranks = sampler._invert(sampler._keep_top(probabilities, params), uniforms)
        token_ids = torch.where(is_filtered, order.gather(-1, ranks[:, None])[:, 0], token_ids)
    return torch.where(temperatures < 1e-5, logits.argmax(dim=-1), token_ids)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(DEMO_MODEL_PATH)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    if HAS_GPU:
        pytest.skip("there is a real one")
    gpu = SimulatedGpu()
    gpu.install(monkeypatch)
    launch = likeness_of(sample_as_triton_does, gpu)
    triton_sampling = types.ModuleType("workers.triton_sampling")
    triton_sampling.Filters = lambda *filters: filters  # type: ignore[attr-defined]
    triton_sampling.sample = lambda *args: launch(*args[:3], *(args[3] or ()))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "workers.triton_sampling", triton_sampling)
    monkeypatch.setattr(model_runner, "choose_attention", lambda *_: AttentionInGraphs(PlainPages(torch.float32)))
    return gpu


@pytest.fixture
def on_gpu(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """The demo model there."""
    monkeypatch.setattr(surgery, "_operate_on_cpu", lambda *_: None)
    loaded = load(DEMO_MODEL_PATH)
    gpu.bring(loaded.model)
    with torch.no_grad(), gpu:
        decoder = fuse_layers(loaded.model, loaded.decoder, loaded.scores, TorchLayers(), DenseWeight)
    assert isinstance(decoder, FusedDecoder)
    return replace(loaded, decoder=decoder, device=CUDA)


def engines(demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu, **sizes: int) -> tuple[EngineAhead, EngineAhead]:
    """(there, here)."""
    sizes = {"num_blocks": 200, **sizes}
    with gpu:
        there = EngineAhead(on_gpu, gpu.launching, **sizes)
    return there, EngineAhead(demo, nullcontext, **sizes)


@pytest.mark.parametrize("name", WISHES)
def test_whatever_rows_ask_for_a_launch_does_not_wait(
    name: str, demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu
) -> None:
    there, here = engines(demo, on_gpu, gpu)
    assert play(there, WISHES[name]) == play(here, WISHES[name])
    assert bool(gpu.waits) == (name in MAY_WAIT)


def test_a_launch_does_not_wait_for_copies_of_blocks(demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu) -> None:
    there, here = engines(demo, on_gpu, gpu)
    wishes = [HOT, HOT | {"repetition_penalty": 1.2}]
    assert play(there, wishes, num_forks=2) == play(here, wishes, num_forks=2)
    assert there.num_copies > 0 and not gpu.waits


def test_a_launch_does_not_wait_where_seats_are_few_and_prompts_come_in_chunks(
    demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu
) -> None:
    """Who sits down again brings the tokens along, for sampling looks back at what the prefix cache has."""
    sizes = {"num_blocks": 30, "max_num_seqs": 3, "max_num_batched_tokens": 9}
    there, here = engines(demo, on_gpu, gpu, **sizes)
    wishes = [{"max_tokens": 30, "ignore_eos": True, **wish} for wish in WISHES["everything"]]
    for _ in range(2):
        assert play(there, wishes) == play(here, wishes)
    assert there.manager.num_preemptions > 0 and not gpu.waits


def test_a_launch_of_a_graph_does_not_wait(demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu) -> None:
    num_replays = 0

    def capture_counting(compute: Callable[[], None]) -> Repeated:
        def replay() -> None:
            nonlocal num_replays
            num_replays += 1
            compute()

        compute()
        return Repeated(replay)

    there, here = engines(demo, on_gpu, gpu, num_blocks=60)
    with gpu:
        there.runner.capture_decodes(capture_counting)
    for name in ("greedy", "everything"):
        assert play(there, WISHES[name]) == play(here, WISHES[name])
    assert num_replays >= 8 and not gpu.waits


def test_a_grammar_waits_for_the_step_before_and_not_for_this_one(
    on_gpu: LoadedModel, gpu: SimulatedGpu, demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, _ = engines(demo, on_gpu, gpu)
    launch, compute, launched = there.runner.launch, there.runner._compute, [0]

    def watched_compute(batch: Batch) -> Any:
        launched.append(gpu.num_launched)
        return compute(batch)

    def watched_launch(plan: StepPlan) -> Pending[StepResult]:
        num_waits = len(gpu.waits)
        pending = launch(plan)
        assert all(place <= launched[-1] for place in gpu.waits[num_waits:])
        return pending

    monkeypatch.setattr(there.runner, "_compute", watched_compute)
    monkeypatch.setattr(there.runner, "launch", watched_launch)
    play(there, WISHES[GRAMMAR])
    assert len(gpu.waits) > 3


WAITING: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda x: x[0].item(),
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy(),
    "a condition": lambda x: bool((x > 0).any()),
    "comparison": lambda x: torch.equal(x, x),
    "a mask": lambda x: x[x > 0],
    "a mask to write to": lambda x: x.index_put_((x > 0,), x[0]),
    "a list as index": lambda x: x[[0, 1]],
    "an index of the host": lambda x: x[torch.tensor([0, 1])],
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "repetition": lambda x: x.repeat_interleave(x.long()),
    # What torch does for this one no mode is told of; what it needs of a GPU is not there.
    "a tensor from a list": lambda _: torch.tensor([1.0, 2.0], device=CUDA),
    "a copy there": lambda x: torch.ones(3).to(x.device),
    "a copy there that is not of pinned memory": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "a copy there that is not asynchronous": lambda x: torch.ones(3, pin_memory=True).to(x.device),
    "a copy in place": lambda x: x.copy_(torch.ones(3)),
    "a copy here": lambda x: x.to("cpu"),
    "another copy here": lambda x: x.cpu(),
    "a copy to what is not pinned": lambda x: torch.ones(3).copy_(x, non_blocking=True),
}


@pytest.mark.parametrize("what", WAITING)
def test_the_simulated_gpu_sees_what_waits(what: str, gpu: SimulatedGpu) -> None:
    with torch.inference_mode(), gpu:
        x = torch.arange(3.0, device=CUDA)
    with torch.inference_mode(), gpu.launching(), pytest.raises((Waits, NotImplementedError)):
        WAITING[what](x)


def test_who_reads_a_copy_too_early_reads_nonsense(gpu: SimulatedGpu) -> None:
    with torch.inference_mode(), gpu.launching():
        x = torch.arange(3, device=CUDA)
        copy, mark = on_host(x), Mark(x.device)
        later = on_host(x)
        assert copy.tolist() == [NONSENSE] * 3 and not mark.is_passed()
    mark.wait()
    assert copy.tolist() == [0, 1, 2] and mark.is_passed()
    assert later.tolist() == [NONSENSE] * 3


# -- the machine that has one ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_real_gpu() -> LoadedModel:
    if not HAS_GPU:
        pytest.skip("there is no GPU")
    return ModelManager("cuda").load(DEMO_MODEL_PATH, "bfloat16", None)


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", WISHES)
def test_on_a_gpu_a_launch_does_not_wait(name: str, has_graphs: bool, on_real_gpu: LoadedModel) -> None:
    engine = EngineAhead(on_real_gpu, nullcontext, num_blocks=200, block_size=16, max_num_batched_tokens=40)
    if has_graphs:
        engine.runner.capture_decodes(CudaCapture())
    play(engine, WISHES[name], num_forks=1)  # kernels are compiled, and graphs captured, which may wait
    engine._launching = waiting_refused
    play(engine, WISHES[name], num_forks=1)
