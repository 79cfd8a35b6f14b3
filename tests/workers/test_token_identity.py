"""The claim that servekit rests on: paged, chunked, batched and preempted, the tokens are those of `generate`."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.errors import ConfigError
from servekit.scheduler.sequence import FinishReason, Sequence
from tests.support.inprocess import InProcessEngine, load
from tests.support.quantized_models import SCHEMES, make_quantized_model
from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE, WIDE_ARCHITECTURES, make_model
from workers.attention.interface import AttentionMetadata
from workers.attention.torch_backend import TorchAttention
from workers.kv_cache.kv_quantization import PlainPages
from workers.loading.model_manager import LoadedModel, ModelManager
from workers.runner import model_runner

NO_TOKEN = 2**31  # an id that no model samples
LENGTHS = [1, 23, 5, 12, 3, 31, 8, 2, 17, 9]
MAX_TOKENS = [14, 6, 20, 9, 25, 4, 12, 18, 7, 16]
IGNORE_EOS = [True, True, True, False, True] * 2


def make_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in LENGTHS]


def generate(model: PreTrainedModel, prompt: list[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
    """Return transformers' tokens: greedy, one prompt, no batching."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=max_tokens,
            **({"eos_token_id": [NO_TOKEN]} if ignore_eos else {}),
        )
    return output[0, len(prompt) :].tolist()


@cache
def prepared(name: str) -> tuple[LoadedModel, list[list[int]]]:
    """Return the model as servekit loads it, and transformers' answers to every prompt."""
    if name == "demo":
        directory = DEMO_MODEL_PATH
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    elif name in SCHEMES:
        directory = Path(mkdtemp(prefix="quantized-"))
        model = make_quantized_model(directory, name)
    else:
        directory = Path(mkdtemp(prefix="tiny-"))
        model = make_model(directory, *{**ARCHITECTURES, **WIDE_ARCHITECTURES}[name])
    answers = [generate(model, *work) for work in zip(make_prompts(VOCAB_SIZE), MAX_TOKENS, IGNORE_EOS, strict=True)]
    assert len({tuple(answer) for answer in answers}) > 5, "the model answers every prompt alike"
    return load(directory), answers


def serve_with_joins_and_leaves(engine: InProcessEngine, prompts: list[list[int]]) -> list[Sequence]:
    """Add half of the prompts at once and the others one every three steps; abort two further sequences mid-run."""
    work = [
        {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        for prompt, max_tokens, ignore_eos in zip(prompts, MAX_TOKENS, IGNORE_EOS, strict=True)
    ]
    sequences = [engine.add(**fields) for fields in work[:5]]
    late = work[5:]
    aborted = [engine.add([9] * 11, max_tokens=20)]
    while engine.manager.has_work or late:
        if late and engine.num_steps % 3 == 0:
            sequences.append(engine.add(**late.pop(0)))
        if engine.num_steps == 8:
            aborted.append(engine.add([11] * 6, max_tokens=20))
        if engine.num_steps in (4, 13):
            for sequence in aborted:
                engine.manager.finish(sequence, FinishReason.ABORT)
        engine.step()
    return sequences


# (name, tokens a step, steps in flight). Planning is the same for every architecture, so all pairs of the latter two
# are tried with two of them, one of which has windows. The others have prompts in chunks and at once, and steps of a
# single token where one sequence is left.
ALL_SCHEDULES = list(product([1, 7, 64], [1, 2]))
SCHEDULES = [
    (name, *schedule)
    for name in (*ARCHITECTURES, "demo")
    for schedule in (ALL_SCHEDULES if name in ("llama", "gemma2") else [(7, 1), (64, 2)])
]


@pytest.mark.parametrize(("name", "chunk", "max_steps_in_flight"), SCHEDULES)
def test_tokens_are_those_of_generate(name: str, chunk: int, max_steps_in_flight: int) -> None:
    loaded, answers = prepared(name)
    engine = InProcessEngine(
        loaded,
        num_blocks=9 if chunk == 7 else 10,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=chunk,
        max_steps_in_flight=max_steps_in_flight,
    )
    sequences = serve_with_joins_and_leaves(engine, make_prompts(VOCAB_SIZE))
    assert [sequence.output_token_ids for sequence in sequences] == answers
    if chunk > 1:  # with one token a step, only the oldest sequence grows, and it has the pool to itself
        assert engine.manager.num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("name", [*ARCHITECTURES, "demo"])
def test_tokens_are_those_of_generate_where_nothing_can_be_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "choose_attention", lambda *_: TorchAttention(PlainPages(torch.float32)))
    test_tokens_are_those_of_generate(name, 7, 2)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "gemma2", "gpt_oss", "demo"])
