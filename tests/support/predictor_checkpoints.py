"""Small random checkpoints of embedders, rerankers and classifiers, made on the spot: nothing is downloaded."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    ViTImageProcessorPil,
)

# fmt: off
WORDS = (
    "the", "a", "sky", "is", "blue", "green", "fish", "swim", "cats", "and", "dogs", "sleep", "what", "color", "query",
    "passage", "##s", "##ing", "!", "?", ".", ",",
)
# fmt: on
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LETTERS = "bcdefghijklmnopqrstuvwxyz"
VOCAB = [*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in "a" + LETTERS if letter != "s")]
PAD, CLS, SEP = 0, 2, 3
MAX_LENGTH = 64

TEXTS = [
    "the sky is blue",
    "fish swim",
    "what color is the sky ?",
    "cats and dogs sleep , and the fish swim . the sky is green !",
    "a",
    "what color is the sky ?",
    "fishs swiming and sleeping",
]
PAIRS = [("what color is the sky ?", text) for text in TEXTS]

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"max_position_embeddings": MAX_LENGTH}),
    "xlm-roberta": ("xlm-roberta", {"max_position_embeddings": MAX_LENGTH + 1, "type_vocab_size": 1}),
    "modernbert": ("modernbert", {"max_position_embeddings": MAX_LENGTH, "local_attention": 8, "cls_token_id": CLS}),
    "distilbert": (
        "distilbert",
        {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 64, "max_position_embeddings": MAX_LENGTH},
    ),
    "qwen3": ("qwen3", {"max_position_embeddings": MAX_LENGTH, "head_dim": 8, "num_key_value_heads": 2}),
}


def make_tokenizer(vocab: Sequence[str] = VOCAB) -> Tokenizer:
    """Return a WordPiece tokenizer like BERT's. The vocabulary begins with SPECIAL."""
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def make_embedder(folder: Path, architecture: str = "bert", modules: Sequence[dict[str, Any]] = ()) -> Path:
    """Write a checkpoint of token embeddings. `modules` are those behind the transformer: type, and their config.

    With a `dense`, the weights of that module are made.
    """
    model = AutoModel.from_config(_config(architecture))
    _save(model, folder)
    if modules:
        write_modules(folder, modules)
    return folder


def write_modules(folder: Path, modules: Sequence[dict[str, Any]]) -> None:
    """Write the modules of sentence-transformers that follow the transformer: `type`, and their settings."""
    described = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, module in enumerate(modules, 1):
        name = f"{index}_{module['type']}"
        described.append(
            {
                "idx": index,
                "name": str(index),
                "path": name,
                "type": f"sentence_transformers.models.{module['type']}",
            }
        )
        (folder / name).mkdir()
        config = {key: value for key, value in module.items() if key not in ("type", "weights")}
        (folder / name / "config.json").write_text(json.dumps(config))
        if "weights" in module:
            save_file(module["weights"], folder / name / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(described))


def make_classifier(
    folder: Path, architecture: str = "bert", labels: Sequence[str] = ("no", "yes", "maybe"), **more: Any
) -> Path:
    """Write a checkpoint that classifies texts, or with one label reranks pairs."""
    config = _config(architecture)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    for name, value in more.items():
        setattr(config, name, value)
    model = AutoModelForSequenceClassification.from_config(config)
    _save(model, folder)
    return folder


def make_image_classifier(folder: Path, labels: Sequence[str] = ("cat", "dog", "fish")) -> Path:
    """Write a checkpoint that classifies images of 32 x 32 pixels."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        "vit",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    model = AutoModelForImageClassification.from_config(config)
    _scale_up(model)
    model.save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def make_image(width: int = 40, height: int = 30, kind: str = "PNG", seed: int = 0) -> bytes:
    """Return an image file with random pixels."""
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=random, dtype=torch.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(content, kind)
    return content.getvalue()


def _config(architecture: str) -> Any:
    torch.manual_seed(7)
    model_type, own = ENCODERS[architecture]
    common = (
        {}
        if architecture == "distilbert"
        else {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        }
    )
    return AutoConfig.for_model(model_type, vocab_size=len(VOCAB), pad_token_id=PAD, **common, **own)


def _scale_up(model: torch.nn.Module) -> None:
    """Let items differ by more than rounding: transformers' initialisation is for training."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "LayerNorm" not in name:
                parameter.mul_(5)


def _save(model: Any, folder: Path) -> None:
    _scale_up(model)
    save_checkpoint(model, folder, make_tokenizer(), MAX_LENGTH)


def save_checkpoint(model: Any, folder: Path, tokenizer: Tokenizer, max_length: int, **tokenizer_config: Any) -> None:
    """Write a model and its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        **tokenizer_config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
