"""Products with quantized weights are those of the dequantized weight, for every kernel, format and processor."""

from __future__ import annotations

import ctypes
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.gguf_files import random_blocks
from tests.support.quantized import FP4_LEVELS, NF4_LEVELS, random_matrix
from tests.support.quick_compiler import NOT_INLINED
from workers.csrc import build as compiling
from workers.csrc.build import FOLDER, c_library
from workers.layers.cpu_weight import WORKSPACE_ROWS
from workers.layers.quantized_gemm import KERNELS, NUMBER_TYPES, QuantizedGemm, QuantizedGemmWeight
from workers.layers.quantized_linear import DequantizingWeight
from workers.quantization.ggml_blocks import BLOCK_TYPES, unpack
from workers.quantization.quantized_tensor import QuantizedTensor

NUM_ROWS = [1, 2, 3, 4, 5, 8, 9, 17, 40, 70, 260]
SHAPES = [(33, 384), (70, 512)]
CASES: dict[str, dict[str, Any]] = {
    "w8a8 by row": {"encoding": "int8", "activations": "int8"},
    "w8a8 by row, float32 scales": {"encoding": "int8", "activations": "int8", "scales": torch.float32},
    "w8a8 in groups of 32": {"encoding": "int8", "activations": "int8", "group_size": 32},
    "w8a8 in groups of 16, reordered": {
        "encoding": "int8",
        "activations": "int8",
        "group_size": 16,
        "is_reordered": True,
        "has_offsets": True,
    },
    "w4a8 by row": {"encoding": "int4", "activations": "int8"},
    "w4a8 in groups of 32": {"encoding": "int4", "activations": "int8", "group_size": 32},
    "w4a8 with offsets": {
        "encoding": "int4",
        "activations": "int8",
        "group_size": 64,
        "has_offsets": True,
        "levels": tuple(map(float, range(16))),
    },
    "w4a8 in groups of 128, reordered": {
        "encoding": "int4",
        "activations": "int8",
        "group_size": 128,
        "is_reordered": True,
    },
    "w8a16 by row": {"encoding": "int8"},
    "w8a16 in groups of 32": {"encoding": "int8", "group_size": 32, "has_offsets": True, "scales": torch.bfloat16},
    "w4a16 by row": {"encoding": "int4"},
    "w4a16 in groups of 32": {"encoding": "int4", "group_size": 32},
    "w4a16 in groups of 128": {"encoding": "int4", "group_size": 128, "has_offsets": True, "is_reordered": True},
    "nf4": {"encoding": "int4", "group_size": 64, "levels": NF4_LEVELS, "scales": torch.float32},
    "nf4 for int8": {"encoding": "int4", "group_size": 64, "levels": NF4_LEVELS, "activations": "int8"},
    "mxfp4": {"encoding": "int4", "group_size": 32, "levels": FP4_LEVELS, "scales": torch.bfloat16},
    "fp8 by row": {"encoding": "float8"},
    "fp8 in groups of 128": {"encoding": "float8", "group_size": 128, "scales": torch.float32},
}
PROCESSORS: dict[str, tuple[str, ...]] = {  # flags of the compiler
    "this one": (),
    "AVX2": ("-march=x86-64-v3",),
    "SSE2": ("-march=x86-64",),
    "AMX, emulated": ("-mamx-tile", "-mamx-int8", "-mamx-bf16", f"-I{FOLDER}"),
}
EMULATED = str(Path(__file__).with_name("emulated_quantized_gemm.c"))


