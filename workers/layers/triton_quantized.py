"""Products with quantized weights on a GPU: Triton for the few rows of a decode step, torch's own products for prompts.

For few rows, reading the weight takes nearly all the time. So the kernel reads the codes, makes numbers of them in
registers, and multiplies those by x with the tensor cores. Codes are small integers or eight-bit floats, which bfloat16
and float16 hold exactly. Scales are applied to sums, in float32, because a step of the loop lies within one group. So
the error is that of the levels of four-bit codes, which are rounded once, if they are not integers.

For many rows, computing takes the time. Weights made for eight-bit activations are multiplied as such, with x rounded
for each token: torch has both products. Others are dequantized, a weight at a time, and multiplied as dense weights.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# Kernels are in Triton's language, for which mypy has no types.

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from workers.attention.triton_kernels import dot_dtype_of
from workers.device.triton_support import raise_device_failure
from workers.layers.linear import DenseWeight, Weight
from workers.layers.quantized_linear import DequantizingWeight
from workers.quantization.quantized_tensor import INT4_LEVELS, QuantizedTensor, pack_nibbles, unpack_nibbles
from workers.quantization.two_level_scales import TwoLevelScales

log = logging.getLogger("servekit.worker")

MAX_ROWS = 64  # of the kernel; from here on, the tensor cores' time counts, not the memory's
BLOCK_OUTPUTS = 64
MIN_PROGRAMS = 256  # inputs are split until there are so many programs: two for each multiprocessor of an H100
MAX_SPLITS = 8
MAX_INT8, MAX_FLOAT8 = 127.0, 448.0
TILE_SIZE = 1024  # numbers that a program adds up

# How codes become numbers. The first two have four bits: an INTEGER code is its level + 8, a TABLE code is looked up.
INTEGER, TABLE, INT8, FLOAT8 = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def _add_product(
    sums, x, inputs, in_rows, x_stride, weights, scales, offsets, group, outputs, in_outputs, num_outputs,
    dot_dtype: tl.constexpr,
):  # fmt: skip
    """Add x W' for the columns `inputs` [step], which belong to one group; weights: [step, block_outputs]."""
    row = tl.arange(0, sums.shape[0])
    tile = tl.load(x + row[:, None] * x_stride + inputs[None, :], mask=in_rows[:, None], other=0.0).to(dot_dtype)
    product = tl.dot(tile, weights.to(dot_dtype), input_precision="ieee")
    scale = tl.load(scales + group * num_outputs + outputs, mask=in_outputs, other=0.0).to(tl.float32)
    sums += product * scale[None, :]
    if offsets is not None:
        offset = tl.load(offsets + group * num_outputs + outputs, mask=in_outputs, other=0.0).to(tl.float32)
        sums += tl.sum(tile.to(tl.float32), axis=1)[:, None] * offset[None, :]
    return sums


