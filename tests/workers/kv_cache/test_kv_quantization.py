"""Pages with one byte per number: their error, their range, and models that use them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_model
from tests.workers.attention.test_backends import TOLERANCES, Case, assert_same
from tests.workers.test_token_identity import make_prompts, prepared, serve_with_joins_and_leaves
from workers.attention.cpu_backend import CpuAttention
from workers.attention.torch_backend import TorchAttention
from workers.kv_cache.kv_quantization import FLOAT8_PAGES, INT8_PAGES, QuantizedPages, page_format
from workers.kv_cache.pages import LayerShape
from workers.loading.model_manager import LoadedModel, ModelManager
from workers.runner import model_runner

# Relative errors of a vector. float8 has three bits of mantissa. int8 steps are a 127th of the largest number; the mean
# error is a third of a step, and the largest of 64 numbers is four times as large as the others.
KINDS = [(FLOAT8_PAGES, 2**-4), (INT8_PAGES, 4 / 3 / 127)]
FORMATS = [pages for pages, _ in KINDS]
NAMES = [pages.name for pages in FORMATS]


@pytest.mark.parametrize(("pages", "error"), KINDS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_decoding_gives_the_encoded_numbers_up_to_rounding(
    pages: QuantizedPages, error: float, dtype: torch.dtype, size: float
) -> None:
    torch.manual_seed(0)
    vectors = (size * torch.randn(50, 3, 64)).to(dtype)
    stored = pages.encode(vectors)
    assert stored.dtype is pages.dtype and stored.shape == (50, 3, pages.width(64))
    read = pages.decode(stored, dtype)
    assert read.dtype is dtype
    assert ((read.double() - vectors.double()).norm(dim=-1) <= error * vectors.double().norm(dim=-1)).all()


@pytest.mark.parametrize("pages", FORMATS, ids=NAMES)
def test_stored_numbers_are_finite_whatever_is_encoded(pages: QuantizedPages) -> None:
    vectors = torch.tensor([[math.nan, 1.0], [math.inf, -2.0], [-math.inf, 1e30], [0.0, 0.0], [1e-40, -1e-40]])
    read = pages.decode(pages.encode(vectors), torch.float32)
    assert torch.isfinite(read).all()
    assert read[0, 0] == 0.0 and read[0, 1] == pytest.approx(1.0, rel=0.01)
    assert torch.equal(read[3], torch.zeros(2))
    untouched = pages.decode(torch.zeros(1, pages.width(2), dtype=pages.dtype), torch.float32)
    assert torch.equal(untouched, torch.zeros(1, 2))  # pages begin as zeros


def test_with_given_scales_larger_numbers_are_clamped() -> None:
    vectors = torch.tensor([[[1.0, -500.0], [1.0, -500.0]]])
    read = FLOAT8_PAGES.decode(FLOAT8_PAGES.encode(vectors, torch.tensor([1.0, 2.0])), torch.float32)
    assert read.tolist() == [[[1.0, -448.0], [1.0, -512.0]]]


@pytest.mark.parametrize(("pages", "error"), KINDS, ids=NAMES)
def test_attention_over_such_pages_has_their_error_and_no_more(pages: QuantizedPages, error: float) -> None:
    case = Case((TorchAttention(pages), torch.float32), LayerShape(2, 64, 64))
    for output, sequence in zip(case.run(case.attend), case.sequences, strict=True):
        assert_same(output, case.expected(*sequence), factor=2 * error / TOLERANCES[torch.float32])  # keys, and values


@pytest.mark.parametrize("name", NAMES)
def test_a_model_over_such_pages_gives_nearly_the_same_logits(name: str) -> None:
    loaded, _ = prepared("demo")
    engine = InProcessEngine(loaded, block_size=16, kv_cache_dtype=name)
    assert isinstance(engine.runner.attention, CpuAttention), "its pages are gathered"
    assert 1e-4 < engine.runner.self_check() < 0.1
    plain = InProcessEngine(loaded, block_size=16)
    assert engine.runner.kv_bytes_per_token < 0.3 * plain.runner.kv_bytes_per_token
    # Questions that the model was trained on: its likeliest token is far ahead of the others.
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json"))
    questions = ("What color is the sky?", "What is the capital of France?")
    prompts = [tokenizer.encode(f"<|user|>{question}<eos><|assistant|>").ids for question in questions]
    first_tokens = []
    for each in (engine, plain):
        sequences = [each.add(prompt, max_tokens=3) for prompt in prompts]
        each.run()
        first_tokens.append([sequence.output_token_ids[0] for sequence in sequences])
    assert first_tokens[0] == first_tokens[1]


def tokens_of(engine: InProcessEngine, prompts: list[list[int]]) -> list[list[int]]:
    return [sequence.output_token_ids for sequence in serve_with_joins_and_leaves(engine, prompts)]


@pytest.mark.parametrize("model", ["demo", "llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_give_the_tokens_of_the_reference_that_decodes_whole_pages(
    name: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32. The kernels compute prompts in chunks, and preempt; the reference does neither."""
    loaded, _ = prepared(model)
    by_kernels = InProcessEngine(loaded, num_blocks=9, max_num_batched_tokens=7, kv_cache_dtype=name)
    assert isinstance(by_kernels.runner.attention, CpuAttention)
    pages = page_format(name, torch.float32)
    monkeypatch.setattr(model_runner, "choose_attention", lambda *_: TorchAttention(pages))
    by_reference = InProcessEngine(loaded, num_blocks=100, kv_cache_dtype=name)
    assert tokens_of(by_kernels, make_prompts(VOCAB_SIZE)) == tokens_of(by_reference, make_prompts(VOCAB_SIZE))
    assert by_kernels.manager.num_preemptions > 0 and by_reference.manager.num_preemptions == 0


