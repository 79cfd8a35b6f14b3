"""LoRA adapters of small models, made by peft, and the same models with these adapters merged."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(directory: Path, model: PreTrainedModel, seed: int, **config: Any) -> PreTrainedModel:
    """Save a random adapter of a model; return a copy of the model that has it merged."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        return _make_adapter(directory, model, config)


def _make_adapter(directory: Path, model: PreTrainedModel, config: dict[str, Any]) -> PreTrainedModel:
    fields = {"r": 8, "lora_alpha": 16, "target_modules": list(LLAMA_TARGETS), "init_lora_weights": False, **config}
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**fields))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:  # so large that it changes the answers
                parameter.normal_(std=0.2)
    adapted.save_pretrained(str(directory))
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.eval()
