"""An EAGLE-3 head or MTP layer that is damaged, hostile or another model's is refused in a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from servekit.errors import ConfigError
from tests.support.draft_heads import MTP_MODELS, add_mtp_layer, make_eagle3_head
from tests.support.inprocess import load
from tests.support.tiny_models import _LLAMA_LIKE, ARCHITECTURES, make_model
from workers.loading.model_manager import LoadedModel
from workers.speculation.eagle_head import load_eagle3_head, read_eagle3_config
from workers.speculation.mtp_head import load_mtp_head

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("model")
    make_model(path, *ARCHITECTURES["llama"])
    return load(path)


@pytest.fixture(scope="module")
def whole(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head")
    make_eagle3_head(path, loaded.model.config, draft_vocab_size=50)
    return path


@pytest.fixture
def head(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "head")
    return tmp_path / "head"


def edit_tensors(path: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def test_a_head_without_faults_is_read(head: Path, loaded: LoadedModel) -> None:
    assert load_eagle3_head(head, loaded).target_ids is not None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "no EAGLE-3 head"),
        (lambda tensors: tensors.pop("midlayer.hidden_norm.weight"), "EAGLE-1 or EAGLE-2"),
        (lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"), "lacks 1 tensors.*mlp.up_proj"),
        (lambda tensors: tensors.update({"fc_norm.weight": torch.ones(48)}), "does not know.*fc_norm"),
        (lambda tensors: tensors.update({"layers.0.norm.weight": torch.ones(48)}), "two tensors for norm"),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(48, 96)}), "48 x 96.*another model"),
        (
            lambda tensors: tensors.update({"midlayer.self_attn.q_proj.weight": torch.zeros(64, 48)}),
            "q_proj.weight is 64 x 48.* 64 x 96",
        ),
        (lambda tensors: tensors.update({"norm.weight": torch.zeros(())}), "a single number"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(51, 48)}), "51 rows"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(50, 40)}), "50 x 40"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(50, 48).to(torch.int8)}), "I8"),
        (lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(100, 48)}), "100 rows.*128 tokens"),
        (lambda tensors: tensors.pop("d2t"), "no tensor d2t"),
        (lambda tensors: tensors["d2t"].fill_(100), "tokens from 100 to 149"),
        (lambda tensors: tensors["d2t"].fill_(-1), "tokens from -1 to 48"),
        (lambda tensors: tensors["d2t"].fill_(2**63 - 1), "another model"),
        (lambda tensors: tensors.update({"d2t": torch.zeros(49, dtype=torch.int64)}), "must be 50 integers"),
        (lambda tensors: tensors.update({"d2t": torch.zeros(50)}), "float32, and must be 50 integers"),
        (lambda tensors: tensors.update({"d2t": torch.zeros((), dtype=torch.int64)}), "must be 50 integers"),
    ],
)
def test_wrong_tensors_are_refused(edit: Callable[[Tensors], Any], words: str, head: Path, loaded: LoadedModel) -> None:
    edit_tensors(head, edit)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        load_eagle3_head(head, loaded)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, "2 decoder layers"),
        ({"num_hidden_layers": [1]}, "decoder layers"),
        ({"num_attention_heads": 0}, "no layer that can be computed"),
        ({"num_key_value_heads": 3}, "cannot share 3 key-value heads"),
        ({"num_key_value_heads": 0}, "no layer that can be computed"),
        ({"head_dim": -16}, "no layer that can be computed"),
        ({"head_dim": 15}, "no layer that can be computed"),
        ({"hidden_size": "many"}, "no layer that can be computed"),
        ({"hidden_size": 2**40}, "no layer that can be computed"),
        ({"intermediate_size": 2**23}, "mlp.* is 64 x 48, and config.json describes 8388608 x 48"),
        ({"hidden_act": "rot13"}, "no layer that can be computed"),
        ({"rope_scaling": {"rope_type": "unknown"}}, "no layer that can be computed"),
        ({"draft_vocab_size": -1}, "draft_vocab_size is -1"),
        ({"draft_vocab_size": 51}, "draft_vocab_size is 51"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "the model has 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, -2]}}, "the model has 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["0"]}}, "the model has 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 1}}, "the model has 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "the model has 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0] * 9}}, "the model has 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "need 48 x 96"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_config": None}, "names no eagle_aux_hidden_state_layer_ids"),
        ({"transformer_layer_config": 3}, "no JSON object"),
    ],
)
def test_wrong_configurations_are_refused(changes: dict[str, Any], words: str, head: Path, loaded: LoadedModel) -> None:
    file = head / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ConfigError, match=words):
        load_eagle3_head(head, loaded)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]", b"[" * 100_000, b"null"])
def test_a_configuration_that_is_no_json_object_is_refused(content: bytes, head: Path, loaded: LoadedModel) -> None:
    (head / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_eagle3_head(head, loaded)


def test_other_files_are_refused(head: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        load_eagle3_head(tmp_path, loaded)
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="damaged"):
        load_eagle3_head(head, loaded)
    file.rename(head / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="loads no other format"):
        load_eagle3_head(head, loaded)


def test_the_layers_that_are_read_are_those_of_sglang_and_vllm(head: Path) -> None:
    """Both take the third from below, the middle and the fourth from above, if a checkpoint names none."""
    file = head / "config.json"
    described = json.loads(file.read_text())
    described.pop("eagle_config")
    file.write_text(json.dumps(described))
    assert read_eagle3_config(head, 32).layers == (2, 16, 29)
    file.write_text(json.dumps({**described, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}))
    assert read_eagle3_config(head, 32).layers == (2, 16, 29)
    file.write_text(json.dumps({**described, "eagle_aux_hidden_state_layer_ids": [2, 16, 29]}))
    assert read_eagle3_config(head, 32).layers == (2, 16, 29)


# -- MTP layers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    make_model(path, "glm4_moe", {**_LLAMA_LIKE, **MTP_MODELS["glm4_moe"]})
    add_mtp_layer(path)
    return path


LAYER = f"model.layers.{_LLAMA_LIKE['num_hidden_layers']}."


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(f"{LAYER}eh_proj.weight"), "eh_proj"),
        (lambda tensors: tensors.pop(f"{LAYER}self_attn.q_proj.weight"), "q_proj"),
        (lambda tensors: tensors.pop(f"{LAYER}mlp.experts.1.up_proj.weight"), "cannot be read"),
        (lambda tensors: tensors.update({f"{LAYER}enorm.weight": torch.ones(47)}), "cannot be read"),
        (lambda tensors: tensors.update({f"{LAYER}eh_proj.weight": torch.ones(48, 48)}), "cannot be read"),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(LAYER)],
            "cannot be read",
        ),
    ],
)
def test_wrong_mtp_layers_are_refused(
    edit: Callable[[Tensors], Any], words: str, mixture: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(mixture, path)
    loaded = load(path)
    edit_tensors(path, edit)
    with pytest.raises(ConfigError, match=words):
        load_mtp_head(path, loaded)


def test_models_without_mtp_layers_are_refused_by_name(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM .* has no MTP layers"):
        load_mtp_head(Path(loaded.model.name_or_path), loaded)


def test_mtp_layers_of_quantized_checkpoints_are_refused(mixture: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(mixture, path)
    loaded = load(path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantized"):
        load_mtp_head(path, loaded)
