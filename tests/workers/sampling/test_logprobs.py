"""Claims about logprobs: those of output and prompt equal those of a plain forward pass of transformers."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.messages import TokenLogprobs
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.sequence import Sequence
from tests.support.inprocess import InProcessEngine, load
from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_model
from workers.batch import SamplingRow
from workers.loading.model_manager import LoadedModel
from workers.runner.model_runner import ModelRunner
from workers.sampling import logprobs
from workers.sampling.logprobs import MIN_LOGPROB, sampled_logprobs

# Greedy and sampled, bent by everything that bends logits, and two that ask for nothing or only for half.
OPTIONS: list[dict[str, Any]] = [
    {"logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.7, "top_k": 5, "seed": 3, "logprobs": 0, "prompt_logprobs": 0},
    {},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": ((5, 4.0),), "logprobs": 1},
    {"allowed_token_ids": (4, 5, 6, 7), "bad_words": ((4,), (5, 6)), "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.3, "seed": 5, "frequency_penalty": 0.3, "min_tokens": 9, "prompt_logprobs": 5},
]
LENGTHS = [23, 12, 17, 9, 30, 2, 1, 5]


@cache
def prepared(name: str) -> tuple[LoadedModel, PreTrainedModel]:
    """The model as servekit loads it, and as transformers runs it.

    The demo model in float64: its logits go to 22, and of two that are computed in float32 each has its own rounding.
    """
    if name == "demo":
        return load(DEMO_MODEL_PATH), AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float64).eval()
    directory = Path(mkdtemp(prefix="tiny-"))
    model = make_model(directory, *ARCHITECTURES[name])
    return load(directory), model


def make_prompts(lengths: list[int] = LENGTHS) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def plain_logprobs(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """[num_tokens - 1, vocab_size] for positions from 1 on."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def assert_logprobs(found: list[TokenLogprobs], expected: Tensor, token_ids: list[int], num_top: int) -> None:
    """`expected` are [num_tokens, vocab_size]."""
    assert len(found) == len(expected) == len(token_ids)
    for one, row, token_id in zip(found, expected, token_ids, strict=True):
        assert one.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        top_ids, values = [i for i, _ in one.top], [value for _, value in one.top]
        assert len(set(top_ids)) == num_top
        # By their values, so that which of two equals comes first does not matter.
        assert values == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert values == pytest.approx(row[top_ids].tolist(), abs=1e-4)


def assert_all_logprobs(engine: InProcessEngine, model: PreTrainedModel, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        expected, length = plain_logprobs(model, sequence.token_ids), sequence.prompt_length
        in_prompt, in_output = sequence.sampling.prompt_logprobs, sequence.sampling.logprobs
        if in_prompt is None:
            assert sequence.prompt_logprobs == []
        else:
            assert_logprobs(sequence.prompt_logprobs, expected[: length - 1], sequence.token_ids[1:length], in_prompt)
        found = engine.logprobs[sequence.sequence_id]
        if in_output is None:
            assert found == [None] * sequence.num_output_tokens
        else:
            assert_logprobs(found, expected[length - 1 :], sequence.output_token_ids, in_output)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*ARCHITECTURES, "demo"])
def test_logprobs_are_those_of_a_plain_forward_pass(name: str) -> None:
    """In chunks, preempted, with two steps in flight, and beside rows without logprobs."""
    loaded, model = prepared(name)
    hooks = dict(loaded.decoder._forward_hooks)
    engine = InProcessEngine(loaded, num_blocks=10, max_num_batched_tokens=7, max_steps_in_flight=2)
    sequences = [
        engine.add(prompt, max_tokens=9, ignore_eos=True, **options)
        for prompt, options in zip(make_prompts(), [*OPTIONS, *OPTIONS[:2]], strict=True)
    ]
    engine.run()
    assert engine.manager.num_preemptions > 0, "the pool was meant to be too small"
    assert_all_logprobs(engine, model, sequences)
    assert "forward" not in vars(loaded.decoder) and loaded.decoder._forward_hooks == hooks, "nothing stays behind"


