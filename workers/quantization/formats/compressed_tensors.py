"""The format of llm-compressor: integers of four or eight bits, packed or not, and float8.

`config_groups` of config.json says for groups of modules how their weights were rounded. Their tensors are
`weight_packed` (codes side by side in int32) or `weight` (int8 or float8), `weight_scale` and `weight_zero_point`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import regex  # type: ignore[import-untyped]
import torch
from torch import Tensor

from servekit.errors import ConfigError
from workers.quantization.formats.checks import FLOATS, choice, finite, quoted, refused, tensor
from workers.quantization.formats.groups import offsets_of, order_of_groups, repeat_blocks
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.quantized_tensor import Activations, QuantizedTensor, pack_nibbles, unpack_nibbles

NAME = "compressed-tensors"
LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
STRATEGIES = ("tensor", "channel", "group", "block")
MAX_GROUPS = 1000  # of config_groups, and of targets in each; a model has far fewer kinds of modules
MAX_PATTERN_CHARACTERS = 1000
MATCHING_TIMEOUT_S = 1.0  # for all patterns and names: a hostile pattern may take hours

assert sys.byteorder == "little", "codes are viewed as bytes where they lie in int32"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of one group of modules were rounded."""

    targets: tuple[str, ...]  # names of modules, patterns after `re:`, and names of classes
    num_bits: int
    is_float: bool
    is_symmetric: bool
    strategy: str
    group_size: int  # of the strategy group
    block_shape: tuple[int, int]  # of the strategy block
    activations: Activations

    def __str__(self) -> str:
        bits = "FP8" if self.is_float else f"W{self.num_bits}A{16 if self.activations == 'float' else 8}"
        return f"{bits}, groups of {self.group_size}" if self.strategy == "group" else f"{bits} by {self.strategy}"

    def scales_shape(self, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        match self.strategy:
            case "tensor":
                return 1, 1
            case "channel":
                return num_outputs, 1
            case "group":
                return num_outputs, num_inputs // self.group_size
        rows, columns = self.block_shape
        return math.ceil(num_outputs / rows), math.ceil(num_inputs / columns)


class CompressedTensors(WeightFormat):
    """compressed-tensors: W4A16, W8A16, W8A8, W4A8 and FP8."""

    markers: ClassVar[frozenset[str]] = frozenset({".weight_scale"})
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {".weight", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"}
    )

    def __init__(self, schemes: list[Scheme]) -> None:
        self._schemes = schemes
        self._deadline_s: float | None = None  # of matching patterns
        self.name = f"{NAME} ({'; '.join(sorted({str(scheme) for scheme in schemes})[:3])})"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        choice(config, "format", LAYOUTS, "naive-quantized", NAME)
        sparsity = config.get("sparsity_config")
        if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"):
            raise _not_read("sparsity_config", sparsity)
        if config.get("transform_config"):
            raise _not_read("transform_config", config["transform_config"])
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not 0 < len(groups) <= MAX_GROUPS:
            raise _not_read("config_groups", groups)
        return cls([_scheme(group) for group in groups.values()])

    def check(self, tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
        scheme = self._scheme_of(name)
        num_outputs, num_inputs = _shape(tensors, scheme, name)
        if scheme.num_bits == 4 and num_inputs % 2:
            raise refused(name, f"has {num_inputs} inputs, which two codes in a byte cannot be")
        if scheme.strategy == "group" and num_inputs % scheme.group_size:
            raise refused(name, f"has {num_inputs} inputs, which are not whole groups of {scheme.group_size}")
        scales_shape = scheme.scales_shape(num_outputs, num_inputs)
        _check_scales(tensors, ".weight_scale", name, FLOATS, scales_shape)
        if not scheme.is_symmetric:
            zero_points = tensors.get(".weight_zero_point")
            if zero_points is not None and zero_points.dtype is torch.int32:
                packed_rows = math.ceil(num_outputs * scheme.num_bits / 32)
                tensor(tensors, ".weight_zero_point", name, (torch.int32,), (packed_rows, scales_shape[1]))
            else:
                _check_scales(tensors, ".weight_zero_point", name, (torch.int8,), scales_shape)
        if ".weight_g_idx" in tensors:
            tensor(tensors, ".weight_g_idx", name, (torch.int32, torch.int64), (num_inputs,))
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, Tensor], name: str) -> QuantizedTensor:
        scheme = self._scheme_of(name)
        num_outputs, num_inputs = _shape(tensors, scheme, name)
        scales_shape = scheme.scales_shape(num_outputs, num_inputs)
        scales = finite(tensors[".weight_scale"], ".weight_scale", name).reshape(scales_shape)
        if scheme.strategy == "block":
            scales = repeat_blocks(scales, scheme.block_shape, num_outputs, num_inputs)
        scales = scales.expand(num_outputs, -1).contiguous()
        offsets = None
        if not scheme.is_symmetric:
            zero_points = _zero_points(tensors[".weight_zero_point"], scheme.num_bits, num_outputs)
            if zero_points.numel() == math.prod(scales_shape):  # one scale for all rows
                zero_points = zero_points.reshape(scales_shape)
            offsets = offsets_of(zero_points, scales, middle=0)
        order = None
        if scheme.strategy == "group" and ".weight_g_idx" in tensors:
            groups = tensors[".weight_g_idx"]
            if not bool((groups == -1).all()):  # which stands for the columns' own order
                order = order_of_groups(groups, scales.shape[1], name)
        codes = _codes(tensors, scheme, (num_outputs, num_inputs), order, name)
        return QuantizedTensor(codes, scales, offsets, input_order=order, activations=scheme.activations)

    def _scheme_of(self, name: str) -> Scheme:
        """Return the scheme of a module, by name, by pattern, or by its class, in this order."""
        if len(self._schemes) == 1:
            return self._schemes[0]
        for matches in (self._names, self._matches, self._is_class):
            for scheme in self._schemes:
                if any(matches(target, name) for target in scheme.targets):
                    return scheme
        raise refused(name, "is quantized, and no group in config_groups of config.json targets it")

    def _names(self, target: str, name: str) -> bool:
        return target == name

    def _is_class(self, target: str, _: str) -> bool:
        return target == "Linear"

    def _matches(self, target: str, name: str) -> bool:
        if not target.startswith("re:"):
            return False
        now_s = time.monotonic()
        if self._deadline_s is None:
            self._deadline_s = now_s + MATCHING_TIMEOUT_S
        try:
            return regex.match(target[3:], name, timeout=max(self._deadline_s - now_s, 0.001)) is not None
        except (TimeoutError, regex.error, RecursionError):
            raise _not_read("targets", target) from None


