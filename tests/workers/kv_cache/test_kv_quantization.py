"""Pages with one byte per element: their error, their range, and models that use them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import ARCHITECTURES, make_model
from tests.workers.attention.test_backends import TOLERANCES, Case, assert_same
from tests.workers.test_token_identity import prepared
from workers.attention.torch_backend import TorchAttention
from workers.kv_cache.kv_quantization import Float8Pages, Int8Pages, PageFormat, page_format
from workers.kv_cache.pages import LayerShape
from workers.loading.model_manager import ModelManager
from workers.runner import model_runner

# Relative errors of a vector. float8 has three bits of mantissa. int8 steps are a 127th of the largest number; the mean
# error is a third of a step, and the largest of 64 numbers is four times as large as the others.
KINDS = [(Float8Pages(), 2**-4), (Int8Pages(), 4 / 3 / 127)]


@pytest.mark.parametrize(("pages", "error"), KINDS, ids=["fp8_e4m3", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_gives_the_encoded_numbers_up_to_rounding(pages: PageFormat, error: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(50, 3, 64).to(dtype)
    stored = pages.encode(vectors)
    assert stored.dtype is pages.dtype and stored.shape == (50, 3, pages.width(64))
    read = pages.decode(stored, dtype)
    assert read.dtype is dtype
    assert ((read.double() - vectors.double()).norm(dim=-1) <= error * vectors.double().norm(dim=-1)).all()


@pytest.mark.parametrize("pages", [pages for pages, _ in KINDS], ids=["fp8_e4m3", "int8"])
def test_stored_numbers_are_finite_whatever_is_encoded(pages: PageFormat) -> None:
    vectors = torch.tensor([[math.nan, 1.0], [math.inf, -2.0], [-math.inf, 1e30], [0.0, 0.0], [1e-40, -1e-40]])
    read = pages.decode(pages.encode(vectors), torch.float32)
    assert torch.isfinite(read).all()
    assert read[0, 0] == 0.0 and read[0, 1] == pytest.approx(1.0, rel=0.01)
    assert torch.equal(read[3], torch.zeros(2))
    untouched = pages.decode(torch.zeros(1, pages.width(2), dtype=pages.dtype), torch.float32)
    assert torch.equal(untouched, torch.zeros(1, 2))  # pages begin as zeros


@pytest.mark.parametrize(("pages", "error"), KINDS, ids=["fp8_e4m3", "int8"])
def test_attention_over_such_pages_has_their_error_and_no_more(pages: PageFormat, error: float) -> None:
    case = Case((TorchAttention(pages), torch.float32), LayerShape(2, 64, 64))
    for output, sequence in zip(case.run(case.attend), case.sequences, strict=True):
        assert_same(output, case.expected(*sequence), factor=2 * error / TOLERANCES[torch.float32])  # keys, and values


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
def test_a_model_over_such_pages_gives_nearly_the_same_logits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loaded, _ = prepared("demo")
    engine = InProcessEngine(loaded, block_size=16, kv_cache_dtype=name)
    assert f"--kv-cache-dtype {name} saves memory, but every step gathers its pages" in caplog.text
    assert 1e-4 < engine.runner.self_check() < 0.1
    plain = InProcessEngine(loaded, block_size=16)
    assert engine.runner.kv_bytes_per_token < 0.3 * plain.runner.kv_bytes_per_token
    prompts = [[5, 9, 17, 33], list(range(3, 30))]
    first_tokens = []
    for each in (engine, plain):
        sequences = [each.add(prompt, max_tokens=3) for prompt in prompts]
        each.run()
        first_tokens.append([sequence.output_token_ids[0] for sequence in sequences])
    assert first_tokens[0] == first_tokens[1]


def test_the_self_check_is_strict_for_pages_in_the_models_dtype(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its larger tolerance is for formats with one byte per element only."""
    make_model(tmp_path, *ARCHITECTURES["llama"])
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    rounding = TorchAttention(page_format("auto", torch.float32))
    rounding._pages.encode = lambda vectors: Float8Pages().decode(Float8Pages().encode(vectors), torch.float32)  # type: ignore[method-assign]
    monkeypatch.setattr(model_runner, "choose_attention", lambda *_: rounding)
    with pytest.raises(ConfigError, match="its logits differ"):
        InProcessEngine(loaded).runner.self_check()
