"""Claims about quantized weights: tokens are those of the codes' numbers, and memory is what the codes take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine, load
from tests.support.quantized_models import SCHEMES, describe, make_quantized_model
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
    """qwen2 and starcoder2 have biases, gemma2 is not fused, and mixtral's experts are one parameter."""
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


# -- memory ------------------------------------------------------------------------------------------------------------

MEMORY = """
import ctypes, gc, json, re, sys, threading, time
from pathlib import Path
import torch
from workers.layers.quantized_linear import QuantizedLinear
from workers.loading.checkpoint import quantization_config
from workers.loading.model_config import read_config
from workers.loading.progress import Progress
from workers.loading.quantized_weights import num_weight_bytes, read_quantized_weights
from workers.quantization.at_load import QuantizedAtLoad
from workers.quantization.formats.registry import format_of

def resident(kind):
    return int(re.search(kind + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def load(path):
    described = quantization_config(path)
    weight_format = QuantizedAtLoad(sys.argv[2]) if described is None else format_of(described)
    model, _ = read_quantized_weights(path, read_config(path), torch.float32, "eager", Progress(), weight_format, "x")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.matrix.codes.view(torch.uint8).max()  # codes that are still in the file are in memory then, too
    return model

def settle():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)

torch.set_num_threads(1)
load(Path(sys.argv[3]))  # a small one, for what is imported and allocated once
settle()
before, anonymous, largest, is_loaded = resident("VmRSS"), resident("RssAnon"), 0, False

def watch():
    global largest
    while not is_loaded:
        largest = max(largest, resident("RssAnon"))
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
model = load(Path(sys.argv[1]))
is_loaded = True
watcher.join()
settle()
print(json.dumps([resident("VmRSS") - before, largest - anonymous, num_weight_bytes(model)]))
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int8", "int4", "w4a16"])
def test_memory_is_that_of_codes_and_scales_and_at_most_a_layer_more(kind: str, tmp_path: Path) -> None:
    """A model of 41 M parameters: 164 MB as the float32 that it is served in, 82 MB in its files."""
    for name, num_layers in (("small", 1), ("large", 12)):
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            dtype="bfloat16",
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / name)
        if kind == "w4a16":
            pack_quickly(tmp_path / name)
    arguments = [str(tmp_path / "large"), kind, str(tmp_path / "small")]
    output = subprocess.run([sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True, check=True)
    held, peak, expected = json.loads(output.stdout.splitlines()[-1])
    numbers = 12 * (4 * 512 * 512 + 3 * 512 * 1536)
    bytes_of_scales = {"int8": 0, "int4": numbers // 64 * 4, "w4a16": numbers // 128 * 2}[kind]
    assert expected == pytest.approx(numbers * (1 if kind == "int8" else 0.5) + bytes_of_scales, rel=0.03)
    assert held == pytest.approx(expected, rel=0.03, abs=2**22)  # the allocator keeps some of the last chunk
    layer_in_files = 2 * numbers // 12
    assert peak < expected + layer_in_files + 24 * 2**20, "beside one layer, only a few rows at a time"


def pack_quickly(path: Path) -> None:
    """Quantize a model to W4A16 in the files, with random codes."""
    tensors: dict[str, Any] = load_file(path / "model.safetensors")
    for name in [name for name in tensors if re.search(r"layers.*proj\.weight$", name)]:
        rows, columns = tensors.pop(name).shape
        prefix = name.removesuffix("weight")
        tensors[f"{prefix}weight_packed"] = torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int32)
        tensors[f"{prefix}weight_scale"] = torch.full((rows, columns // 128), 0.001, dtype=torch.bfloat16)
        tensors[f"{prefix}weight_shape"] = torch.tensor([rows, columns])
    save_file(tensors, path / "new", {"format": "pt"})
    (path / "new").rename(path / "model.safetensors")
    describe(path, "w4a16", group_size=128)