def _not_read(key: str, value: Any) -> ConfigError:
    return ConfigError(
        f"the weights are quantized in the format {NAME} with {key} = {quoted(value)}, which servekit does not read; "
        "serve another checkpoint of the same model"
    )


def _scheme(group: Any) -> Scheme:
    """Return a scheme of `config_groups`. Raises ConfigError for one that is not read."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _not_read("config_groups", group)
    targets = group.get("targets")
    is_list = isinstance(targets, list) and len(targets) <= MAX_GROUPS
    if not is_list or not all(isinstance(target, str) and len(target) <= MAX_PATTERN_CHARACTERS for target in targets):
        raise _not_read("targets", targets)
    choice(group, "format", LAYOUTS, "naive-quantized", NAME)
    is_float = choice(weights, "type", ("int", "float"), "int", NAME) == "float"
    num_bits = choice(weights, "num_bits", (8,) if is_float else (4, 8), 8, NAME)
    strategies = ("tensor", "channel", "block") if is_float else ("tensor", "channel", "group")
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = choice(weights, "strategy", strategies, default, NAME)
    if strategy == "group" and not (type(size) is int and 0 < size < 2**20):
        raise _not_read("group_size", size)
    block = weights.get("block_structure")
    if isinstance(block, str) and len(block) < 30 and block.count("x") == 1 and block.replace("x", "").isdecimal():
        block = [int(size) for size in block.split("x")]  # as older versions wrote it
    is_block = isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**20 for n in block)
    if strategy == "block" and not is_block:
        raise _not_read("block_structure", block)
    return Scheme(
        targets=tuple(targets),
        num_bits=num_bits,
        is_float=is_float,
        is_symmetric=choice(weights, "symmetric", (True,) if is_float else (True, False), True, NAME),
        strategy=strategy,
        group_size=int(size or 0),
        block_shape=(block[0], block[1]) if block and strategy == "block" else (0, 0),
        activations=_activations(group.get("input_activations")),
    )


def _activations(inputs: Any) -> Activations:
    """Return the number format of a layer's inputs.

    Scales that were measured in advance (static) are not read: servekit measures each token's own, which is as exact.
    """
    if inputs is None:
        return "float"
    if not isinstance(inputs, dict):
        raise _not_read("input_activations", inputs)
    if choice(inputs, "num_bits", (8, 16), 8, NAME) == 16:
        return "float"
    return "float8" if choice(inputs, "type", ("int", "float"), "int", NAME) == "float" else "int8"


def _shape(tensors: Mapping[str, Tensor], scheme: Scheme, name: str) -> tuple[int, int]:
    """Return the matrix's [num_outputs, num_inputs]. Raises ConfigError unless its codes are there."""
    if ".weight_packed" not in tensors:
        dtype = torch.float8_e4m3fn if scheme.is_float else torch.int8
        num_outputs, num_inputs = tensor(tensors, ".weight", name, (dtype,), (None, None)).shape
        return num_outputs, num_inputs
    if scheme.is_float:
        raise refused(name, "has packed codes (weight_packed), and config.json says that they are float")
    num_outputs, num_words = tensor(tensors, ".weight_packed", name, (torch.int32,), (None, None)).shape
    shape = tensor(tensors, ".weight_shape", name, (torch.int64, torch.int32), (2,)).tolist()
    if shape[0] != num_outputs or math.ceil(shape[1] * scheme.num_bits / 32) != num_words or shape[1] < 1:
        raise refused(
            name, f"has weight_shape = {shape} for {num_words} words of {32 // scheme.num_bits} codes in a row"
        )
    return num_outputs, shape[1]


