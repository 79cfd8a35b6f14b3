"""Products with quantized weights by Triton agree with the dequantized weight in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.support.triton_device import DEVICE, random, triton_quantized
from workers.quantization.quantized_tensor import INT4_LEVELS, QuantizedTensor

NF4_LEVELS = (-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0)

pytestmark = pytest.mark.usefixtures("triton_kernels_run")


def matrix_of(
    encoding: str,
    num_outputs: int = 80,
    num_inputs: int = 256,
    group_size: int = 64,
    has_offsets: bool = False,
    levels: tuple[float, ...] = INT4_LEVELS,
) -> QuantizedTensor:
    """Return a random matrix."""
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 256, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8)
    if encoding == "int4":
        codes = codes[:, : num_inputs // 2].contiguous()
    elif encoding == "int8":
        codes = codes.view(torch.int8)
    else:
        codes = torch.where(codes & 0x7F == 0x7F, codes & 0x80, codes).view(torch.float8_e4m3fn)  # no NaN
    scales = torch.rand(num_outputs, num_inputs // group_size, generator=generator) / 100 + 0.001
    offsets = torch.randn(scales.shape, generator=generator) / 100 if has_offsets else None
    return QuantizedTensor(codes, scales, offsets, levels).to(DEVICE)


def assert_product(output: Tensor, x: Tensor, matrix: QuantizedTensor, *added: Tensor, tolerance: float) -> None:
    expected = x.double() @ matrix.dequantize().double().T
    for each in added:
        expected = expected + each.double()
    assert output.dtype is x.dtype and output.shape == expected.shape
    assert (output.double() - expected).norm() <= tolerance * expected.norm()


CASES = [
    *itertools.product(["int4", "int8", "float8"], [64, 128, 256], [False]),
    ("int4", 32, True),
    ("int4", 64, True),
    ("int8", 16, True),
    ("int8", 32, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("encoding", "group_size", "has_offsets"), CASES)
def test_the_product_is_that_of_the_dequantized_weight(
    dtype: torch.dtype, encoding: str, group_size: int, has_offsets: bool
) -> None:
    matrix = matrix_of(encoding, group_size=group_size, has_offsets=has_offsets)
    x, bias = random(3, 256, dtype=dtype), random(80, dtype=dtype)
    weight = triton_quantized.make_weight(matrix, bias)
    assert isinstance(weight, triton_quantized.TritonQuantizedWeight)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-3}[dtype]
    assert_product(weight.multiply(x), x, matrix, bias, tolerance=tolerance)
    residual = random(3, 80, dtype=dtype)
    assert_product(weight.multiply_add(x, residual), x, matrix, bias, residual, tolerance=tolerance)


def test_levels_of_a_format_are_looked_up() -> None:
    matrix = matrix_of("int4", levels=NF4_LEVELS)
    x = random(5, 256, dtype=torch.float32)
    assert_product(triton_quantized.make_weight(matrix, None).multiply(x), x, matrix, tolerance=1e-5)


@pytest.mark.parametrize("num_rows", [0, 1, 16, 17, 64, 65])
def test_any_number_of_rows_is_multiplied(num_rows: int) -> None:
    matrix = matrix_of("int4", num_outputs=33, has_offsets=True)
    x = random(num_rows, 256, dtype=torch.float32)
    assert_product(triton_quantized.make_weight(matrix, None).multiply(x), x, matrix, tolerance=1e-5)


def test_columns_in_another_order_are_multiplied_by_their_own_inputs() -> None:
    matrix = matrix_of("int4")
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ordered = QuantizedTensor(matrix.codes, matrix.scales, input_order=order)
    for num_rows in (2, 70):
        x = random(num_rows, 256, dtype=torch.float32)
        assert_product(triton_quantized.make_weight(ordered, None).multiply(x), x, ordered, tolerance=1e-5)


def test_inputs_in_several_parts_give_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = matrix_of("int8", num_inputs=1024)
    x, bias = random(3, 1024, dtype=torch.float32), random(80, dtype=torch.float32)
    for min_programs in (1, 256):
        monkeypatch.setattr(triton_quantized, "MIN_PROGRAMS", min_programs)
        weight = triton_quantized.make_weight(matrix, bias)
        assert weight._num_splits == (1 if min_programs == 1 else 4)
        assert_product(weight.multiply(x), x, matrix, bias, tolerance=1e-5)


def test_weights_made_for_int8_activations_multiply_prompts_as_int8() -> None:
    matrix = matrix_of("int8", num_outputs=96, group_size=256)
    made_for = QuantizedTensor(matrix.codes, matrix.scales, activations="int8")
    x = random(100, 256, dtype=torch.float32)
    weight = triton_quantized.make_weight(made_for, None)
    assert isinstance(weight._multiply_many, triton_quantized.Int8Product)
    assert_product(weight.multiply(x), x, matrix, tolerance=0.01)


def test_a_shape_that_the_kernel_does_not_take_is_multiplied_all_the_same() -> None:
    matrix = matrix_of("int4", num_inputs=40, group_size=20)
    x = random(3, 40, dtype=torch.float32)
    assert_product(triton_quantized.make_weight(matrix, None).multiply(x), x, matrix, tolerance=1e-5)


def test_where_torch_has_no_product_of_eight_bits_prompts_are_dequantized_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("only for compute capability 9.0\nand more")

    matrix = matrix_of("int8", num_outputs=96, group_size=256)
    made_for = QuantizedTensor(matrix.codes, matrix.scales, activations="int8")
    x = random(100, 256, dtype=torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_int_mm", refuse)
        triton_quantized._has_product.cache_clear()
        weight, _ = (triton_quantized.make_weight(made_for, None) for _ in range(2))
    triton_quantized._has_product.cache_clear()
    assert_product(weight.multiply(x), x, matrix, tolerance=1e-5)
    assert len(caplog.records) == 1 and "torch has no product of int8 on this device" in caplog.messages[0]
    assert caplog.messages[0].endswith("only for compute capability 9.0")