def test_forked_sequences_answer_as_each_would_alone(name: str, block_size: int) -> None:
    """Greedy forks equal `generate`; sampled ones equal sequences of the same seed without a fork."""
    loaded, answers = prepared(name)
    prompts = make_prompts(VOCAB_SIZE)
    for index in (1, 5, 8):  # 23, 31 and 17 tokens: partly full blocks, and with 16 one that lacks one token
        prompt, max_tokens, answer = prompts[index], MAX_TOKENS[index], answers[index]
        engine = InProcessEngine(loaded, num_blocks=400 // block_size, block_size=block_size, max_steps_in_flight=2)
        options = {"max_tokens": max_tokens, "ignore_eos": IGNORE_EOS[index]}
        leader = engine.add(prompt, **options)
        twins = [engine.add(prompt, leader, **options) for _ in range(2)]
        sampled = [engine.add(prompt, leader, temperature=1.0, seed=seed, **options) for seed in range(3)]
        engine.run()
        assert engine.num_copies == (5 if (len(prompt) - 1) % block_size and len(prompt) % block_size else 0)
        assert [sequence.output_token_ids for sequence in (leader, *twins)] == [answer] * 3
        alone = InProcessEngine(loaded, num_blocks=400 // block_size, block_size=block_size)
        unforked = [alone.add(prompt, temperature=1.0, seed=seed, **options) for seed in range(3)]
        alone.run()
        assert [s.output_token_ids for s in sampled] == [s.output_token_ids for s in unforked]
        assert len({tuple(sequence.output_token_ids) for sequence in sampled}) > 1


@pytest.mark.parametrize(("num_blocks", "num_rounds"), [(12, 1), (100, 2)])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("name", ["llama", "demo"])
def test_options_that_look_back_give_the_tokens_of_generate(
    name: str, max_steps_in_flight: int, num_blocks: int, num_rounds: int
) -> None:
    """Chunked, preempted in a small pool, cached in a large one, and mixed with rows without options."""
    loaded, _ = prepared(name)
    model = AutoModelForCausalLM.from_pretrained(loaded.model.name_or_path, dtype=torch.float32).eval()
    prompts = make_prompts(VOCAB_SIZE)
    options = [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"min_tokens": 12}, {"min_new_tokens": 12}),
        ({"logit_bias": ((5, 4.0), (9, -50.0))}, {"sequence_bias": [[[5], 4.0], [[9], -50.0]]}),
        ({"repetition_penalty": 0.8, "min_tokens": 3}, {"repetition_penalty": 0.8, "min_new_tokens": 3}),
        ({}, {}),
    ]
    engine = InProcessEngine(
        loaded, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=64, max_steps_in_flight=max_steps_in_flight
    )
    for _ in range(num_rounds):
        sequences = [
            engine.add(prompt, max_tokens=12, **ours) for prompt, (ours, _) in zip(prompts, options * 2, strict=True)
        ]
        engine.run()
        for sequence, prompt, (_, theirs) in zip(sequences, prompts, options * 2, strict=True):
            with torch.inference_mode():
                mask = torch.ones(1, len(prompt), dtype=torch.int64)
                expected = model.generate(
                    torch.tensor([prompt]), attention_mask=mask, do_sample=False, max_new_tokens=12, **theirs
                )
            assert sequence.output_token_ids == expected[0, len(prompt) :].tolist()
    assert engine.manager.num_preemptions if num_rounds == 1 else engine.manager.num_cached_tokens


def test_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, *ARCHITECTURES["llama"])
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of the model's weights, among them .*up_proj"):
        load(tmp_path)


def test_rotary_positions_that_depend_on_the_batch_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    original = {"original_max_position_embeddings": 32}
    make_model(tmp_path, "phi3", {**ARCHITECTURES["llama"][1], **original, "rope_parameters": {**rope, **original}})
    with pytest.raises(ConfigError, match="--max-model-len 32 serves it"):
        load(tmp_path)
    ModelManager("cpu").load(tmp_path, "float32", 32)


def test_overflow_in_one_sequence_does_not_reach_the_next(tmp_path: Path) -> None:
    """NaN and infinity in the pages of one sequence do not change the answers of those that get its blocks."""
    loaded, answers = prepared("llama")
    engine = InProcessEngine(loaded, num_blocks=64)
    prompts = make_prompts(VOCAB_SIZE)
    embeddings = loaded.model.get_input_embeddings().weight
    kept = embeddings[3].clone()
    for poison in (float("nan"), float("inf"), float("-inf")):
        embeddings.data[3] = poison  # all keys and values of a sequence of this token are invalid
        engine.add([3] * 60, max_tokens=1)
        engine.run()
    embeddings.data[3] = kept
    sequences = serve_with_joins_and_leaves(engine, prompts)
    assert [sequence.output_token_ids for sequence in sequences] == answers


def test_self_check_detects_wrong_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = prepared("llama")
    engine = InProcessEngine(loaded)
    assert engine.runner.self_check() < 1e-5
    prepare = engine.runner.attention.prepare

    def swap_blocks(metadata: AttentionMetadata) -> object:
        metadata.block_table.copy_(metadata.block_table.roll(1, -1))
        return prepare(metadata)

    monkeypatch.setattr(engine.runner.attention, "prepare", swap_blocks)
    with pytest.raises(ConfigError, match="its logits differ"):
        engine.runner.self_check()


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "gemma2", "gpt_oss", "opt"])
def test_tokens_are_those_of_generate_when_prefixes_are_shared(name: str) -> None:
    """Several turns of a conversation: each prompt contains the turns before and their answers."""
    loaded, _ = prepared(name)
    model = AutoModelForCausalLM.from_pretrained(loaded.model.name_or_path, attn_implementation="eager").eval()
    engine = InProcessEngine(loaded, num_blocks=64, block_size=4, max_num_batched_tokens=16)
    prompts = make_prompts(VOCAB_SIZE)[:4]
    for turn in range(3):
        sequences = [engine.add(prompt, max_tokens=6) for prompt in (*prompts, prompts[1])]
        engine.run()
        for sequence in sequences:
            assert sequence.output_token_ids == generate(model, sequence.token_ids[: sequence.prompt_length], 6)
        if turn:
            assert all(sequence.num_cached_tokens for sequence in sequences)
        prompts = [[*sequence.token_ids, 5, 6, 7] for sequence in sequences[:4]]
    assert engine.manager.num_cached_tokens > engine.manager.num_prompt_tokens / 2
