"""Tests of models that take images, too: their language part answers like all of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine, load
from tests.support.tiny_models import _LLAMA_LIKE, VOCAB_SIZE
from workers.layers.fused_decoder import FusedDecoder
from workers.loading.model_config import read_config
from workers.loading.model_manager import ModelManager

IMAGE = VOCAB_SIZE - 1  # the token that stands for an image
_VISION = {"image_size": 28, "patch_size": 14, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION = {"depth": 1, "hidden_size": 24, "num_heads": 2, "out_hidden_size": 48, "intermediate_size": 32}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
_SLIDING = {"sliding_window": 8, "query_pre_attn_scalar": 8}

# model type -> sizes of the text part, those of the vision part, and others
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ({"model_type": "llama"}, {"model_type": "siglip_vision_model", **_VISION}, {"image_token_index": IMAGE}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", **_VISION}, {"image_token_index": IMAGE}),
    "gemma3": (_SLIDING, _VISION, {"image_token_index": IMAGE, "mm_tokens_per_image": 1}),
    "qwen2_5_vl": ({"rope_parameters": _MROPE}, _QWEN_VISION, {"image_token_id": IMAGE, "video_token_id": IMAGE}),
}
PROMPTS = [[5, 9, 33, 70, 100, 64, 8, 9, 10, 3, 77, 23, 19], [44], [7, 8, 9] * 9]


def make(directory: Path, model_type: str) -> Any:
    text, vision, others = MODELS[model_type]
    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(
        model_type, text_config={**_LLAMA_LIKE, **tokens, **text}, vision_config=vision, **tokens, **others
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(5.0 if "embed" not in name else 10.0)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("model_type", MODELS)
def test_the_language_part_answers_as_all_of_the_model(tmp_path: Path, model_type: str) -> None:
    model = make(tmp_path, model_type)
    expected = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=10, eos_token_id=[2**31],
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            )  # fmt: skip
        expected.append(output[0, len(prompt) :].tolist())
    assert len(set(map(tuple, expected))) == len(PROMPTS), "the model answers every prompt alike"
    loaded = load(tmp_path)
    assert loaded.info.notice == (
        f"{type(model).__name__} takes other inputs than text, too; servekit serves its language part, for text only"
    )
    is_fused = any(isinstance(module, FusedDecoder) for module in loaded.model.modules())
    assert is_fused == (model_type != "qwen2_5_vl"), "its positions have three dimensions"
    assert not any("vis" in name or "projector" in name for name, _ in loaded.model.named_parameters())
    engine = InProcessEngine(loaded, max_num_batched_tokens=16)
    sequences = [engine.add(prompt, max_tokens=10, ignore_eos=True) for prompt in PROMPTS]
    engine.run()
    assert [sequence.output_token_ids for sequence in sequences] == expected


def test_a_language_part_can_be_quantized_and_can_be_random(tmp_path: Path) -> None:
    make(tmp_path, "mistral3")
    quantized = ModelManager("cpu").load(tmp_path, "float32", None, quantization="int8")
    assert quantized.info.quantization and quantized.info.notice
    random = ModelManager("cpu").load(tmp_path, "float32", None, load_format="dummy")
    assert random.info.num_parameters == load(tmp_path).info.num_parameters


def test_a_model_that_is_no_decoder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    assert read_config(tmp_path).model_type == "t5"
    with pytest.raises(ConfigError, match="is an encoder with a decoder, and servekit serves decoders alone"):
        load(tmp_path)
