"""Claims about checkpoints in formats that servekit does not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import ConfigError
from tests.support.inprocess import load
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.loading.checkpoint import QUANTIZATION_FILES, quantization_format
from workers.loading.model_manager import ModelManager

# As the tools write them into config.json.
QUANTIZED: dict[str, dict[str, Any]] = {
    "GPTQ, 4 bits": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "AWQ, 4 bits": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "MXFP4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "ModelOpt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "someone's own": {"quant_method": "someone's own"},
    "unknown": {"quant_method": ["?"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, *ARCHITECTURES["llama"])
    return path


def with_config(model: Path, path: Path, **fields: Any) -> Path:
    known = json.loads((model / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(known | fields))
    return path


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_checkpoint_is_refused_with_its_format_and_the_remedy(name: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(with_config(model, tmp_path, quantization_config=QUANTIZED[name]))
    message = refusal.value.message
    assert f"quantized in the format {name}, which servekit does not support yet" in message
    assert "serve the unquantized checkpoint" in message
    assert "install" not in message and "architecture" not in message


def test_formats_are_found_where_other_tools_write_them(model: Path, tmp_path: Path) -> None:
    assert quantization_format(model) is None
    assert quantization_format(with_config(model, tmp_path, quantization_config=None)) is None
    compressed = {"compression_config": {"format": "pack-quantized"}}
    assert quantization_format(with_config(model, tmp_path, **compressed)) == "compressed-tensors"
    of_decoder = {"text_config": {"quantization_config": {"quant_method": "awq", "bits": 4}}}
    assert quantization_format(with_config(model, tmp_path, **of_decoder)) == "AWQ, 4 bits"
    with_config(model, tmp_path)
    for file, name in QUANTIZATION_FILES.items():
        (tmp_path / file).write_text("{}")
        assert quantization_format(tmp_path) == name
        (tmp_path / file).unlink()


def test_random_weights_of_a_quantized_checkpoints_shape_are_served_with_a_note(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_config(model, tmp_path, quantization_config=QUANTIZED["FP8"])
    ModelManager("cpu").load(tmp_path, "float32", None, load_format="dummy")
    assert "config.json describes weights in the format FP8; the random weights are not quantized" in caplog.messages
