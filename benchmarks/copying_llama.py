"""A Llama of 0.4 billion weights whose answers are known: after each token comes the next one of a fixed order.

Its shape, and so the time of each step, is that of `benchmarks.random_llama`. Its attention and its feed-forward layers
add zero, so the output head sees the embedding of the newest token; and the head's row of each token is the embedding
of the token before it in the order. So a prompt that contains a piece of the order is copied, if the prompt ends with
the token before that piece. No step is faster for it: zeros are multiplied like other numbers.

    python -m benchmarks.copying_llama FOLDER [--gguf]

makes the checkpoint in FOLDER/copying, and for llama.cpp the same weights in FOLDER/copying.gguf.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.random_llama import SHAPE, SPECIAL_TOKENS, write_tokenizer


def order_of_tokens(vocab_size: int = SHAPE["vocab_size"]) -> list[int]:
    """Return all tokens but the special ones, in the order in which the model says them."""
    order = list(range(len(SPECIAL_TOKENS), vocab_size))
    random.Random(0).shuffle(order)
    return order


def make_copying_llama(folder: Path, shape: dict[str, Any] = SHAPE) -> Path:
    """Make the checkpoint in bfloat16, unless `folder` has it. Returns its directory."""
    directory = folder / "copying"
    if (directory / "model.safetensors").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, shape["vocab_size"])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape | {"tie_word_embeddings": False}, dtype="bfloat16"))
    order = torch.tensor(order_of_tokens(shape["vocab_size"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        head.zero_()
        head[order.roll(-1)] = embedding[order]
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def write_copying_gguf(checkpoint: Path, file: Path) -> None:
    """Write the checkpoint as one file in bfloat16 with its own tokenizer."""
    from tests.support.gguf_files import write_gguf

    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    vocabulary: dict[str, int] = tokenizer["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [each if isinstance(each, str) else " ".join(each) for each in tokenizer["merges"]],
        "tokenizer.ggml.bos_token_id": SHAPE["bos_token_id"],
        "tokenizer.ggml.eos_token_id": SHAPE["eos_token_id"],
        "tokenizer.ggml.padding_token_id": SHAPE["pad_token_id"],
    }
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    write_gguf(file, model, "BF16", metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", action="store_true", help="write the file for llama.cpp, too")
    arguments = parser.parse_args()
    checkpoint = make_copying_llama(arguments.folder)
    if arguments.gguf:
        write_copying_gguf(checkpoint, arguments.folder / "copying.gguf")


if __name__ == "__main__":
    main()
