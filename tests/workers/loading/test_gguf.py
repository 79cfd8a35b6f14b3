"""The claim about GGUF files: they answer as the model whose weights the file's blocks mean, token by token."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from servekit.engine.model_files import find_model
from servekit.errors import ConfigError
from servekit.protocol.gguf_index import INDEX, WEIGHTS, GgufIndex, GgufTensor
from tests.support.gguf_files import write_gguf
from tests.support.inprocess import InProcessEngine, load
from workers.csrc.build import c_library
from workers.layers.quantized_linear import QuantizedLinear
from workers.loading.fingerprint import fingerprint
from workers.loading.gguf_file import GgufFile, rows_of_halves
from workers.loading.model_manager import ModelManager

pytestmark = pytest.mark.long  # it loads many models

VOCAB_SIZE = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 64},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 64},
    "phi3": {},
}
PROMPTS = [[5, 9, 100, 3], [17], [200, 31, 31, 7, 90, 12, 44, 8, 150]]
MAX_TOKENS = 12


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c_library("float32")  # of the user's cache: in an empty one it would be compiled, which takes half a minute
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make(model_type: str) -> PreTrainedModel:
    """Return a random model whose logits are far enough apart for greedy decoding to mean something."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **MODELS[model_type]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0 if "embed" not in name else 10.0)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def written(path: Path, model_type: str, type_name: str, **metadata: Any) -> tuple[Path, PreTrainedModel]:
    """Write a model to a file, and return it with the weights that the file's blocks mean."""
    model = make(model_type)
    meaning = write_gguf(path / "model.gguf", model, type_name, metadata)
    model.load_state_dict(meaning)
    return path / "model.gguf", model


def generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
        )
    return output[0, len(prompt) :].tolist()


def serve(file: Path) -> list[list[int]]:
    engine = InProcessEngine(load(find_model(str(file))))
    sequences = [engine.add(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
    engine.run()
    return [list(sequence.output_token_ids) for sequence in sequences]


TYPES_OF_LLAMA = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32"]
CASES = [("llama", type_name) for type_name in TYPES_OF_LLAMA]
CASES += [(name, type_name) for name in MODELS if name != "llama" for type_name in ("Q8_0", "Q4_K")]


@pytest.mark.parametrize(("model_type", "type_name"), CASES)
def test_a_file_answers_as_its_dequantized_model(model_type: str, type_name: str, tmp_path: Path) -> None:
    file, model = written(tmp_path, model_type, type_name)
    expected = [generate(model, prompt) for prompt in PROMPTS]
    assert len(set(map(tuple, expected))) == len(PROMPTS), "the model answers every prompt alike"
    assert serve(file) == expected


def test_matrices_of_linear_layers_stay_as_they_are_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = written(tmp_path, "llama", "Q4_K")
    monkeypatch.setattr("workers.loading.model_manager.replace_layers", lambda _, decoder, *__: decoder)
    loaded = load(find_model(str(file)))
    quantized = [module for module in loaded.model.modules() if isinstance(module, QuantizedLinear)]
    assert len(quantized) == 2 * 7 + 1
    assert {module.matrix.encoding for module in quantized} == {"int4"}
    assert not [module for module in loaded.model.modules() if isinstance(module, torch.nn.Linear)]


def test_rows_of_heads_are_put_back() -> None:
    # Two heads of six rows: the file's rows take turns between the halves.
    stored = torch.tensor([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    assert stored[rows_of_halves(12, 2)].tolist() == list(range(12))


def test_another_file_has_another_fingerprint(tmp_path: Path) -> None:
    file, _ = written(tmp_path, "llama", "Q8_0")
    made = find_model(str(file))
    first = fingerprint(made, True)
    copy = shutil.copyfile(file, tmp_path / "copy.gguf")
    assert fingerprint(find_model(str(copy)), True) == first, "the place does not matter"
    content = bytearray(file.read_bytes())
    index = msgspec.json.decode((made / INDEX).read_bytes(), type=GgufIndex)
    tensor = index.tensors["model.layers.1.mlp.up_proj.weight"]
    content[tensor.offset + tensor.num_bytes // 2] ^= 1
    file.write_bytes(content)
    assert fingerprint(made, True) != first


WRONG: list[dict[str, Any]] = [
    {"type": "Q9_K"},
    {"offset": 2**40},
    {"offset": -1},
    {"shape": (2**31, 256)},
    {"shape": (256, 100)},
    {"shape": (2, 2, 256)},
    {"shape": ()},
    {"num_interleaved_heads": 3},
    {"num_interleaved_heads": -2},
]


@pytest.mark.parametrize("changes", WRONG)
def test_an_index_that_the_file_cannot_have_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(bytes(256 * 144 + 32))
    fields: dict[str, Any] = {"type": "Q4_K", "shape": (256, 256), "offset": 32, **changes}
    (tmp_path / INDEX).write_bytes(msgspec.json.encode(GgufIndex({"a.weight": GgufTensor(**fields)})))
    with pytest.raises(ConfigError, match=r"a\.weight cannot be .* do not belong together"):
        GgufFile(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"tensors": {"a": 1}}', b"\xff", b'{"tensors": {}}'])
def test_an_index_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(bytes(100))
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ConfigError, match=r"not an index|holds no tensors"):
        GgufFile(tmp_path)


def test_a_file_of_other_layers_than_its_configuration_is_refused(tmp_path: Path) -> None:
    file, _ = written(tmp_path, "llama", "Q8_0", **{"llama.block_count": 3})
    with pytest.raises(ConfigError):
        ModelManager("cpu").load(find_model(str(file)), "float32", None)
    file, _ = written(tmp_path, "llama", "Q8_0", **{"llama.feed_forward_length": 256})
    with pytest.raises(ConfigError):
        ModelManager("cpu").load(find_model(str(file)), "float32", None)


def test_numbers_of_a_file_are_quantized_as_they_are_read(tmp_path: Path) -> None:
    file, _ = written(tmp_path, "llama", "F16")
    loaded = ModelManager("cpu").load(find_model(str(file)), "float32", None, quantization="int8")
    assert loaded.info.quantization.startswith("int8")
    assert loaded.weights.num_bytes < 0.75 * file.stat().st_size
    made = find_model(str(written(tmp_path, "llama", "Q8_0")[0]))
    with pytest.raises(ConfigError, match="quantized already, in the format GGUF"):
        ModelManager("cpu").load(made, "float32", None, quantization="int8")
