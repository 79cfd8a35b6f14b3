"""A launch never waits for the device, whatever the sequences of the step ask for.

On a GPU, torch's `set_sync_debug_mode` raises where the host waits. Without a GPU the same steps run on a simulated
one, which raises as well, and the answers are compared with the CPU's. simulated_gpu.py says what it cannot see.
torch's mode sees neither waits for events nor what is not an operation of torch.
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

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GrammarKind
from tests.support.drafters import RandomDrafter
from tests.support.inprocess import InProcessEngine, load
from tests.workers.runner.test_cuda_graphs import Repeated
from tests.workers.sampling.test_structured_output import compile_one, prompt_of
from tests.workers.simulated_gpu import CUDA, UNWRITTEN, HostWaitError, SimulatedGpu, as_gpu_kernel
from workers.attention.interface import AttentionMetadata, AttentionParams, PagedStep
from workers.attention.torch_backend import QueryGroup, TorchAttention
from workers.batch import Batch
from workers.device.transfer import DeviceEvent, synchronization_refused, to_host
from workers.kv_cache import kv_connector
from workers.kv_cache.kv_quantization import PlainPages
from workers.layers import layer_replacement
from workers.layers.fused_decoder import FusedDecoder, fuse_layers
from workers.layers.linear import DenseWeight
from workers.loading.model_manager import LoadedModel, ModelManager
from workers.runner import model_runner
from workers.runner.cuda_graphs import CudaCapture
from workers.runner.interface import Pending
from workers.sampling import sampler, structured_output
from workers.speculation.drafter import Drafter
from workers.speculation.ngram import NgramDrafter

HAS_GPU = torch.cuda.is_available()
HOT: dict[str, Any] = {"temperature": 0.9, "seed": 5}
GRAMMAR = "grammar"
# The requests for which a launch may wait, and why.
MAY_WAIT = {
    GRAMMAR: "the allowed tokens depend on the newest token, so the step before, which chooses it, is waited for; "
    "and a mask that is late is waited for until a while after the forward pass",
}
REQUESTS: dict[str, list[dict[str, Any]]] = {
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
        {"logprobs": 1, "repetition_penalty": 1.2},
        HOT | {"min_p": 0.05, "bad_words": ((40,), (41, 42))},
        {"min_tokens": 3, "logit_bias": ((40, 2.0),)},
        {"prompt_logprobs": 1},
        HOT | {"typical_p": 0.8},
    ],
}


class EngineAhead(InProcessEngine):
    """An engine that launches each step as soon as it is planned, and then waits for the oldest."""

    def __init__(
        self, loaded: LoadedModel, launching: Callable[[], AbstractContextManager[None]], **sizes: Any
    ) -> None:
        self._launching = launching
        self._pending: deque[Pending[StepResult]] = deque()
        self.max_in_flight = 0
        super().__init__(loaded, max_steps_in_flight=2, **sizes)

    def step(self) -> None:
        while (plan := self.manager.plan(0.0)) is not None:
            with self._launching():
                self._pending.append(self.runner.launch(plan))
            self.num_copies += len(plan.copies)
        self.max_in_flight = max(self.max_in_flight, len(self._pending))
        for token in self.manager.commit(self._pending.popleft().finish(), 0.0):
            self.logprobs[token.sequence.sequence_id].append(token.logprobs)
        self.manager.check()


def play(engine: EngineAhead, requests: list[dict[str, Any]], num_forks: int = 0) -> list[Any]:
    """Run the requests beside a plain one. Return tokens and logprobs, rounded so that devices agree."""
    sequences = []
    for number, request in enumerate([*requests, {}]):
        options = {"max_tokens": 6, **request}
        if regex := options.pop("regex", None):
            options["grammar"] = compile_one(GrammarKind.REGEX, regex)
        leader = engine.add(prompt_of(number), **options)
        sequences += [leader, *(engine.add(prompt_of(number), leader, **options) for _ in range(num_forks))]
    engine.run()
    assert engine.max_in_flight == 2
    return [
        (
            sequence.output_token_ids,
            [round(one.logprob, 2) for one in sequence.prompt_logprobs],
            [one and (round(one.logprob, 2), len(one.top)) for one in engine.logprobs[sequence.sequence_id]],
        )
        for sequence in sequences
    ]


# -- on machines without a GPU ---------------------------------------------------------------------------------------


class TorchOps:
    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, epsilon)

    def norm_add(self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor) -> Tensor:
        return residual + self.norm(x, weight, epsilon)

    def geglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class CapturableAttention(TorchAttention):
    """Attention whose steps depend on tensors alone, so a replay sees their new contents."""

    supports_cuda_graphs = True

    def prepare(self, metadata: AttentionMetadata) -> list[QueryGroup]:
        """Make a group of all tokens, each with its sequence's table. Padding gets any sequence's."""
        starts, lengths = metadata.query_starts.long(), metadata.lengths.long()
        tokens = torch.arange(len(metadata.slot_mapping), device=lengths.device)
        rows = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=len(lengths) - 1)
        positions = (lengths[rows] - starts[rows + 1] + tokens).clamp(min=0)
        return [QueryGroup(tokens[:, None], positions[:, None], metadata.block_table[rows])]

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        # torch has no slot -1: padding is stored in the last slot, in a block that no sequence has.
        metadata, last_slot = step.metadata, step.cache.num_blocks * step.cache.block_size - 1
        slots = torch.where(metadata.slot_mapping < 0, last_slot, metadata.slot_mapping)
        written = PagedStep(self, step.cache, replace(metadata, slot_mapping=slots))
        return super().attend(written, layer, queries, keys, values, params)


def sample_as_triton_does(logits: Tensor, temperatures: Tensor, uniforms: Tensor, *filters: Tensor) -> Tensor:
    """Sample as the Triton sampler does. filters: top_k, top_p and min_p, or nothing."""
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
        pytest.skip("there is a real GPU")
    gpu = SimulatedGpu()
    gpu.install(monkeypatch)
    launch = as_gpu_kernel(sample_as_triton_does, gpu)
    triton_sampler = types.ModuleType("workers.sampling.triton_sampler")
    triton_sampler.Filters = lambda *filters: filters  # type: ignore[attr-defined]
    triton_sampler.sample = lambda *args: launch(*args[:3], *(args[3] or ()))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "workers.sampling.triton_sampler", triton_sampler)
    monkeypatch.setattr(sampler, "_triton_failure", lambda *_: None)
    monkeypatch.setattr(model_runner, "choose_attention", lambda *_: CapturableAttention(PlainPages(torch.float32)))
    return gpu


@pytest.fixture
def on_gpu(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Return the demo model on the simulated GPU."""
    monkeypatch.setattr(layer_replacement, "_replace_on_cpu", lambda *_: None)
    loaded = load(DEMO_MODEL_PATH)
    gpu.move_to_gpu(loaded.model)
    with torch.no_grad(), gpu:
        decoder = fuse_layers(loaded.model, loaded.decoder, loaded.attention_params, TorchOps(), DenseWeight)
    assert isinstance(decoder, FusedDecoder)
    return replace(loaded, decoder=decoder, device=CUDA)


