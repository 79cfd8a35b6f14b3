"""Define the interface of attention backends, and their inputs: sequences, a layer's parameters, the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.kv_cache.pages import KVCache, LayerShape, Shape


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The sequences of a step. Each computes a chunk: a part of a prompt, or a single token.

    The tokens of a step are flat, one sequence after the other. Query i of a sequence with n queries and length L is at
    position L - n + i, and sees the keys up to that position.
    """

    block_size: int
    num_queries: NDArray[np.int64]  # [num_sequences] on the host; in a CUDA graph, a step that is like the others
    num_keys: NDArray[np.int64]  # [num_sequences] on the host: the keys that the last query sees, itself included
    query_starts: Tensor  # [num_sequences + 1] int32: where a sequence's tokens begin; the last entry is num_tokens
    lengths: Tensor  # [num_sequences] int32: num_keys, on the device
    block_table: Tensor  # [num_sequences, width] int32, padded with any valid block
    slot_mapping: Tensor  # [num_tokens] int64: block * block_size + offset of each new key; negative: not stored


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer's query heads score keys."""

    scale: float  # multiplies the scores, before they are capped
    window: int | None = None  # the number of keys that a query sees, itself included; None: all of them
    softcap: float | None = None  # cap * tanh(score / cap): Gemma 2
    sinks: Tensor | None = None  # [num_heads] scores that take probability and have no value: gpt-oss
    num_heads: int | None = None  # query heads; None where no kernel needs the number


# Cosines and sines [num_tokens, rotary_dim], both halves alike, for the first rotary_dim dimensions of each head.
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of queries and keys, applied before the rotation: Qwen 3. Weights are float32."""

    query_weight: Tensor  # [head_dim], or [num_heads * head_dim] if it spans heads
    key_weight: Tensor  # [head_dim], or [num_kv_heads * head_dim]
    epsilon: float
    spans_heads: bool = False  # all heads of a token have one norm together, and not one each: OLMo 2


class AttentionBackend(Protocol):
    """One implementation of attention over pages, for one dtype and device."""

    name: str
    page_dtype: torch.dtype  # of the pages' elements
    supports_cuda_graphs: bool  # launches depend on shapes alone, so a decode step can be captured and replayed

    def block_shapes(self, layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
        """Return the shapes of one block of keys and of one block of values. Each backend defines its own layout."""

    def prepare(self, metadata: AttentionMetadata) -> Any:
        """Compute what is the same for all layers of a step; it becomes `PagedStep.prepared`."""

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Store the step's keys and values in the pages, then attend with the step's queries.

        queries: [num_tokens, num_heads, key_dim]; keys: [num_tokens, num_kv_heads, key_dim]; values:
        [num_tokens, num_kv_heads, value_dim]. Returns [num_tokens, num_heads, value_dim].
        """

    def rotate_and_attend(
        self,
        step: PagedStep,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        params: AttentionParams,
    ) -> Tensor:
        """Do the same for the output of the QKV product; queries and keys are normalised and rotated first.

        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], which may be overwritten.
        Returns [num_tokens, num_heads * head_dim].
        """


class PagedStep:
    """The context of one forward pass. It goes through transformers' layers as the keyword argument `paged`."""

    __slots__ = ("backend", "cache", "logits_indices", "metadata", "prepared")

    def __init__(
        self,
        backend: AttentionBackend,
        cache: KVCache,
        metadata: AttentionMetadata,
        logits_indices: Tensor | None = None,
    ) -> None:
        self.backend = backend
        self.cache = cache
        self.metadata = metadata
        self.logits_indices = logits_indices  # the tokens whose last hidden state is used; None: all of them
        self.prepared = backend.prepare(metadata)
