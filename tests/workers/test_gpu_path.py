"""Whole steps of a GPU, in Triton's interpreter, give the tokens of transformers' `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import ARCHITECTURES, make_model
from tests.support.triton_device import DEVICE, gpu_backends, triton_ops
from tests.workers.runner.test_cuda_graphs import capture
from tests.workers.test_token_identity import generate
from workers.kv_cache.kv_quantization import PlainPages
from workers.layers import layer_replacement
from workers.layers.fused_decoder import FusedDecoder, fuse_layers
from workers.layers.linear import DenseWeight
from workers.loading import model_manager
from workers.loading.model_manager import ModelManager
from workers.runner import mixed_graphs, model_runner

if DEVICE.type != "cpu":
    pytest.skip("the steps of a GPU are tested by benchmarks/gpu", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("triton_kernels_run")


LONG = ("gemma3_two_rotations", "olmo2", "granite_scaled", "phi3_partly_rotated")


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_whole_steps_with_triton_and_graphs_give_the_tokens_of_generate(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model_type, configuration = ARCHITECTURES[name]
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if "layer_types" in configuration:
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    make_model(tmp_path, model_type, {**configuration, **changes})
    monkeypatch.setattr(model_manager, "SAMPLE_TOKENS", 20)  # of the self-check; the interpreter is slow
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()

    def replace(model: Any, decoder: Any, params: Any, *_: Any) -> Any:
        return fuse_layers(model, decoder, params, triton_ops.TritonOps(), DenseWeight)

    monkeypatch.setattr(layer_replacement, "_replace_on_cpu", replace)
    triton_attention = gpu_backends.TritonAttention(PlainPages(torch.float32))
    monkeypatch.setattr(model_runner, "choose_attention", lambda *_: triton_attention)
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    assert isinstance(loaded.decoder, FusedDecoder) and loaded.decoder.cpu_decoder is None
    engine = InProcessEngine(loaded, num_blocks=12, block_size=16, max_num_seqs=3, max_num_batched_tokens=24)
    engine.runner.capture_decodes(capture)
    monkeypatch.setattr(mixed_graphs, "NUM_TOKENS", (6, 24))
    engine.runner.capture_mixed_steps(capture)
    assert engine.runner._mixed_graphs is not None
    assert engine.runner._graphs is not None and len(engine.runner._graphs._graphs) == 3
    assert engine.runner.self_check() < 1e-5 and len(engine.runner._graphs._graphs) == 3, "graphs are checked, too"
    assert sorted(engine.runner._mixed_graphs._graphs) == [6, 24]
    prompts, lengths = ([5, 9, 17], list(range(3, 32)), [100, 101, 102, 103] * 3), (5, 3, 4)
    sequences = [engine.add(prompt, max_tokens=n) for prompt, n in zip(prompts, lengths, strict=True)]
    engine.run()
    for sequence, prompt, n in zip(sequences, prompts, lengths, strict=True):
        assert sequence.output_token_ids == generate(model, prompt, n)