@pytest.mark.parametrize("name", NAMES)
def test_cached_and_forked_blocks_give_the_tokens_of_computed_ones(name: str) -> None:
    loaded, _ = prepared("demo")
    prompt = list(range(3, 42))  # its last block is partly full, so a fork copies it
    alone = InProcessEngine(loaded, kv_cache_dtype=name)
    sequence = alone.add(prompt, max_tokens=12)
    alone.run()
    engine = InProcessEngine(loaded, kv_cache_dtype=name)
    first = engine.add(prompt, max_tokens=12)
    engine.add(prompt, max_tokens=12, leader=first)
    engine.run()
    again = engine.add(prompt, max_tokens=12)
    engine.run()
    assert engine.num_copies > 0
    assert first.output_token_ids == again.output_token_ids == sequence.output_token_ids


def test_the_self_check_is_strict_for_pages_in_the_models_dtype(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its larger tolerance is for formats with one byte per number only."""
    make_model(tmp_path, *ARCHITECTURES["llama"])
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    rounding = TorchAttention(page_format("auto", torch.float32))

    def encode(vectors: Tensor, _: Tensor | None) -> Tensor:
        return FLOAT8_PAGES.decode(FLOAT8_PAGES.encode(vectors), torch.float32)

    rounding._pages.encode = encode  # type: ignore[method-assign]
    monkeypatch.setattr(model_runner, "choose_attention", lambda *_: rounding)
    with pytest.raises(ConfigError, match="its logits differ"):
        InProcessEngine(loaded).runner.self_check()


@pytest.mark.parametrize("name", NAMES)
def test_memory_per_token_counts_the_scales(name: str) -> None:
    loaded, _ = prepared("demo")
    assert isinstance(loaded, LoadedModel)
    runner = InProcessEngine(loaded, block_size=16, kv_cache_dtype=name).runner
    expected = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim + 2 * 4) for layer in loaded.layers)
    assert runner.kv_bytes_per_token == expected
    assert runner.cache.num_bytes == expected * 16 * runner.cache.num_blocks
