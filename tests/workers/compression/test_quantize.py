"""Claims about written checkpoints as a whole: numbers, what stays unquantized, and which methods are better."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from servekit.errors import ConfigError
from tests.support.quantize_command import (
    demo_documents,
    dequantized,
    make_model_with_tokenizer,
    quantize,
    read,
    write_texts,
)
from workers.layers.quantized_linear import QuantizedLinear
from workers.loading.checkpoint import find_weights

METHODS = ("rtn", "gptq", "awq")
TOKENS = torch.arange(3, 43)[None]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", demo_documents()[::2])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model_with_tokenizer(directory)
    return directory


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.no_grad()
def logits(model: PreTrainedModel, token_ids: Tensor = TOKENS) -> Tensor:
    return model(input_ids=token_ids, use_cache=False).logits.float()


@pytest.mark.parametrize(
    ("architecture", "method"),
    [*(("llama", method) for method in METHODS), *((name, "awq") for name in ("gemma2", "phi", "opt"))],
)
def test_with_eight_bits_the_model_stays_what_it_was(
    architecture: str, method: str, texts: Path, tmp_path: Path
) -> None:
    """So every number is where it belongs, and what AWQ multiplies is divided elsewhere."""
    model = make_model_with_tokenizer(tmp_path / "model", architecture)
    output = quantize(
        tmp_path / "model", tmp_path / "out", method, texts, scheme="w8a16", group_size=16, is_symmetric=False
    )
    assert relative(logits(read(output)), logits(model)) < 0.03


@pytest.mark.parametrize("scheme", ["w4a16", "w4a8", "w8a16", "w8a8", "fp8"])
def test_a_worker_reads_the_numbers_that_were_written(scheme: str, llama: Path, texts: Path, tmp_path: Path) -> None:
    group_size = {"group_size": 16} if scheme.startswith("w4") else {}
    output = quantize(llama, tmp_path / "out", "gptq", texts, scheme=scheme, **group_size)
    model = read(output)
    quantized = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(quantized) == 3 * 7
    original = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for name, module in quantized.items():
        assert module.matrix.activations == {"w4a8": "int8", "w8a8": "int8", "fp8": "float8"}.get(scheme, "float")
        found, expected = module.matrix.dequantize(), original.get_submodule(name).weight.detach()
        assert relative(found, expected) < (0.2 if scheme.startswith("w4") else 0.05)
    assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"] and config["quant_method"] == "compressed-tensors"
    assert (output / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()


def test_transformers_computes_the_same_with_the_dequantized_numbers(llama: Path, texts: Path, tmp_path: Path) -> None:
    output = quantize(llama, tmp_path / "out", "awq", texts, group_size=16)
    plain = dequantized(output, tmp_path / "plain")
    torch.testing.assert_close(logits(read(output)), logits(plain), rtol=1e-4, atol=1e-4)


def test_the_same_seed_gives_the_same_files(llama: Path, texts: Path, tmp_path: Path) -> None:
    outputs = [quantize(llama, tmp_path / name, "gptq", texts, group_size=16) for name in ("one", "two")]
    one, two = (load_file(output / "model.safetensors") for output in outputs)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_routers_and_experts_stay_as_they_are_and_are_named(
    texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model_with_tokenizer(tmp_path / "model", "mixtral")
    with caplog.at_level(logging.INFO, "servekit.worker"):
        output = quantize(tmp_path / "model", tmp_path / "out", "gptq", texts, group_size=16)
    ignored = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert (
        "lm_head" in ignored and any("experts" in name for name in ignored) and any("gate" in name for name in ignored)
    )
    assert "experts" in next(message for message in caplog.messages if message.startswith("not quantized"))
    before, after = (
        {name: tensor for file in find_weights(path) for name, tensor in load_file(file).items()}
        for path in (tmp_path / "model", output)
    )
    experts = [name for name in before if "experts" in name or "gate" in name]
    assert experts and all(torch.equal(before[name], after[name]) for name in experts)
    assert not any("self_attn" in name and name.endswith(".weight") for name in after)
    assert relative(logits(read(output)), logits(model)) < 0.7


def test_matrices_that_groups_do_not_divide_get_smaller_groups_or_stay(texts: Path, tmp_path: Path) -> None:
    make_model_with_tokenizer(tmp_path / "model", "llama", intermediate_size=80)
    output = quantize(tmp_path / "model", tmp_path / "out", "awq", texts, group_size=48)
    sizes = {
        name: module.matrix.group_size
        for name, module in read(output).named_modules()
        if isinstance(module, QuantizedLinear)
    }
    assert sizes["model.layers.1.self_attn.q_proj"] == 48 and sizes["model.layers.1.mlp.down_proj"] == 16
    make_model_with_tokenizer(tmp_path / "odd", "llama", intermediate_size=72)
    output = quantize(tmp_path / "odd", tmp_path / "odd-out", "rtn", group_size=64)
    ignored = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert r"re:model\.layers\.\d+\.mlp\.down_proj$" in ignored


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_quantized_checkpoint_is_not_quantized_again(llama: Path, texts: Path, tmp_path: Path) -> None:
    once = quantize(llama, tmp_path / "once", "rtn", group_size=16)
    with pytest.raises(ConfigError, match="quantized already, in the format compressed-tensors"):
        quantize(once, tmp_path / "twice", "gptq", texts)
    assert not (tmp_path / "twice").exists()


def test_a_model_without_linear_layers_is_refused_and_leaves_nothing(texts: Path, tmp_path: Path) -> None:
    make_model_with_tokenizer(tmp_path / "model", "gpt2")  # whose matrices are of a class of its own
    with pytest.raises(ConfigError, match="none of its matrices can be quantized"):
        quantize(tmp_path / "model", tmp_path / "out", "rtn")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_that_are_not_finite_are_refused_by_name(texts: Path, tmp_path: Path) -> None:
    model = make_model_with_tokenizer(tmp_path / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers that are not finite"):
        quantize(tmp_path / "model", tmp_path / "out", "rtn", group_size=16)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# -- which method is better --------------------------------------------------------------------------------------------


def make_model_with_outliers(directory: Path) -> PreTrainedModel:
    """A random model some channels of whose norms are ten times as large: language models have such channels."""
    model = make_model_with_tokenizer(directory, "llama", hidden_size=96, intermediate_size=192)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[::12] *= 10
            layer.mlp.up_proj.weight[::16] *= 5
    model.save_pretrained(directory)
    return model


@pytest.mark.long
def test_calibrated_methods_have_less_error_than_rounding_to_nearest(texts: Path, tmp_path: Path) -> None:
    model = make_model_with_outliers(tmp_path / "model")
    errors = {}
    torch.manual_seed(5)
    held_out = torch.randint(3, 2048, (4, 60))
    for method in METHODS:
        output = quantize(
            tmp_path / "model", tmp_path / method, method, texts, group_size=32, num_samples=32, max_length=128
        )
        quantized = read(output)
        # The error of the first layer alone: later ones have inputs that differ.
        with torch.no_grad():
            embedded = model.model.embed_tokens(held_out)
            positions = model.model.rotary_emb(embedded, torch.arange(60)[None])
            mask = torch.full((1, 1, 60, 60), -torch.inf).triu(1)
            outputs = [
                found.model.layers[0](embedded, attention_mask=mask, position_embeddings=positions)
                for found in (quantized, model)
            ]
        errors[method] = relative(outputs[0] - embedded, outputs[1] - embedded)
    assert errors["gptq"] < 0.9 * errors["rtn"], errors
    assert errors["awq"] < 0.9 * errors["rtn"], errors