def engines(demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu, **sizes: int) -> tuple[EngineAhead, EngineAhead]:
    """Return an engine on the simulated GPU, and one on the CPU."""
    sizes = {"num_blocks": 200, **sizes}
    with gpu:
        gpu_engine = EngineAhead(on_gpu, gpu.launching, **sizes)
    return gpu_engine, EngineAhead(demo, nullcontext, **sizes)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_launch_does_not_wait_whatever_is_requested(
    name: str, demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu
) -> None:
    gpu_engine, cpu_engine = engines(demo, on_gpu, gpu)
    assert play(gpu_engine, REQUESTS[name]) == play(cpu_engine, REQUESTS[name])
    assert bool(gpu.waits) == (name in MAY_WAIT)


@pytest.mark.parametrize("name", ["everything", GRAMMAR])
@pytest.mark.parametrize("drafter", [NgramDrafter(), RandomDrafter(50)], ids=lambda drafter: type(drafter).__name__)
def test_a_launch_with_drafts_waits_for_events_only_and_gives_the_same(
    drafter: Drafter, name: str, demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu
) -> None:
    """For any other wait, the simulated GPU raises an error."""
    _, cpu_engine = engines(demo, on_gpu, gpu)
    with gpu:
        gpu_engine = EngineAhead(on_gpu, gpu.launching, num_blocks=200, max_drafts=4, drafter=drafter)
    assert play(gpu_engine, REQUESTS[name]) == play(cpu_engine, REQUESTS[name])
    assert gpu.waits, "drafts were planned"
    # Prompt lookup may find nothing in random answers, and then makes none.
    assert sum(gpu_engine.manager.draft_lengths.num_drafted) > 0 or isinstance(drafter, NgramDrafter)


