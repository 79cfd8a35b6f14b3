"""All layers of a decoder in one call of C, for steps of few tokens on a CPU.

Between two calls Python takes longer than a thread of OpenMP waits before it goes to sleep, and to wake it takes longer
than to multiply.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from workers.cpu_attention import CpuAttention
from workers.few_rows import StreamedWeight
from workers.packed_linear import Weight
from workers.paged_step import HeadNorms, PagedStep, Rotation, Score

Norm = tuple[Tensor, float]  # weight [size], epsilon


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a layer of the Llama family is made of, in the order in which it is needed."""

    attention_norm: Norm
    qkv: Weight
    head_norms: HeadNorms | None
    score: Score
    output: Weight
    mlp_norm: Norm
    gate_up: Weight
    down: Weight

    @property
    def weights(self) -> tuple[Weight, Weight, Weight, Weight]:
        return self.qkv, self.output, self.gate_up, self.down


class _Layer(ctypes.Structure):
    """As decoder_layer in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_float) for name in ("attention_epsilon", "mlp_epsilon", "head_epsilon")),
    )


class _Pages(ctypes.Structure):
    """As layer_pages in the source."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("of", "key_pages", "value_pages"))


class CpuDecoder:
    """The layers, for steps that `can_take` says yes to."""

    def __init__(self, layers: list[LayerParts]) -> None:
        streamed = [weight for each in layers for weight in each.weights if isinstance(weight, StreamedWeight)]
        self._most_tokens = streamed[0].few_rows.most if len(streamed) == 4 * len(layers) else 0
        if not self._most_tokens:
            return
        for weight, after in pairwise(streamed):
            weight.precede(after)
        self._layers = layers  # kept, for C is given addresses only
        of_layers = [tuple(streamed[i : i + 4]) for i in range(0, len(streamed), 4)]
        self._described = (_Layer * len(layers))(*map(_describe, layers, of_layers))
        self._attended_sizes = [output.num_inputs for _, output, _, _ in of_layers]
        self._room_per_token = max(map(_room, of_layers))
        self._decode = _prototyped(streamed[0].few_rows.library.decode_few_rows)

    def can_take(self, num_tokens: int, paged: PagedStep) -> bool:
        return 0 < num_tokens <= self._most_tokens and isinstance(paged.attention, CpuAttention)

    def decode(self, x: Tensor, rotation: Rotation, paged: PagedStep) -> None:
        """x [num_tokens, size] becomes what the layers make of it."""
        attention, (cosines, sines) = paged.attention, rotation
        assert isinstance(attention, CpuAttention)
        assert x.is_contiguous() and cosines.is_contiguous() and sines.is_contiguous()
        pages = (_Pages * len(self._layers))()
        for index, layer in enumerate(self._layers):
            num_heads = self._attended_sizes[index] // paged.cache.layers[index].value_dim
            pages[index] = _Pages(*attention.layer_arguments(paged.cache, index, num_heads, layer.score))
        room = x.new_empty(len(x) * self._room_per_token)
        self._decode(
            *(self._described, pages, len(self._layers)),
            *paged.prepared,
            *(tensor.data_ptr() for tensor in (cosines, sines, x, room)),
        )


def _prototyped(function: Any) -> Any:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    of_step = [number, pointer, number, pointer, pointer, pointer, number]
    function.argtypes = [pointer, pointer, number, *of_step, *([pointer] * 4)]
    function.restype = None
    return function


def _describe(layer: LayerParts, weights: tuple[StreamedWeight, ...]) -> _Layer:
    heads = layer.head_norms
    return _Layer(
        *(weight.address for weight in weights),
        *(weight.data_ptr() for weight, _ in (layer.attention_norm, layer.mlp_norm)),
        *((None, None) if heads is None else (heads.query_weight.data_ptr(), heads.key_weight.data_ptr())),
        *(epsilon for _, epsilon in (layer.attention_norm, layer.mlp_norm)),
        0.0 if heads is None else heads.epsilon,
    )


def _room(weights: tuple[StreamedWeight, ...]) -> int:
    """Scalars for each token of what is between a layer's multiplications."""
    qkv, output, gate_up, down = weights
    return qkv.num_inputs + qkv.num_outputs + output.num_inputs + gate_up.num_outputs + down.num_inputs
