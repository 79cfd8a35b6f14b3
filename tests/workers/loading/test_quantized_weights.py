"""Claims about quantized weights: tokens are those of the codes' numbers, and their bytes are counted."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine, load
from tests.support.quantized_models import SCHEMES, make_quantized_model
from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_model
from tests.workers.test_token_identity import generate, make_prompts
from workers.layers.quantized_gemm import QuantizedGemm
from workers.layers.quantized_linear import DequantizingWeight
from workers.loading.checkpoint import quantization_config
from workers.loading.model_config import read_config
from workers.loading.model_manager import LoadedModel, ModelManager
from workers.loading.progress import Progress
from workers.loading.quantized_weights import read_quantized_weights
from workers.loading.weights import make_weights
from workers.quantization.at_load import QuantizedAtLoad
from workers.quantization.formats.registry import format_of

MAX_TOKENS = 12
KINDS = ["int8", "int4", "w4a8", "fp8", "nf4"]


def answers(loaded: LoadedModel) -> list[list[int]]:
    engine = InProcessEngine(loaded, max_num_batched_tokens=7)
    sequences = [engine.add(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in make_prompts(VOCAB_SIZE)[:6]]
    engine.run()
    return [sequence.output_token_ids for sequence in sequences]


def answers_of(model: PreTrainedModel) -> list[list[int]]:
    return [generate(model, prompt, MAX_TOKENS, ignore_eos=True) for prompt in make_prompts(VOCAB_SIZE)[:6]]


@cache
def quantized(scheme: str, architecture: str = "llama") -> tuple[Path, PreTrainedModel]:
    directory = Path(mkdtemp(prefix="quantized-"))
    return directory, make_quantized_model(directory, scheme, architecture)


def read(path: Path, dtype: str | torch.dtype = torch.float32) -> PreTrainedModel:
    """Read the model without preparing its layers."""
    described = quantization_config(path)
    assert described is not None
    model, _ = read_quantized_weights(
        path, read_config(path), dtype, "eager", Progress(), format_of(described), "LlamaForCausalLM"
    )
    return model


@pytest.fixture
def plain_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply by the dequantized numbers: kernels for int8 inputs round these, which changes some tokens."""
    monkeypatch.setattr(QuantizedGemm, "make_weight", lambda _, matrix, bias: DequantizingWeight(matrix, bias))


# -- quantized checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_inputs")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_are_those_of_the_dequantized_model(scheme: str) -> None:
    directory, model = quantized(scheme)
    assert answers(load(directory)) == answers_of(model)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "phi3", "mixtral", "starcoder2"])
def test_other_architectures_are_read_as_well(architecture: str) -> None:
    """qwen2 and starcoder2 have biases, starcoder2 is not fused, and mixtral's experts are one parameter."""
    directory, model = quantized("w4a16", architecture)
    assert answers(load(directory)) == answers_of(model)


@pytest.mark.usefixtures("plain_inputs")
def test_experts_in_separate_tensors_are_read_as_numbers(caplog: pytest.LogCaptureFixture) -> None:
    directory, model = quantized("w8a8", "mixtral")
    names = load_file(directory / "model.safetensors")
    assert any(re.search(r"experts\.0\..*weight_scale", name) for name in names), "the test tests nothing"
    assert answers(load(directory)) == answers_of(model)
    assert "quantized matrices are dequantized" in caplog.text


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16_asymmetric", "w8a16", "w8a16_asymmetric"])
def test_tokens_are_those_of_the_dequantized_model_with_kernels_too(scheme: str) -> None:
    directory, model = quantized(scheme)
    assert answers(load(directory)) == answers_of(model)


def test_number_of_parameters_is_that_of_the_unquantized_model() -> None:
    directory, model = quantized("w4a16")
    loaded = load(directory)
    assert loaded.info.num_parameters == model.num_parameters()
    assert loaded.info.quantization == "compressed-tensors (W4A16, groups of 8)"


def test_bytes_are_those_of_codes_scales_and_the_rest() -> None:
    directory, model = quantized("w4a16")
    linears = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and "layers" in name]
    numbers = sum(linear.weight.numel() for linear in linears)
    rest = sum(parameter.numel() for parameter in model.parameters()) - numbers
    assert load(directory).weights.num_bytes == numbers // 2 + numbers // 8 * 4 + rest * 4


@pytest.mark.usefixtures("plain_inputs")
def test_a_layer_that_was_left_out_of_quantization_stays_as_it_is(tmp_path: Path) -> None:
    """What the files have decides, whatever `ignore` and `targets` say."""
    directory, model = quantized("w8a8")
    tensors = load_file(directory / "model.safetensors")
    prefix = "model.layers.1.mlp.down_proj"
    dense = model.get_submodule(prefix).weight.detach().contiguous()
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    save_file(tensors | {f"{prefix}.weight": dense}, tmp_path / "model.safetensors", {"format": "pt"})
    for file in directory.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert answers(load(tmp_path)) == answers_of(model)