def test_a_launch_without_drafts_does_not_wait_where_there_is_a_drafter(
    demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu
) -> None:
    _, cpu_engine = engines(demo, on_gpu, gpu)
    with gpu:
        gpu_engine = EngineAhead(on_gpu, gpu.launching, num_blocks=200, drafter=NgramDrafter())
    assert play(gpu_engine, REQUESTS["everything"]) == play(cpu_engine, REQUESTS["everything"])
    assert not gpu.waits


def test_a_launch_does_not_wait_for_copies_of_blocks(demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu) -> None:
    gpu_engine, cpu_engine = engines(demo, on_gpu, gpu)
    requests = [HOT, HOT | {"repetition_penalty": 1.2}]
    assert play(gpu_engine, requests, num_forks=2) == play(cpu_engine, requests, num_forks=2)
    assert gpu_engine.num_copies > 0 and not gpu.waits


def test_a_launch_does_not_wait_with_few_slots_chunked_prompts_and_preemptions(
    demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu
) -> None:
    """A sequence that gets a slot again sends its tokens along: penalties look back at tokens in the prefix cache."""
    sizes = {"num_blocks": 16, "max_num_seqs": 3, "max_num_batched_tokens": 12}
    gpu_engine, cpu_engine = engines(demo, on_gpu, gpu, **sizes)
    requests = [{"max_tokens": 12, "ignore_eos": True, **request} for request in REQUESTS["everything"]]
    for _ in range(2):
        assert play(gpu_engine, requests) == play(cpu_engine, requests)
    assert gpu_engine.manager.num_preemptions > 0 and not gpu.waits


