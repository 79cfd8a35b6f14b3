"""Claims about checkpoints in formats that servekit does not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import ConfigError
from tests.support.inprocess import load
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.loading.checkpoint import QUANTIZATION_FILES, quantization_config
from workers.loading.model_manager import ModelManager
from workers.quantization.formats.registry import name_of

# As the tools write them into config.json.
NOT_READ: dict[str, dict[str, Any]] = {
    "ModelOpt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "HQQ, 4 bits": {"quant_method": "hqq", "bits": 4},
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


@pytest.mark.parametrize("name", NOT_READ)
def test_format_that_is_not_read_is_refused_by_name_with_the_remedy(name: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(with_config(model, tmp_path, quantization_config=NOT_READ[name]))
    message = refusal.value.message
    assert f"quantized in the format {name}, which servekit does not read" in message
    assert "Serve the unquantized checkpoint" in message
    assert "install" not in message and "architecture" not in message


def test_formats_are_found_where_other_tools_write_them(model: Path, tmp_path: Path) -> None:
    def found(**fields: Any) -> str | None:
        described = quantization_config(with_config(model, tmp_path, **fields))
        return None if described is None else name_of(described)

    assert quantization_config(model) is None
    assert found(quantization_config=None) is None
    assert found(compression_config={"format": "pack-quantized"}) == "compressed-tensors"
    assert found(text_config={"quantization_config": {"quant_method": "awq", "bits": 4}}) == "AWQ, 4 bits"
    assert found(quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}) == "bitsandbytes"
    assert found(quantization_config="gptq") == "GPTQ"
    assert found(quantization_config=["gptq"]) == "unknown"
    with_config(model, tmp_path)
    for file, method in QUANTIZATION_FILES.items():
        (tmp_path / file).write_text('{"bits": 4}')
        assert quantization_config(tmp_path) == {"bits": 4, "quant_method": method}
        (tmp_path / file).unlink()


def test_random_weights_of_a_quantized_checkpoints_shape_are_served_with_a_note(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_config(model, tmp_path, quantization_config={"quant_method": "fp8"})
    ModelManager("cpu").load(tmp_path, "float32", None, load_format="dummy")
    assert "config.json describes weights in the format FP8; the random weights do not have it" in caplog.messages