@pytest.mark.usefixtures("plain_inputs")
def test_names_without_the_base_models_are_found(tmp_path: Path) -> None:
    directory, model = quantized("w8a8")
    tensors = {name.removeprefix("model."): t for name, t in load_file(directory / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for file in directory.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert answers(load(tmp_path)) == answers_of(model)


def test_a_model_moves_with_its_matrices() -> None:
    model = read(quantized("w4a16")[0]).to("meta")
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert layer.matrix.codes.device.type == layer.matrix.scales.device.type == "meta"


def test_bfloat16_models_keep_their_codes() -> None:
    directory, _ = quantized("w4a16_asymmetric")
    model = read(directory, torch.bfloat16)
    assert model.dtype is torch.bfloat16
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    expected = quantized("w4a16_asymmetric")[1].get_submodule("model.layers.0.mlp.up_proj").weight
    torch.testing.assert_close(layer.matrix.dequantize(), expected.detach(), rtol=1e-6, atol=1e-6)


# -- quantizing at load ------------------------------------------------------------------------------------------------


def load_as(path: Path, quantization: str, group_size: int | None = None, load_format: str = "auto") -> LoadedModel:
    return ModelManager("cpu").load(
        path,
        "float32",
        None,
        load_format=load_format,
        quantization=quantization,
        quantization_group_size=group_size,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, *ARCHITECTURES["llama"])
    return path


@pytest.mark.usefixtures("plain_inputs")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_rounded_model(kind: str, plain: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    weight_format = QuantizedAtLoad(kind)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (name != "lm_head" or not model.config.tie_word_embeddings):
            rounded = weight_format.read({".weight": module.weight.detach()}, name).dequantize()
            module.weight = nn.Parameter(rounded, requires_grad=False)
    loaded = load_as(plain, kind)
    assert answers(loaded) == answers_of(model)
    assert loaded.info.quantization == weight_format.name
    assert loaded.info.num_parameters == model.num_parameters()


@pytest.mark.usefixtures("plain_inputs")
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_head_that_is_tied_to_the_embedding_shares_its_codes(load_format: str, tmp_path: Path) -> None:
    make_model(tmp_path, "llama", {**ARCHITECTURES["llama"][1], "tie_word_embeddings": True})
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    if load_format == "dummy":
        model, _ = make_weights(model.config, torch.float32, "eager", torch.device("cpu"))
        model.eval()
    weight_format = QuantizedAtLoad("int4")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):  # the head's parameter is the embedding's as well
            rounded = weight_format.read({".weight": module.weight.detach()}, name).dequantize()
            with torch.no_grad():
                module.weight.copy_(rounded)
    loaded = load_as(tmp_path, "int4", load_format=load_format)
    assert answers(loaded) == answers_of(model)
    assert loaded.info.num_parameters == model.num_parameters()
    assert not any("embed" in name for name, _ in loaded.model.named_parameters())
    assert loaded.weights.num_bytes < loaded.info.num_parameters, "eight bits in the head, and four elsewhere"


@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_close_to_those_of_the_unquantized_model(kind: str, plain: Path) -> None:
    expected, found = load(plain).sample.logits, load_as(plain, kind).sample.logits
    distance = float((found - expected).norm() / expected.norm())
    assert 0 < distance < {"int8": 0.05, "fp8": 0.2, "int4": 0.5, "w4a8": 0.5, "nf4": 0.5}[kind]


def test_group_size_is_a_choice(plain: Path) -> None:
    small, large = (load_as(plain, "int4", size) for size in (16, 64))
    assert small.info.quantization == "int4, groups of 16"
    assert small.weights.num_bytes >= large.weights.num_bytes


def test_random_weights_are_quantized_as_well(plain: Path) -> None:
    loaded = load_as(plain, "int4", load_format="dummy")
    assert loaded.info.quantization == "int4, groups of 64"
    assert loaded.info.num_parameters == load(plain).info.num_parameters
    assert loaded.weights.num_bytes < 4 * loaded.info.num_parameters


def test_a_quantized_checkpoint_is_not_quantized_again() -> None:
    with pytest.raises(ConfigError, match=r"quantized already.*leave out --quantization"):
        load_as(quantized("w8a8")[0], "int4")


def test_a_group_size_alone_is_refused(plain: Path) -> None:
    with pytest.raises(ConfigError, match="quantization_group_size = 64 has no use without --quantization"):
        ModelManager("cpu").load(plain, "float32", None, quantization_group_size=64)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_can_be_quantized(architecture: str, tmp_path: Path) -> None:
    """Their weights find their places although the class is a derived one, and pages give what the model gives."""
    make_model(tmp_path, *ARCHITECTURES[architecture])
    loaded = load_as(tmp_path, "int8")
    assert loaded.info.quantization == "int8, a scale for each row"
    # Matrices of gpt2, and experts, are not in linear layers, and keep their four bytes a number.
    share = 1.0 if architecture in ("gpt2", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss") else 0.5
    assert loaded.weights.num_bytes < share * 4 * loaded.info.num_parameters
    InProcessEngine(loaded).runner.self_check()
