"""Claims about keys and values in a byte each."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from servekit.errors import ConfigError
from tests.inprocess import InProcessEngine
from tests.tiny_models import ARCHITECTURES, make_model
from tests.workers.test_attention import TOLERANCES, Case, assert_same
from tests.workers.test_token_identity import prepared
from workers import model_runner
from workers.attention import choose_attention
from workers.kv_cache import LayerShape
from workers.model_manager import ModelManager
from workers.page_dtype import Float8Pages, Int8Pages, PageDtype, page_dtype
from workers.torch_attention import TorchAttention

# Relative, of a vector: a float8 has three bits after the point; an int8 is a 127th of the largest number, off by a
# third of that in the mean, and the largest of 64 is four times as large as the others are.
KINDS = [(Float8Pages(), 2**-4), (Int8Pages(), 4 / 3 / 127)]


@pytest.mark.parametrize(("pages", "error"), KINDS, ids=["fp8_e4m3", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_written_to_so_many_bits(pages: PageDtype, error: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(50, 3, 64).to(dtype)
    stored = pages.encode(vectors)
    assert stored.dtype is pages.stored and stored.shape == (50, 3, pages.width(64))
    read = pages.decode(stored, dtype)
    assert read.dtype is dtype
    assert ((read.double() - vectors.double()).norm(dim=-1) <= error * vectors.double().norm(dim=-1)).all()


@pytest.mark.parametrize("pages", [pages for pages, _ in KINDS], ids=["fp8_e4m3", "int8"])
def test_what_is_stored_is_finite_whatever_it_is(pages: PageDtype) -> None:
    vectors = torch.tensor([[math.nan, 1.0], [math.inf, -2.0], [-math.inf, 1e30], [0.0, 0.0], [1e-40, -1e-40]])
    read = pages.decode(pages.encode(vectors), torch.float32)
    assert torch.isfinite(read).all()
    assert read[0, 0] == 0.0 and read[0, 1] == pytest.approx(1.0, rel=0.01)
    assert torch.equal(read[3], torch.zeros(2))
    untouched = pages.decode(torch.zeros(1, pages.width(2), dtype=pages.stored), torch.float32)
    assert torch.equal(untouched, torch.zeros(1, 2))  # as pages begin


@pytest.mark.parametrize(("pages", "error"), KINDS, ids=["fp8_e4m3", "int8"])
def test_attention_over_them_is_attention_to_their_bits(pages: PageDtype, error: float) -> None:
    case = Case((TorchAttention(pages), torch.float32), LayerShape(2, 64, 64))
    for output, sequence in zip(case.run(case.attend), case.sequences, strict=True):
        assert_same(output, case.expected(*sequence), factor=2 * error / TOLERANCES[torch.float32])  # keys, and values


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
def test_a_model_over_them_says_nearly_the_same(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loaded, _ = prepared("demo")
    engine = InProcessEngine(loaded, block_size=16, kv_cache_dtype=name)
    assert f"gathers pages of {name} on this device" in caplog.text
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


def test_pages_of_the_models_own_dtype_must_be_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The larger tolerance is for those who asked for a byte each."""
    make_model(tmp_path, *ARCHITECTURES["llama"])
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    lying = TorchAttention(page_dtype("auto", torch.float32))
    lying._pages.encode = lambda vectors: Float8Pages().decode(Float8Pages().encode(vectors), torch.float32)  # type: ignore[method-assign]
    monkeypatch.setattr(model_runner, "choose_attention", lambda *_: lying)
    with pytest.raises(ConfigError, match="its logits differ"):
        InProcessEngine(loaded).runner.self_check()


@pytest.mark.parametrize(("name", "capability"), [("int8", (9, 0)), ("fp8_e4m3", (8, 0))])
def test_what_a_gpu_cannot_read_is_gathered(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    layers = [LayerShape(2, 64, 64)]
    assert choose_attention(torch.device("cuda"), torch.bfloat16, layers, [], 16, name).name == "torch"
