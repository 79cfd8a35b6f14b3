"""Read GPTQ weights, as AutoGPTQ and GPTQModel write them.

A matrix is stored transposed, in int32 words of 32 / bits codes each, the first code in the lowest bits:

    .qweight  [num_inputs * bits / 32, num_outputs]   codes, packed along the inputs
    .qzeros   [num_groups, num_outputs * bits / 32]   zero points, packed along the outputs
    .scales   [num_groups, num_outputs]
    .g_idx    [num_inputs]                            the group of each input

W[n, k] = (code[n, k] - zero_point[n, g]) * scale[n, g], where g = g_idx[k].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from servekit.errors import ConfigError
from workers.quantization.formats.checks import FLOATS, choice, finite, quoted, refused, tensor
from workers.quantization.formats.groups import offsets_of, order_of_groups
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.quantized_tensor import QuantizedTensor, pack_nibbles, unpack_nibbles

GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)  # -1: one group for all inputs
# A word with a one in each of its codes, by bits.
_ONES = {4: 0x11111111, 8: 0x01010101}


class Gptq(WeightFormat):
    """GPTQ with 4 or 8 bits, of both versions of its zero points, with and without desc_act."""

    markers: ClassVar[frozenset[str]] = frozenset({".qweight"})
    suffixes: ClassVar[frozenset[str]] = frozenset({".qweight", ".qzeros", ".scales", ".g_idx"})

    def __init__(self, bits: int, group_size: int, *, is_v2: bool, has_desc_act: bool) -> None:
        """`group_size` is as config.json has it: -1 is one group for all inputs."""
        self.name = f"GPTQ, {bits} bits"
        self._bits, self._group_size = bits, group_size
        self._is_v2, self._has_desc_act = is_v2, has_desc_act
        self._codes_per_word = 32 // bits

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        bits = choice(config, "bits", (4, 8), None, "GPTQ")
        group_size = choice(config, "group_size", GROUP_SIZES, 128, "GPTQ")
        has_desc_act = choice(config, "desc_act", (False, True), False, "GPTQ")
        # AutoGPTQ and GPTQModel have named this field differently over time.
        key = "format" if config.get("checkpoint_format") is None else "checkpoint_format"
        version = choice(config, key, ("gptq", "gptq_v2"), "gptq", "GPTQ")
        choice(config, "pack_dtype", ("int32",), "int32", "GPTQ")
        choice(config, "is_marlin_format", (False,), False, "GPTQ")
        _check_overrides(config.get("dynamic"))
        return cls(bits, group_size, is_v2=version == "gptq_v2", has_desc_act=has_desc_act)

    def check(self, tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
        words = tensor(tensors, ".qweight", name, (torch.int32,), (None, None))
        num_inputs, num_outputs = words.shape[0] * self._codes_per_word, words.shape[1]
        if num_outputs % self._codes_per_word:
            raise refused(name, f"has {num_outputs} outputs, and {self._codes_per_word} zero points fill a word")
        group_size = num_inputs if self._group_size == -1 else self._group_size
        if num_inputs % group_size:
            raise refused(name, f"has {num_inputs} inputs, which groups of {group_size} do not divide")
        num_groups = num_inputs // group_size
        tensor(tensors, ".scales", name, FLOATS, (num_groups, num_outputs))
        tensor(tensors, ".qzeros", name, (torch.int32,), (num_groups, num_outputs // self._codes_per_word))
        if ".g_idx" in tensors:
            tensor(tensors, ".g_idx", name, (torch.int32, torch.int64), (num_inputs,))
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, Tensor], name: str) -> QuantizedTensor:
        # A word of four-bit codes is four bytes of two codes, low half first, as QuantizedTensor has them.
        codes = tensors[".qweight"].T.contiguous().view(torch.uint8)
        scales = finite(tensors[".scales"], ".scales", name)
        zero_points = self._zero_points(tensors[".qzeros"])
        middle = 1 << (self._bits - 1)
        # A symmetric checkpoint has the middle code as zero point everywhere. Then kernels need no offsets.
        is_symmetric = bool((zero_points == middle).all())
        offsets = None if is_symmetric else offsets_of(zero_points, scales, middle).T.contiguous()
        order = self._input_order(tensors.get(".g_idx"), len(scales), name)
        if order is not None:
            codes = _take_columns(codes, order) if self._bits == 4 else codes[:, order]
        if self._bits == 8:
            codes = (codes ^ middle).view(torch.int8)  # c - 128, as a signed byte
        return QuantizedTensor(codes, scales.T.contiguous(), offsets, input_order=order)

    def _zero_points(self, words: Tensor) -> Tensor:
        """Return the zero points, uint8 [num_groups, num_outputs]."""
        if not self._is_v2:
            # Version 1 stores each zero point minus one. GPTQModel subtracts and adds the ones in whole words, so a
            # zero point of 0 borrows from the next one: only the sum of whole words takes that back.
            words = words + _ONES[self._bits]
        packed = words.contiguous().view(torch.uint8)
        return unpack_nibbles(packed) if self._bits == 4 else packed

    def _input_order(self, groups: Tensor | None, num_groups: int, name: str) -> Tensor | None:
        if groups is None:
            return None
        if not self._has_desc_act and not bool(groups.any()):
            return None  # early tools wrote zeros where the groups are in order
        return order_of_groups(groups, num_groups, name)


def _check_overrides(dynamic: Any) -> None:
    """Raise ConfigError if GPTQModel's `dynamic` gives some layers other bits or groups than the rest.

    A pattern that begins with "-:" leaves layers unquantized, which their tensors show.
    """
    if not dynamic:
        return
    patterns = dynamic if isinstance(dynamic, dict) else [dynamic]
    different = [pattern for pattern in patterns if not (isinstance(pattern, str) and pattern.startswith("-:"))]
    if different:
        raise ConfigError(
            f"the weights are quantized in the format GPTQ with settings of their own for {quoted(different[0])} "
            "(dynamic), and servekit reads one setting for all layers; serve another checkpoint of the same model"
        )


def _take_columns(packed: Tensor, order: Tensor) -> Tensor:
    """Return the columns of four-bit codes in another order."""
    return pack_nibbles(unpack_nibbles(packed)[:, order])
