"""Claims about what a GPU would do: whole steps in Triton's interpreter, with `generate` as the outside truth."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from servekit.sampling_params import SamplingParams
from tests.inprocess import InProcessEngine
from tests.tiny_models import ARCHITECTURES, make_model
from tests.triton_device import DEVICE, gpu_attention
from tests.workers.test_attention import Case
from tests.workers.test_decode_graphs import capture
from tests.workers.test_token_identity import generate
from workers import model_runner, sampler, surgery
from workers.attention import _choose_on_gpu
from workers.fused_layers import FusedDecoder, fuse_layers
from workers.kv_cache import LayerShape
from workers.model_manager import ModelManager
from workers.packed_linear import DenseWeight
from workers.page_dtype import Float8Pages, PageDtype, PlainPages
from workers.paged_step import Score
from workers.sampler import SamplingRow

if DEVICE.type != "cpu":
    pytest.skip("the steps of a GPU are tested by benchmarks/gpu", allow_module_level=True)

PLAIN, HALF = PlainPages(torch.float32), PlainPages(torch.bfloat16)
LAYERS, SCORES = [LayerShape(2, 64, 64)], [Score(0.125)]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("score", [Score(0.2), Score(0.2, 9, 4.0, torch.linspace(-1, 1, 6))], ids=["plain", "all"])
def test_triton_attends(score: Score) -> None:
    Case((gpu_attention.TritonAttention(PLAIN), torch.float32), score=score).assert_right()


@pytest.mark.parametrize("name", ["qwen3"])
def test_steps_of_triton_and_graphs_give_the_tokens_of_generate(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_model(tmp_path, *ARCHITECTURES[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()

    def operate(model: Any, decoder: Any, scores: Any) -> Any:
        return fuse_layers(model, decoder, scores, gpu_attention.TritonLayers(), DenseWeight)

    monkeypatch.setattr(surgery, "_operate_on_cpu", operate)
    monkeypatch.setattr(model_runner, "choose_attention", lambda *_: gpu_attention.TritonAttention(PLAIN))
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    assert isinstance(loaded.decoder, FusedDecoder)
    engine = InProcessEngine(loaded, num_blocks=12, block_size=16, max_num_seqs=3, max_num_batched_tokens=24)
    assert engine.runner.self_check() < 1e-5
    engine.runner.capture_decodes(capture)
    prompts, lengths = ([5, 9, 17], list(range(3, 40)), [100, 101, 102, 103] * 3), (8, 3, 6)
    sequences = [engine.add(prompt, max_tokens=n) for prompt, n in zip(prompts, lengths, strict=True)]
    engine.run()
    for sequence, prompt, n in zip(sequences, prompts, lengths, strict=True):
        assert sequence.output_token_ids == generate(model, prompt, n)


def test_the_gpu_samples_what_the_cpu_samples() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 300)
    options = [{"temperature": 0.0}, {}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}]
    for seed in range(8):
        rows = [
            SamplingRow(SamplingParams(max_tokens=1, **{"temperature": 0.8, "seed": seed, **each}), position)
            for position, each in enumerate(options)
        ]
        assert torch.equal(sampler._sample_on_gpu(logits, rows), sampler.sample(logits, rows))


class TestChoice:
    @pytest.fixture(autouse=True)
    def _flash_attn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        package = types.ModuleType("flash_attn")
        package.flash_attn_varlen_func = package.flash_attn_with_kvcache = lambda *_, **__: None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", package)

    def test_flash_attn_is_preferred_where_its_pages_fit(self) -> None:
        assert _choose_on_gpu(LAYERS, SCORES, 256, HALF).name == "flash_attn"

    @pytest.mark.parametrize(
        ("layers", "scores", "block_size", "pages", "why"),
        [
            (LAYERS, SCORES, 16, HALF, "its pages are multiples of 256 tokens, and --block-size is 16"),
            (LAYERS, [Score(1.0, sinks=torch.zeros(2))], 256, HALF, "it knows no attention sinks"),
            (LAYERS, SCORES, 256, PLAIN, "it does not compute in float32"),
            (LAYERS, SCORES, 256, Float8Pages(), "its pages are not fp8_e4m3"),
            ([LayerShape(2, 192, 128)], SCORES, 256, HALF, "keys as many as values"),
            ([LayerShape(2, 512, 512)], SCORES, 256, HALF, "multiples of 8 dimensions, 256 at most"),
        ],
    )
    def test_where_it_cannot_be_triton_attends_and_the_log_says_why(
        self,
        layers: list[LayerShape],
        scores: list[Score],
        block_size: int,
        pages: PageDtype,
        why: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with caplog.at_level("INFO"):
            assert _choose_on_gpu(layers, scores, block_size, pages).name == "triton"
        assert why in caplog.text

    def test_without_the_package_torchs_own_is_taken_if_it_has_block_tables(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        assert _choose_on_gpu(LAYERS, SCORES, 256, HALF).name == "torch_varlen"
        with caplog.at_level("INFO"):
            assert _choose_on_gpu(LAYERS, [Score(1.0, softcap=3.0)], 256, HALF).name == "triton"
        assert "torch's own knows no soft caps" in caplog.text

    def test_without_triton_pages_are_gathered(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "workers.gpu_attention", None)
        monkeypatch.delattr("workers.gpu_attention", raising=False)
        assert _choose_on_gpu(LAYERS, SCORES, 16, HALF).name == "torch"
        assert "attention gathers its pages, and is slow" in caplog.text