@triton.jit
def _numbers(codes, levels, kind: tl.constexpr):
    """Return the values of codes, before scales. Those of float8 are 256 times too small; `scales` has the factor."""
    if kind == INTEGER:
        return codes.to(tl.float32) - 8.0
    if kind == TABLE:
        return tl.load(levels + codes.to(tl.int32))
    if kind == INT8:
        return codes.to(tl.float32)
    # The bits of e4m3 within those of float16, whose exponent has a bias of 15 in place of 7.
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])  # or a step of one row, or of 16, would compile another kernel
def _multiply_kernel(
    x, codes, scales, offsets, levels, bias, residual, output, x_stride, num_rows, num_outputs,
    num_inputs: tl.constexpr, group_size: tl.constexpr, kind: tl.constexpr, step: tl.constexpr,
    steps_per_split: tl.constexpr, has_splits: tl.constexpr, block_rows: tl.constexpr, block_outputs: tl.constexpr,
    dot_dtype: tl.constexpr,
):  # fmt: skip
    """Multiply all rows by a block of outputs, over one part of the inputs.

    Without splits, `output` [num_rows, num_outputs] gets the result. Otherwise it is float32 [num_splits, num_rows,
    num_outputs] and gets the sums of each part.
    """
    is_four_bit: tl.constexpr = kind < INT8
    columns_per_step: tl.constexpr = 2 * step if is_four_bit else step
    num_steps: tl.constexpr = num_inputs // columns_per_step
    row = tl.arange(0, block_rows)
    in_rows = row < num_rows
    outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    in_outputs = outputs < num_outputs
    split = tl.program_id(1)
    at = tl.arange(0, step)
    row_bytes: tl.constexpr = num_inputs // 2 if is_four_bit else num_inputs
    pointers = codes + outputs.to(tl.int64)[None, :] * row_bytes + at[:, None]
    sums = tl.zeros((block_rows, block_outputs), tl.float32)
    for i in range(split * steps_per_split, min((split + 1) * steps_per_split, num_steps)):
        loaded = tl.load(pointers + i * step, mask=in_outputs[None, :], other=0)
        first = i * columns_per_step
        if is_four_bit:
            low, high = _numbers(loaded & 0xF, levels, kind), _numbers(loaded >> 4, levels, kind)
            sums = _add_product(
                sums, x, first + at, in_rows, x_stride, low, scales, offsets, first // group_size, outputs,
                in_outputs, num_outputs, dot_dtype,
            )  # fmt: skip
            second = first + step
            sums = _add_product(
                sums, x, second + at, in_rows, x_stride, high, scales, offsets, second // group_size, outputs,
                in_outputs, num_outputs, dot_dtype,
            )  # fmt: skip
        else:
            sums = _add_product(
                sums, x, first + at, in_rows, x_stride, _numbers(loaded, levels, kind), scales, offsets,
                first // group_size, outputs, in_outputs, num_outputs, dot_dtype,
            )  # fmt: skip
    inside = in_rows[:, None] & in_outputs[None, :]
    if has_splits:
        places = (split * num_rows + row[:, None]) * num_outputs + outputs[None, :]
        tl.store(output + places, sums, mask=inside)
    else:
        places = row[:, None] * num_outputs + outputs[None, :]
        if bias is not None:
            sums += tl.load(bias + outputs, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
        if residual is not None:
            sums += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(output + places, sums.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _add_splits_kernel(
    partial, bias, residual, output, num_numbers, num_outputs, num_splits: tl.constexpr, tile_size: tl.constexpr
):  # fmt: skip
    """Add the sums of all parts, the bias and the residual, in this order, and round once."""
    places = tl.program_id(0) * tile_size + tl.arange(0, tile_size)
    inside = places < num_numbers
    sums = tl.zeros((tile_size,), tl.float32)
    for split in tl.static_range(num_splits):
        sums += tl.load(partial + split * num_numbers + places, mask=inside, other=0.0)
    if bias is not None:
        sums += tl.load(bias + places % num_outputs, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        sums += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + places, sums.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(
    codes, scales, offsets, levels, output, num_outputs, num_inputs: tl.constexpr, group_size: tl.constexpr,
    kind: tl.constexpr, step: tl.constexpr, block_outputs: tl.constexpr,
):  # fmt: skip
    """Write the numbers of a block of outputs and one step of inputs; output: [num_outputs, num_inputs]."""
    is_four_bit: tl.constexpr = kind < INT8
    outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    in_outputs = outputs < num_outputs
    at = tl.program_id(1) * step + tl.arange(0, step)
    row_bytes: tl.constexpr = num_inputs // 2 if is_four_bit else num_inputs
    rows = outputs.to(tl.int64)[:, None]
    loaded = tl.load(codes + rows * row_bytes + at[None, :], mask=in_outputs[:, None], other=0)
    for half in tl.static_range(2 if is_four_bit else 1):
        first = (2 * tl.program_id(1) + half) * step if is_four_bit else tl.program_id(1) * step
        part = loaded
        if is_four_bit:
            part = (loaded >> (4 * half)) & 0xF
        cells = (first // group_size) * num_outputs + outputs
        numbers = _numbers(part, levels, kind)
        numbers *= tl.load(scales + cells, mask=in_outputs, other=0.0).to(tl.float32)[:, None]
        if offsets is not None:
            numbers += tl.load(offsets + cells, mask=in_outputs, other=0.0).to(tl.float32)[:, None]
        places = rows * num_inputs + first + tl.arange(0, step)[None, :]
        tl.store(output + places, numbers.to(output.dtype.element_ty), mask=in_outputs[:, None])


class TritonQuantizedWeight:
    """A quantized weight on a GPU, in the layout of the kernels.

    Codes of four bits are shuffled: a byte holds the codes of two columns that are `step` columns apart, so that the
    columns of x which belong to the low halves of a row of bytes are neighbours. Scales and offsets are transposed.
    """

    def __init__(self, matrix: QuantizedTensor, bias: Tensor | None, step: int) -> None:
        """`step` is from `step_of`; `matrix` has plain scales."""
        self._bias, self._step = bias, step
        self._num_outputs, self._num_inputs, self._group_size = matrix.num_outputs, matrix.num_inputs, matrix.group_size
        self._input_order = matrix.input_order
        self._levels = None
        self._codes, scales, offsets = matrix.codes, matrix.scales, matrix.offsets
        assert isinstance(scales, Tensor) and not isinstance(offsets, TwoLevelScales)
        match matrix.encoding:
            case "int4":
                self._codes, self._kind = _shuffle(matrix.codes, step), INTEGER.value
                if matrix.levels != INT4_LEVELS:
                    self._kind = TABLE.value
                    self._levels = torch.tensor(matrix.levels, dtype=torch.float32, device=matrix.codes.device)
            case "int8":
                self._kind = INT8.value
            case "float8":
                self._codes, self._kind = matrix.codes.view(torch.uint8), FLOAT8.value
                scales = scales.float() * 256.0  # see _numbers
        self._scales = scales.T.contiguous()  # [num_groups, num_outputs]
        self._offsets = None if offsets is None else offsets.T.contiguous()
        self._num_steps = self._codes.shape[1] // step
        self._num_splits = _num_splits(self._num_outputs, self._num_steps)
        self._multiply_many = _product_of_eight_bits(matrix) or self._multiply_dequantized

    def multiply(self, x: Tensor) -> Tensor:
        return self._multiply(x, None)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._multiply(x, residual)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [num_outputs, num_inputs] as numbers, its columns in the order of the codes."""
        output = torch.empty(self._num_outputs, self._num_inputs, dtype=dtype, device=self._codes.device)
        _dequantize_kernel[(triton.cdiv(self._num_outputs, BLOCK_OUTPUTS), self._num_steps)](
            self._codes,
            self._scales,
            self._offsets,
            self._levels,
            output,
            self._num_outputs,
            self._num_inputs,
            self._group_size,
            self._kind,
            self._step,
            BLOCK_OUTPUTS,
            num_warps=4,
        )
        return output

    def _multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        shape = (*x.shape[:-1], self._num_outputs)
        x = x.reshape(-1, self._num_inputs)
        if self._input_order is not None:
            x = x[:, self._input_order]
        if residual is not None:
            residual = residual.reshape(-1, self._num_outputs)
        if len(x) <= MAX_ROWS:
            return self._multiply_few(x, residual).view(shape)
        product = self._multiply_many(x)
        if self._bias is not None:
            product += self._bias
        if residual is not None:
            product += residual
        return product.view(shape)

    def _multiply_dequantized(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype))

    def _multiply_few(self, x: Tensor, residual: Tensor | None) -> Tensor:
        assert x.stride(1) == 1 and (residual is None or residual.is_contiguous())
        num_rows, num_splits = len(x), self._num_splits
        output = x.new_empty(num_rows, self._num_outputs)
        if num_rows == 0:
            return output
        sums = output
        if num_splits > 1:
            sums = torch.empty(num_splits, num_rows, self._num_outputs, dtype=torch.float32, device=x.device)
        _multiply_kernel[(triton.cdiv(self._num_outputs, BLOCK_OUTPUTS), num_splits)](
            x,
            self._codes,
            self._scales,
            self._offsets,
            self._levels,
            self._bias,
            residual,
            sums,
            x.stride(0),
            num_rows,
            self._num_outputs,
            self._num_inputs,
            self._group_size,
            self._kind,
            self._step,
            triton.cdiv(self._num_steps, num_splits),
            num_splits > 1,
            max(16, triton.next_power_of_2(num_rows)),
            BLOCK_OUTPUTS,
            dot_dtype_of(x.dtype),
            num_warps=4,
        )
        if num_splits > 1:
            _add_splits_kernel[(triton.cdiv(output.numel(), TILE_SIZE),)](
                sums, self._bias, residual, output, output.numel(), self._num_outputs, num_splits, TILE_SIZE
            )
        return output


def step_of(matrix: QuantizedTensor) -> int | None:
    """Return how many bytes of a row the kernels take at a time; None for a shape that they do not take.

    Each step, or each half of one for codes of four bits, must lie within one group.
    """
    columns_per_byte = 2 if matrix.encoding == "int4" else 1
    for step in (64, 32, 16):
        if matrix.group_size % step == 0 and matrix.num_inputs % (columns_per_byte * step) == 0:
            return step
    return None


def make_weight(matrix: Tensor | QuantizedTensor, bias: Tensor | None) -> Weight:
    """Prepare a weight for a GPU with Triton: a LinearMethod."""
    if isinstance(matrix, Tensor):
        return DenseWeight(matrix, bias)
    matrix = matrix.with_plain_scales()
    step = step_of(matrix)
    return DequantizingWeight(matrix, bias) if step is None else TritonQuantizedWeight(matrix, bias, step)


def _num_splits(num_outputs: int, num_steps: int) -> int:
    """Return how many parts of the inputs are multiplied side by side. It does not depend on the number of rows.

    So a row's result does not change with the other rows of the step, as long as the kernel multiplies them.
    """
    num_blocks = -(-num_outputs // BLOCK_OUTPUTS)
    return max(1, min(MAX_SPLITS, num_steps // 4, MIN_PROGRAMS // num_blocks))


def _product_of_eight_bits(matrix: QuantizedTensor) -> Callable[[Tensor], Tensor] | None:
    """Return the product for prompts of a weight made for eight-bit activations; None if torch has none for it."""
    has_row_scales = matrix.group_size == matrix.num_inputs and matrix.offsets is None
    is_aligned = matrix.num_inputs % 16 == 0 and matrix.num_outputs % 16 == 0
    if not has_row_scales or not is_aligned or matrix.encoding != matrix.activations:
        return None
    kind = Int8Product if matrix.encoding == "int8" else Float8Product
    return kind(matrix) if _has_product(kind, matrix.codes.device) else None


class _TorchProduct(Protocol):
    """A product of torch with x rounded to eight bits for each token."""

    def __init__(self, matrix: QuantizedTensor) -> None: ...
    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [num_rows, num_inputs]."""


@cache
def _has_product(kind: type[_TorchProduct], device: torch.device) -> bool:
    """Return whether torch has a product on this device; the log says why not.

    It is tried, because that depends on the GPU, on CUDA and on torch's build. Only prompts of more than MAX_ROWS
    tokens use it, so a product that fails would fail while people wait.
    """
    dtype, activations = (torch.int8, "int8") if kind is Int8Product else (torch.float8_e4m3fn, "float8")
    codes = torch.zeros(32, 32, device=device).to(dtype)
    matrix = QuantizedTensor(codes, torch.ones(32, 1, device=device), activations=activations)  # type: ignore[arg-type]
    try:
        kind(matrix)(torch.ones(MAX_ROWS + 1, 32, dtype=torch.bfloat16, device=device))
    except RuntimeError as error:
        raise_device_failure(error)
        log.warning(
            "prompts are slow: torch has no product of %s on this device, so each product dequantizes its weight: %s",
            activations,
            str(error).partition("\n")[0],
        )
        return False
    return True


class Int8Product:
    """x W' with x rounded to int8 for each token, and sums in int32."""

    def __init__(self, matrix: QuantizedTensor) -> None:
        self._transposed, self._scales = matrix.codes.T, matrix.scales.float().T  # scales: [1, num_outputs]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [num_rows, num_inputs]; torch's product takes more than 16 rows."""
        wide = x.float()
        scales = wide.abs().amax(dim=1, keepdim=True).div(MAX_INT8).clamp(min=1e-30)
        codes = (wide / scales).round().to(torch.int8)
        return torch._int_mm(codes, self._transposed).mul(scales * self._scales).to(x.dtype)


class Float8Product:
    """x W' with x rounded to float8 for each token."""

    def __init__(self, matrix: QuantizedTensor) -> None:
        self._transposed, self._scales = matrix.codes.T, matrix.scales.float().T.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [num_rows, num_inputs]."""
        wide = x.float()
        scales = wide.abs().amax(dim=1, keepdim=True).div(MAX_FLOAT8).clamp(min=1e-30)
        codes = (wide / scales).to(torch.float8_e4m3fn)
        # bfloat16 for every dtype of x: with a scale for each row, most GPUs have no other result. float8 rounds x by
        # eight times as much.
        product: Tensor = torch._scaled_mm(codes, self._transposed, scales, self._scales, out_dtype=torch.bfloat16)
        return product.to(x.dtype)


def _shuffle(packed: Tensor, step: int) -> Tensor:
    """Return codes of four bits, packed with neighbours in a byte, with codes `step` columns apart in a byte."""
    halves = unpack_nibbles(packed).unflatten(1, (-1, 2, step))
    return pack_nibbles(halves.transpose(2, 3).flatten(1)).contiguous()
