"""Small models with a tokenizer and texts for `servekit quantize`, and what is read back of its checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol.quantization_job import QuantizationJob
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.compression.quantize import quantize_checkpoint
from workers.layers.quantized_linear import QuantizedLinear
from workers.loading.checkpoint import find_weights, quantization_config
from workers.loading.model_config import read_config
from workers.loading.progress import Progress
from workers.loading.quantized_weights import read_quantized_weights
from workers.quantization.formats.registry import format_of

SAMPLES = {"num_samples": 8, "max_length": 64}


def make_model_with_tokenizer(directory: Path, architecture: str = "llama", **fields: Any) -> PreTrainedModel:
    """Save a small random model with the demo model's tokenizer; return it in float32."""
    model_type, configuration = ARCHITECTURES[architecture]
    model = make_model(directory, model_type, {**configuration, "vocab_size": 2048, **fields})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_PATH / name, directory)
    return model


def demo_documents() -> list[str]:
    """Return texts in the language of the demo model: questions with their answers."""
    lines = (DEMO_MODEL_PATH / "questions.jsonl").read_text().splitlines()
    return [f"{question['prompt']} {question['answer']}" for question in map(json.loads, lines)]


def write_texts(path: Path, documents: list[str]) -> Path:
    """Write a `.jsonl` file of documents."""
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def quantize(model: Path, output: Path, method: str, calibration: Path | None = None, **fields: Any) -> Path:
    """Quantize in this process."""
    text = None if calibration is None else str(calibration)
    job = QuantizationJob(
        model=str(model),
        output=str(output),
        method=method,  # type: ignore[arg-type]
        calibration=text,
        **{**SAMPLES, **fields},
    )
    quantize_checkpoint(job)
    return output


def read(path: Path) -> PreTrainedModel:
    """Read a quantized checkpoint as a worker does, without preparing its layers, in float32."""
    described = quantization_config(path)
    assert described is not None
    model, _ = read_quantized_weights(
        path, read_config(path), torch.float32, "eager", Progress(), format_of(described), "of a test"
    )
    return model.eval()


def dequantized(path: Path, into: Path) -> PreTrainedModel:
    """Write the numbers of a quantized checkpoint as an unquantized one, and return what transformers makes of it."""
    tensors = {name: tensor for file in find_weights(path) for name, tensor in load_file(file).items()}
    model = read(path)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            for part in ("_packed", "_scale", "_shape", "_zero_point", ""):
                tensors.pop(f"{name}.weight{part}", None)
            tensors[f"{name}.weight"] = module.matrix.dequantize()
    into.mkdir()
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, into / "model.safetensors", {"format": "pt"}
    )
    return AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32, attn_implementation="eager").eval()