# All pairs of the three: half of all combinations.
@pytest.mark.parametrize(
    ("num_blocks", "budget", "max_steps_in_flight"),
    [(10, 1, 2), (10, 7, 1), (10, 64, 2), (64, 1, 1), (64, 7, 2), (64, 64, 1)],
)
def test_schedules_do_not_change_prompt_logprobs(num_blocks: int, budget: int, max_steps_in_flight: int) -> None:
    """The same work twice: the second time, the prefix cache has all of it, as far as memory allows."""
    loaded, model = prepared("gemma2")
    engine = InProcessEngine(
        loaded, num_blocks=num_blocks, max_num_batched_tokens=budget, max_steps_in_flight=max_steps_in_flight
    )
    for turn in range(2):
        work = list(zip(make_prompts(), [*OPTIONS, {}, {}], strict=True))
        sequences = [engine.add(prompt, max_tokens=11, ignore_eos=True, **options) for prompt, options in work]
        engine.run()
        assert_all_logprobs(engine, model, sequences)
        if num_blocks == 64:
            cached = [s.num_cached_tokens for s in sequences if s.prompt_length > 4]
            asking = [s.sampling.prompt_logprobs is not None for s in sequences if s.prompt_length > 4]
            assert [bool(count) for count in cached] == [bool(turn) and not asks for asks in asking]
    if num_blocks == 10 and budget > 1:
        assert engine.manager.num_preemptions > 0, "the pool was meant to be too small"


def test_prompt_logprobs_continue_after_a_preemption_within_the_prompt() -> None:
    """Two long prompts in a pool that cannot hold both; the later one is preempted in the middle of its own."""
    loaded, model = prepared("llama")
    engine = InProcessEngine(loaded, num_blocks=12, max_num_batched_tokens=3, max_steps_in_flight=2)
    first, second = make_prompts([8, 30])
    growing = engine.add(first, max_tokens=30, ignore_eos=True, prompt_logprobs=1)
    halved = engine.add(second, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    while not halved.num_preemptions:
        engine.step()
    assert 0 < len(halved.prompt_logprobs) < 29
    engine.run()
    assert halved.kv.num_found == 0 and halved.num_cached_tokens == 0
    assert_all_logprobs(engine, model, [growing, halved])


def test_fork_that_asks_for_prompt_logprobs_computes_the_prompt_itself() -> None:
    loaded, model = prepared("llama")
    engine = InProcessEngine(loaded, max_num_batched_tokens=7, max_steps_in_flight=2)
    (prompt,) = make_prompts([18])
    leader = engine.add(prompt, max_tokens=6, ignore_eos=True)
    asking, plain = (
        engine.add(prompt, leader, max_tokens=6, ignore_eos=True, **o) for o in ({"prompt_logprobs": 2}, {})
    )
    engine.run()
    assert (asking.num_cached_tokens, plain.num_cached_tokens) == (0, 17)
    assert asking.output_token_ids == leader.output_token_ids == plain.output_token_ids
    assert_all_logprobs(engine, model, [leader, asking, plain])


@pytest.mark.parametrize("max_rows", [0, 1, 5])
def test_prompt_logprobs_do_not_depend_on_how_many_logits_fit_at_once(
    max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, _ = prepared("opt")

    def play() -> tuple[list[list[TokenLogprobs]], list[int]]:
        forward, num_rows = ModelRunner._forward, []

        def watched(self: ModelRunner, batch: Any, token_indices: Tensor) -> Tensor:
            num_rows.append(len(token_indices))
            return forward(self, batch, token_indices)

        engine = InProcessEngine(loaded, max_num_batched_tokens=64)
        with monkeypatch.context() as patched:
            patched.setattr(ModelRunner, "_forward", watched)
            sequences = [engine.add(prompt, max_tokens=1, prompt_logprobs=4) for prompt in make_prompts([30, 9, 14])]
            engine.run()
        return [sequence.prompt_logprobs for sequence in sequences], num_rows

    at_once, num_rows = play()
    assert max(num_rows) == 29 + 8 + 13, "in one chunk"
    monkeypatch.setattr(logprobs, "MAX_LOGITS", max_rows * VOCAB_SIZE + 1)
    in_chunks, num_rows = play()
    assert max(num_rows) == max(max_rows, 3), "three rows sample; the prompts' logits come few at a time"
    for these, those in zip(at_once, in_chunks, strict=True):
        assert [one.logprob for one in these] == pytest.approx([one.logprob for one in those], abs=1e-5)
        assert [[i for i, _ in one.top] for one in these] == [[i for i, _ in one.top] for one in those]


def test_impossible_tokens_have_the_lowest_logprob_and_not_infinity() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1e6], [float("nan"), 0.0, 0.0], [1.0, 2.0, 3.0]])
    rows = [SamplingRow(SamplingParams(max_tokens=1, logprobs=n), 0) for n in (9, 1, None)]
    pending = sampled_logprobs(logits, torch.tensor([1, 0, 0]), rows)
    assert pending is not None
    unlikely, broken, unasked = pending.read()
    assert unlikely is not None and broken is not None and unasked is None
    assert unlikely.logprob == MIN_LOGPROB and unlikely.top[0] == (2, 0.0) and len(unlikely.top) == 3
    assert {value for _, value in unlikely.top[1:]} == {broken.logprob, broken.top[0][1]} == {MIN_LOGPROB}
    assert sampled_logprobs(logits, torch.tensor([1, 0, 0]), [rows[2]] * 3) is None
