"""Define the index of a GGUF file's tensors, which the server writes for workers: a JSON file next to the link.

The server reads the file's header, which has a configuration, a tokenizer and the names of tensors in one. Workers need
only this of it: where the bytes of each parameter are, and how they become the parameter that transformers knows.
"""

from __future__ import annotations

from math import prod

from msgspec import Struct

WEIGHTS = "model.gguf"
INDEX = "model.gguf.index.json"

# The numbers in a block, and its bytes. Types with one number in a block hold plain numbers.
BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}


class GgufTensor(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one parameter is in the file, and how it is stored. The last dimension is the one that blocks divide."""

    type: str  # a key of BLOCK_SIZES
    shape: tuple[int, ...]
    offset: int  # of the first byte, from the beginning of the file
    # For RoPE, llama.cpp rotates pairs of neighbours, and transformers pairs from the two halves of a head. So
    # llama.cpp stores the rows of queries and keys in another order. This is the number of heads whose rows are
    # to be put back; 0 if the order is the same.
    num_interleaved_heads: int = 0
    adds_one: bool = False  # Gemma's norms multiply by 1 + w; the file holds 1 + w, and transformers wants w

    @property
    def is_packed(self) -> bool:
        """Whether it consists of blocks of codes, and not of numbers of a common type."""
        return BLOCK_SIZES[self.type][0] > 1

    @property
    def row_bytes(self) -> int:
        numbers, num_bytes = BLOCK_SIZES[self.type]
        return self.shape[-1] // numbers * num_bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GgufIndex(Struct, frozen=True):
    """The tensors of a file, by the name of the parameter in transformers' model."""

    tensors: dict[str, GgufTensor]