LIBRARIES = [  # to compile for other processors takes a while, so these are long tests
    pytest.param((name, dtype), marks=[pytest.mark.long] if flags else [])
    for name, flags in PROCESSORS.items()
    for dtype in ("float32", "bfloat16")
]


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return a library with all that this processor has, and some for other processors."""
    name, dtype = request.param
    if PROCESSORS[name] and platform.machine() != "x86_64":
        pytest.skip(f"{name} is an extension of x86-64 processors")
    if name == "AVX2" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    with pytest.MonkeyPatch.context() as patch:
        if PROCESSORS[name]:
            patch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-O1", NOT_INLINED, *PROCESSORS[name]))
            patch.setattr(compiling, "SOURCES", (EMULATED if "AMX" in name else "quantized_gemm.c", "team.c"))
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        found = c_library.__wrapped__(dtype)
    if found is None:
        pytest.skip("there is no compiler that knows this processor")
    found.dtype = getattr(torch, dtype)
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_that_of_the_dequantized_weight(library: Any, case: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix, bias = random_matrix(*shape, **CASES[case]), torch.randn(shape[0]).to(library.dtype)
    plain, with_bias = (QuantizedGemm(library).make_weight(matrix, b) for b in (None, bias))
    assert isinstance(plain, QuantizedGemmWeight) and isinstance(with_bias, QuantizedGemmWeight)
    plain.prefetch_next(with_bias)
    is_by_int8 = matrix.activations == "int8" and case != "nf4 for int8"
    for num_rows in NUM_ROWS:
        x = torch.randn(1, num_rows, shape[1]).to(library.dtype)
        residual = torch.randn(1, num_rows, shape[0]).to(library.dtype)
        exact = multiplied(x, matrix)
        for result, expected in (
            (plain.multiply(x), exact),
            (with_bias.multiply(x), exact + bias.double()),
            (with_bias.multiply_add(x, residual), exact + bias.double() + residual.double()),
        ):
            assert result.dtype is library.dtype and result.shape == (1, num_rows, shape[0])
            assert distance(result, expected) < (0.03 if is_by_int8 else rounding(library.dtype))
        if is_by_int8:
            assert distance(plain.multiply(x), multiplied(quantized(x), matrix)) < max(rounding(library.dtype), 1e-3)


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_rounding_x_to_int8_changes_products_by_less_than_one_percent(library: Any, encoding: Any) -> None:
    torch.manual_seed(0)
    matrix, x = random_matrix(64, 4096, encoding, 128, activations="int8"), torch.randn(16, 4096).to(library.dtype)
    product = QuantizedGemm(library).make_weight(matrix, None).multiply(x)
    assert distance(product, multiplied(x, matrix)) < 0.01


def multiplied(x: Tensor, matrix: QuantizedTensor) -> Tensor:
    return x.double() @ matrix.dequantize(torch.float64).T


def quantized(x: Tensor) -> Tensor:
    """Return x [..., n], each row rounded to 255 steps."""
    steps = 127 / x.float().abs().amax(dim=-1, keepdim=True)
    return (x.float() * steps).round() / steps


def distance(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def rounding(dtype: torch.dtype) -> float:
    return 1e-5 if dtype is torch.float32 else 2.5e-3


@pytest.mark.parametrize("case", CASES)
def test_no_rows_give_an_empty_product(library: ctypes.CDLL, case: str) -> None:
    weight = QuantizedGemm(library).make_weight(random_matrix(40, 384, **CASES[case]), None)
    x = torch.empty(1, 0, 384, dtype=library.dtype)
    assert weight.multiply(x).shape == (1, 0, 40)


def test_rows_of_zeros_and_of_very_different_sizes_are_quantized_each_by_itself(library: Any) -> None:
    matrix = random_matrix(64, 256, "int8", activations="int8")
    weight = QuantizedGemm(library).make_weight(matrix, None)
    x = (torch.randn(6, 256) * torch.tensor([1e-20, 1e-3, 1.0, 0.0, 1e3, 1e20])[:, None]).to(library.dtype)
    product, exact = weight.multiply(x), multiplied(x, matrix)
    assert not product[3].any()
    for row in (0, 1, 2, 4, 5):
        assert distance(product[row], exact[row]) < 0.015


def test_infinite_numbers_in_one_row_do_not_change_other_rows(library: Any) -> None:
    matrix = random_matrix(64, 256, "int4", 32, activations="int8")
    weight = QuantizedGemm(library).make_weight(matrix, None)
    x = torch.randn(6, 256).to(library.dtype)
    expected = weight.multiply(x)
    x[2, 7], x[4, 9] = torch.inf, torch.nan
    assert torch.equal(weight.multiply(x)[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])


@pytest.mark.parametrize("case", CASES)
def test_memory_is_that_of_the_codes_and_scales(library: ctypes.CDLL, case: str) -> None:
    matrix = random_matrix(576, 1536, **CASES[case])
    weight = QuantizedGemm(library).make_weight(matrix, None)
    order_bytes = 0 if matrix.input_order is None else matrix.input_order.nbytes
    assert isinstance(weight, QuantizedGemmWeight)
    assert weight.num_bytes <= 1.001 * (matrix.num_bytes - order_bytes)


def test_zero_points_and_powers_of_two_take_one_byte(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    zero_points = torch.randint(-8, 8, (64, 12))
    plain = random_matrix(64, 384, "int4", 32)
    by_zero_points = replace(plain, offsets=zero_points * plain.scales.float())
    powers = replace(plain, scales=torch.pow(2.0, torch.randint(-9, 4, (64, 12))))
    x = torch.randn(5, 384).to(library.dtype)  # type: ignore[attr-defined]
    for matrix, num_bytes in ((plain, 2), (by_zero_points, 3), (powers, 1)):
        weight = QuantizedGemm(library).make_weight(matrix, None)
        assert isinstance(weight, QuantizedGemmWeight)
        assert weight.num_bytes == matrix.codes.nbytes + num_bytes * matrix.scales.numel()
        assert distance(weight.multiply(x), multiplied(x, matrix)) < rounding(x.dtype)


# As many bytes as their blocks have in a file; the others are stored with more bits.
STORED_AS_IN_FILES = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}


@pytest.mark.parametrize("type_name", sorted(BLOCK_TYPES))
def test_blocks_of_gguf_files_are_multiplied_and_take_the_memory_that_they_have_in_the_file(
    library: Any, type_name: str
) -> None:
    torch.manual_seed(0)
    blocks = torch.from_numpy(random_blocks(type_name, 96, 1024))
    matrix = unpack(type_name, blocks)
    weight = QuantizedGemm(library).make_weight(matrix, None)
    assert isinstance(weight, QuantizedGemmWeight)
    assert weight.num_bytes <= 1.03 * blocks.nbytes or type_name not in STORED_AS_IN_FILES
    for num_rows in (1, 3, 8, 40):
        x = torch.randn(num_rows, 1024).to(library.dtype)
        assert distance(weight.multiply(x), multiplied(x, matrix)) < 2 * rounding(library.dtype)


@pytest.mark.parametrize(
    ("lowest", "highest", "bits"), [(-16, 15, 5), (0, 31, 5), (-32, 31, 6), (-128, -65, 6), (-1, 63, 8)]
)
def test_codes_take_as_many_bits_as_their_range_needs(library: Any, lowest: int, highest: int, bits: int) -> None:
    torch.manual_seed(0)
    plain = random_matrix(40, 384, "int8", 32, has_offsets=True)
    codes = torch.randint(lowest, highest + 1, plain.codes.shape, dtype=torch.int8)
    codes[0, 0], codes[0, 1] = lowest, highest
    matrix = replace(plain, codes=codes)
    weight = QuantizedGemm(library).make_weight(matrix, None)
    assert isinstance(weight, QuantizedGemmWeight)
    assert weight.num_bytes == 64 * (384 * bits // 8 + 2 * 12 * 2)
    for num_rows in (1, 8):
        x = torch.randn(num_rows, 384).to(library.dtype)
        assert distance(weight.multiply(x), multiplied(x, matrix)) < rounding(library.dtype)


def test_scales_of_blocks_of_many_outputs_are_stored_once_for_each_strip(library: Any) -> None:
    torch.manual_seed(0)
    scales = torch.rand(2, 4).repeat_interleave(128, dim=0)
    matrix = replace(random_matrix(256, 512, "float8"), scales=scales)
    weight = QuantizedGemm(library).make_weight(matrix, None)
    assert isinstance(weight, QuantizedGemmWeight)
    assert weight.num_bytes <= 1.005 * matrix.codes.nbytes
    other = replace(matrix, scales=scales * (torch.arange(256) != 200)[:, None])  # the same ones but in one row
    for each in (matrix, other):
        for num_rows in (1, 8, 40):
            x = torch.randn(num_rows, 512).to(library.dtype)
            product = QuantizedGemm(library).make_weight(each, None).multiply(x)
            assert distance(product, multiplied(x, each)) < rounding(library.dtype)


def test_groups_that_are_not_whole_vectors_are_dequantized() -> None:
    library = c_library("float32")
    if library is None:
        pytest.skip("there is no compiler")
    matrix = random_matrix(24, 72, "int8", 24)
    weight = QuantizedGemm(library).make_weight(matrix, None)
    assert isinstance(weight, DequantizingWeight)
    x = torch.randn(3, 72)
    assert distance(weight.multiply(x), multiplied(x, matrix)) < 1e-5


def test_numbers_of_kernels_and_of_types_are_those_of_the_header() -> None:
    header = (FOLDER / "kernels.h").read_text()
    enumerations = [re.findall(r"\w+", body) for body in re.findall(r"enum \{ ([A-Z0-9_, ]+) \};", header)]
    assert list(KERNELS) in enumerations
    assert list(NUMBER_TYPES) in enumerations
    assert f"MAX_ROWS = {WORKSPACE_ROWS} }}" in (FOLDER / "quantized_gemm.c").read_text()