def _check_scales(
    tensors: Mapping[str, Tensor], suffix: str, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int]
) -> None:
    """Check a tensor with a number for each scale. Where a row has one, the axis of groups may be missing."""
    found = tensors.get(suffix)
    if found is not None and shape[1] == 1 and found.shape in (shape[:1], ()) and found.numel() == shape[0]:
        tensor(tensors, suffix, name, dtypes, tuple(found.shape))
    else:
        tensor(tensors, suffix, name, dtypes, shape)


def _zero_points(packed: Tensor, num_bits: int, num_outputs: int) -> Tensor:
    """Return zero points as int8; where they are packed, rows lie side by side in the bits of an int32."""
    if packed.dtype is torch.int8:
        return packed
    return _unpack(packed.T.contiguous(), num_bits)[:, :num_outputs].T


def _unpack(packed: Tensor, num_bits: int) -> Tensor:
    """Return the codes of int32 words, signed, int8 [num_rows, num_words * 32 / num_bits]."""
    octets = packed.contiguous().view(torch.uint8)
    if num_bits == 8:
        return (octets ^ 0x80).view(torch.int8)
    return unpack_nibbles(octets).view(torch.int8) - 8


def _codes(
    tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], order: Tensor | None, name: str
) -> Tensor:
    """Return the codes as a QuantizedTensor has them."""
    packed = tensors.get(".weight_packed")
    if packed is not None and scheme.num_bits == 4 and order is None:
        return packed.contiguous().view(torch.uint8)[:, : shape[1] // 2].contiguous()  # packed as by pack_nibbles
    codes = tensors[".weight"] if packed is None else _unpack(packed, scheme.num_bits)[:, : shape[1]]
    if scheme.num_bits == 4 and packed is None and (int(codes.min()) < -8 or int(codes.max()) > 7):
        raise refused(name, f"has codes from {int(codes.min())} to {int(codes.max())}, and four bits are -8 to 7")
    if order is not None:
        codes = codes[:, order]
    return pack_nibbles((codes + 8).view(torch.uint8)) if scheme.num_bits == 4 else codes.contiguous()
