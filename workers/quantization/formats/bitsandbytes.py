"""Read weights that bitsandbytes has quantized: LLM.int8, NF4 and FP4.

LLM.int8 has a scale for each row, W = code * SCB / 127:

    .weight   int8 [num_outputs, num_inputs]
    .SCB      float32 [num_outputs]

NF4 and FP4 cut the numbers, row after row, into blocks of `blocksize`. Each code is one of sixteen levels between -1
and 1, and W = level * absmax of the block:

    .weight                               two codes in a byte, the first in the high half, as one column of some dtype
    .weight.absmax                        float32 [num_blocks]
    .weight.quant_map                     float32 [16], the levels
    .weight.quant_state.bitsandbytes__nf4 (or __fp4)   uint8: JSON with shape, blocksize and so on

With double quantization, `absmax` is uint8: an index into `.weight.nested_quant_map` [256], times
`.weight.nested_absmax` of its own block, plus `nested_offset` of the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec
import torch
from torch import Tensor

from workers.quantization.formats.checks import choice, finite, quoted, refused, tensor
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.quantized_tensor import NF4_LEVELS, QuantizedTensor

# One bit of sign, two of exponent, one of fraction, in bitsandbytes' own order of exponents; the largest is 1.
FP4_LEVELS = tuple(
    level / 12 for level in (0.0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)
)
_LEVELS = {"nf4": NF4_LEVELS, "fp4": FP4_LEVELS}
_STATES = {kind: f".weight.quant_state.bitsandbytes__{kind}" for kind in _LEVELS}
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# Of numbers with the same scale: with fewer, the scales would take more memory than they save.
_MIN_GROUP_SIZE = 16
_MAX_STATE_BYTES = 4096
_STORAGE_DTYPES = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32)


class _State(msgspec.Struct):
    """What the JSON says; other fields are not needed."""

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int = 0
    nested_offset: float = 0.0


class Bitsandbytes(WeightFormat):
    """LLM.int8, NF4 and FP4. The tensors of each matrix decide which of them it is."""

    markers: ClassVar[frozenset[str]] = frozenset({".SCB", *_STATES.values()})
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {
            ".weight", ".SCB", ".weight_format", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax",
            ".weight.nested_quant_map", *_STATES.values(),
        }
    )  # fmt: skip

    def __init__(self, bits: int) -> None:
        self.name = f"bitsandbytes, {bits} bits"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        is_four_bits = choice(config, "load_in_4bit", (False, True), False, "bitsandbytes")
        choice(config, "load_in_8bit", (not is_four_bits,), not is_four_bits, "bitsandbytes")
        choice(config, "llm_int8_has_fp16_weight", (False,), False, "bitsandbytes")
        return cls(4 if is_four_bits else 8)

    def check(self, tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
        kind = _kind(tensors, name)
        return _check_int8(tensors, name) if kind is None else _check_four_bits(tensors, name, kind)

    def read(self, tensors: Mapping[str, Tensor], name: str) -> QuantizedTensor:
        kind = _kind(tensors, name)
        if kind is None:
            # LLM.int8 multiplies inputs above a threshold in float16, so the checkpoint was not made for inputs of
            # eight bits.
            scales = finite(tensors[".SCB"], ".SCB", name)[:, None] / 127
            return QuantizedTensor(tensors[".weight"], scales)
        state = _state(tensors, name, kind)
        num_outputs, num_inputs = state.shape
        packed = tensors[".weight"].contiguous().view(torch.uint8).reshape(num_outputs, num_inputs // 2)
        codes = packed >> 4 | packed << 4  # QuantizedTensor has the first code in the low half
        size = math.gcd(state.blocksize, num_inputs)
        absmax = finite(_absmax(tensors, state), ".weight.absmax", name)
        # A block may end within a row. Groups of `size` end where blocks and rows do.
        scales = absmax.repeat_interleave(state.blocksize // size)[: num_outputs * num_inputs // size]
        return QuantizedTensor(codes, scales.reshape(num_outputs, -1), levels=_LEVELS[kind])


def _kind(tensors: Mapping[str, Tensor], name: str) -> str | None:
    """Return which four-bit kind it is, None for int8. Raises ConfigError if it is more than one."""
    kinds: list[str | None] = [kind for kind, suffix in _STATES.items() if suffix in tensors]
    if ".SCB" in tensors:
        kinds.append(None)
    if len(kinds) != 1:
        raise refused(name, f"has the tensors of {len(kinds)} formats of bitsandbytes, and must have those of one")
    return kinds[0]


def _check_int8(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    weight = tensor(tensors, ".weight", name, (torch.int8,), (None, None))
    num_outputs, num_inputs = weight.shape
    tensor(tensors, ".SCB", name, (torch.float32, torch.float16), (num_outputs,))
    if ".weight_format" in tensors:
        layout = tensor(tensors, ".weight_format", name, (torch.uint8,), ())
        if int(layout) != 0:
            raise refused(name, f"has weight_format {int(layout)}, and servekit reads 0, which is row by row")
    return num_outputs, num_inputs


def _check_four_bits(tensors: Mapping[str, Tensor], name: str, kind: str) -> tuple[int, int]:
    state = _state(tensors, name, kind)
    num_outputs, num_inputs = state.shape
    weight = tensor(tensors, ".weight", name, _STORAGE_DTYPES, (None, 1))
    if 2 * weight.nbytes != num_outputs * num_inputs:
        raise refused(name, f"has {2 * weight.nbytes} codes for the shape {quoted(list(state.shape))}")
    if num_inputs % 2 or math.gcd(state.blocksize, num_inputs) < _MIN_GROUP_SIZE:
        raise refused(
            name,
            f"has {num_inputs} inputs and blocks of {state.blocksize}, so only {math.gcd(state.blocksize, num_inputs)} "
            f"have the same scale, and the limit is {_MIN_GROUP_SIZE}",
        )
    num_blocks = -(-num_outputs * num_inputs // state.blocksize)
    if ".weight.nested_absmax" in tensors:
        tensor(tensors, ".weight.absmax", name, (torch.uint8,), (num_blocks,))
        if state.nested_blocksize not in _BLOCK_SIZES:
            raise refused(
                name, f"has nested_blocksize {quoted(state.nested_blocksize)}, which is none of {_BLOCK_SIZES}"
            )
        num_nested = -(-num_blocks // state.nested_blocksize)
        tensor(tensors, ".weight.nested_absmax", name, (torch.float32,), (num_nested,))
        tensor(tensors, ".weight.nested_quant_map", name, (torch.float32,), (256,))
    else:
        tensor(tensors, ".weight.absmax", name, (torch.float32,), (num_blocks,))
    levels = tensor(tensors, ".weight.quant_map", name, (torch.float32,), (16,))
    # The levels are known by name, and kernels are made for them.
    if not bool((levels - torch.tensor(_LEVELS[kind])).abs().le(1e-4).all()):
        raise refused(name, f"has a quant_map that is not the one of {kind}")
    return num_outputs, num_inputs


def _state(tensors: Mapping[str, Tensor], name: str, kind: str) -> _State:
    encoded = tensor(tensors, _STATES[kind], name, (torch.uint8,), (None,))
    if len(encoded) > _MAX_STATE_BYTES:
        raise refused(name, f"has a quant_state of {len(encoded)} bytes, and the limit is {_MAX_STATE_BYTES}")
    try:
        state = msgspec.json.decode(bytes(encoded.tolist()), type=_State)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused(name, f"has a quant_state that cannot be read: {quoted(str(error))}") from None
    if state.blocksize not in _BLOCK_SIZES or min(state.shape) < 1:
        described = f"blocksize {quoted(state.blocksize)} and shape {quoted(list(state.shape))}"
        raise refused(name, f"has a quant_state with {described}")
    return state


def _absmax(tensors: Mapping[str, Tensor], state: _State) -> Tensor:
    """Return the scale of each block, float32 [num_blocks]."""
    absmax = tensors[".weight.absmax"]
    if ".weight.nested_absmax" not in tensors:
        return absmax
    of_blocks = tensors[".weight.nested_absmax"].repeat_interleave(state.nested_blocksize)[: len(absmax)]
    return tensors[".weight.nested_quant_map"][absmax.long()] * of_blocks + state.nested_offset
