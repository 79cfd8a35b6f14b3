"""Llamas of random weights, with a tokenizer: models of common sizes that need no download.

python -m benchmarks.random_llama    # makes the one of 84 million weights, in build/small-llama/bfloat16
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

# 398 million weights. Rows are multiples of 256, so that all types of GGUF blocks can hold them.
SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# 84 million weights. The output matrix is not the input embedding, so all tokens are about as likely.
SMALL_SHAPE: dict[str, Any] = SHAPE | {
    "vocab_size": 8192,
    "hidden_size": 640,
    "intermediate_size": 2560,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "tie_word_embeddings": False,
}
SMALL_FOLDER = Path("build/small-llama")
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|pad|>"]
MAX_CORPUS_BYTES = 12_000_000


def make_random_llama(folder: Path, shape: dict[str, Any] = SHAPE) -> Path:
    """Make the checkpoint in bfloat16, unless `folder` has it. Returns its directory."""
    directory = folder / "bfloat16"
    if (directory / "model.safetensors").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, shape["vocab_size"])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, dtype="bfloat16"))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer that is trained on the sources of Python's standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "the sources have too few words for so many tokens"
    tokenizer.save(str(directory / "tokenizer.json"))
    bos, eos, pad = SPECIAL_TOKENS
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": pad}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))


def _texts() -> list[str]:
    """Return the standard library's modules, without its tests and what is installed, up to MAX_CORPUS_BYTES."""
    library, found, num_bytes = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for file in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(file.relative_to(library).parts):
            continue
        found.append(file.read_text(errors="replace"))
        num_bytes += len(found[-1])
        if num_bytes > MAX_CORPUS_BYTES:
            break
    return found


if __name__ == "__main__":
    print(make_random_llama(SMALL_FOLDER, SMALL_SHAPE))