def test_a_launch_does_not_wait_for_blocks_that_are_stored_and_loaded(
    demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cpu_engine = engines(demo, on_gpu, gpu)
    monkeypatch.setattr(kv_connector, "STAGED_BYTES", 40_000)  # few blocks at a time
    with gpu:
        gpu_engine = EngineAhead(
            on_gpu,
            gpu.launching,
            num_blocks=14,
            block_size=4,
            make_connector=lambda cache: kv_connector.OffloadingConnector(cache, 40),
        )
    for _ in range(3):
        assert play(gpu_engine, REQUESTS["everything"]) == play(cpu_engine, REQUESTS["everything"])
    assert gpu_engine.manager.kv_connector.num_loaded_blocks > 5 and not gpu.waits


@pytest.mark.parametrize("has_mixed", [False, True], ids=["decodes", "all"])
def test_a_launch_of_a_graph_does_not_wait(
    has_mixed: bool, demo: LoadedModel, on_gpu: LoadedModel, gpu: SimulatedGpu
) -> None:
    num_replays = {"decodes": 0, "mixed steps": 0}

    def counting(kind: str) -> Callable[[Callable[[], None]], Repeated]:
        def capture(compute: Callable[[], None]) -> Repeated:
            def replay() -> None:
                num_replays[kind] += 1
                compute()

            compute()
            return Repeated(replay)

        return capture

    gpu_engine, cpu_engine = engines(demo, on_gpu, gpu, num_blocks=60)
    with gpu:
        gpu_engine.runner.capture_decodes(counting("decodes"))
        if has_mixed:
            gpu_engine.runner.capture_mixed_steps(counting("mixed steps"))
    for name in ("greedy", "everything"):
        assert play(gpu_engine, REQUESTS[name]) == play(cpu_engine, REQUESTS[name])
    assert num_replays["decodes"] >= 8 and (num_replays["mixed steps"] > 0) == has_mixed and not gpu.waits


def test_with_a_grammar_whose_masks_are_in_time_a_launch_waits_for_the_previous_step_only(
    on_gpu: LoadedModel, gpu: SimulatedGpu, demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_engine, _ = engines(demo, on_gpu, gpu)
    launch, compute, launched = gpu_engine.runner.launch, gpu_engine.runner._compute, [0]

    def watched_compute(batch: Batch) -> Any:
        launched.append(gpu.num_launched)
        return compute(batch)

    def watched_launch(plan: StepPlan) -> Pending[StepResult]:
        num_waits = len(gpu.waits)
        pending = launch(plan)
        assert all(place <= launched[-1] for place in gpu.waits[num_waits:])
        return pending

    monkeypatch.setattr(structured_output, "MIN_WAIT_S", 60.0)  # so that no mask is late
    monkeypatch.setattr(gpu_engine.runner, "_compute", watched_compute)
    monkeypatch.setattr(gpu_engine.runner, "launch", watched_launch)
    play(gpu_engine, REQUESTS[GRAMMAR])
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
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "repetition": lambda x: x.repeat_interleave(x.long()),
    # No dispatch mode sees this one. It fails because it needs a real GPU.
    "a tensor from a list": lambda _: torch.tensor([1.0, 2.0], device=CUDA),
    "a copy to the GPU": lambda x: torch.ones(3).to(x.device),
    "a copy to the GPU from pageable memory": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "a synchronous copy to the GPU": lambda x: torch.ones(3, pin_memory=True).to(x.device),
    "a copy in place": lambda x: x.copy_(torch.ones(3)),
    "a copy to the host": lambda x: x.to("cpu"),
    "a copy by cpu()": lambda x: x.cpu(),
    "a copy to pageable memory": lambda x: torch.ones(3).copy_(x, non_blocking=True),
}


@pytest.mark.parametrize("what", WAITING)
def test_the_simulated_gpu_detects_waits(what: str, gpu: SimulatedGpu) -> None:
    with torch.inference_mode(), gpu:
        x = torch.arange(3.0, device=CUDA)
    with torch.inference_mode(), gpu.launching(), pytest.raises((HostWaitError, NotImplementedError)):
        WAITING[what](x)


def test_a_copy_that_is_read_too_early_holds_no_data(gpu: SimulatedGpu) -> None:
    with torch.inference_mode(), gpu.launching():
        x = torch.arange(3, device=CUDA)
        copy, event = to_host(x), DeviceEvent(x.device)
        later = to_host(x)
        assert copy.tolist() == [UNWRITTEN] * 3 and not event.is_complete()
    event.wait()
    assert copy.tolist() == [0, 1, 2] and event.is_complete()
    assert later.tolist() == [UNWRITTEN] * 3


# -- on machines with a GPU ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_real_gpu() -> LoadedModel:
    if not HAS_GPU:
        pytest.skip("there is no GPU")
    return ModelManager("cuda").load(DEMO_MODEL_PATH, "bfloat16", None)


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", REQUESTS)
def test_on_a_gpu_a_launch_does_not_wait(name: str, has_graphs: bool, on_real_gpu: LoadedModel) -> None:
    engine = EngineAhead(on_real_gpu, nullcontext, num_blocks=200, block_size=16, max_num_batched_tokens=40)
    if has_graphs:
        capture = CudaCapture()
        engine.runner.capture_decodes(capture)
        engine.runner.capture_mixed_steps(capture)
    play(engine, REQUESTS[name], num_forks=1)  # compiles kernels and captures graphs, which may wait
    engine._launching = synchronization_refused
    play(engine, REQUESTS[name], num_forks=1)
