"""What attention needs to know of a step, and what a way to attend has to be able to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.kv_cache import KVCache, LayerShape, Shape


@dataclass(frozen=True, slots=True)
class StepRows:
    """Who computes what: a row is one sequence's share of a step, a prompt chunk or a single token.

    The tokens of a step lie flat, row after row. Query i of a row with n queries and length L stands at position
    L - n + i, and sees the keys up to there.
    """

    block_size: int
    num_queries: NDArray[np.int64]  # [num_rows] on the host, as are
    num_keys: NDArray[np.int64]  # [num_rows] which each row's last query sees, itself included
    query_starts: Tensor  # [num_rows + 1] int32: where a row's tokens begin, and the last one's end
    lengths: Tensor  # [num_rows] int32: num_keys, on the device
    block_table: Tensor  # [num_rows, width] int32, padded with any valid block
    slot_mapping: Tensor  # [num_tokens] int64: the flat cell of each new key


@dataclass(frozen=True, slots=True)
class Score:
    """How a layer's query heads weigh keys."""

    scale: float
    window: int | None = None  # keys that a query sees, itself included
    softcap: float | None = None  # Gemma 2
    sinks: Tensor | None = None  # [num_heads] scores that take probability and give nothing: gpt-oss


Rotation = tuple[Tensor, Tensor]  # cosines and sines [num_tokens, head_dim], both halves alike


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query and key head before it is rotated: Qwen 3."""

    query_weight: Tensor  # [head_dim]
    key_weight: Tensor
    epsilon: float


class PagedAttention(Protocol):
    """One way to attend over pages, for one dtype and device."""

    name: str
    stored: torch.dtype  # of its pages
    captures: bool  # whether what it does depends on shapes alone, so that it can be repeated as a graph

    def block_shapes(self, layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
        """How it wants the keys, and the values, of a block to lie."""

    def prepare(self, rows: StepRows) -> Any:
        """Whatever is the same for all layers of a step."""

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, score: Score
    ) -> Tensor:
        """Store keys [num_tokens, num_kv_heads, key_dim] and values alike in the step's cells, then look at them all.

        queries: [num_tokens, num_heads, key_dim]; returns [num_tokens, num_heads, value_dim].
        """

    def attend_rotated(
        self, step: PagedStep, layer: int, qkv: Tensor, rotation: Rotation, norms: HeadNorms | None, score: Score
    ) -> Tensor:
        """The same for queries, keys and values as a projection gives them: rotated first, keys and queries alike.

        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], which may be overwritten.
        Returns [num_tokens, num_heads * head_dim].
        """


class PagedStep:
    """What travels through the layers as a keyword argument."""

    __slots__ = ("attention", "cache", "prepared", "rows", "wanted")

    def __init__(self, attention: PagedAttention, cache: KVCache, rows: StepRows, wanted: Tensor | None = None) -> None:
        self.attention = attention
        self.cache = cache
        self.rows = rows
        self.wanted = wanted  # the tokens whose last hidden state anybody looks at; None is all
        self.prepared = attention.prepare(rows)
