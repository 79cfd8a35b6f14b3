"""Compact weights take fewer bytes, and give the products of plain ones bit by bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.workers.layers.test_skinny_gemm import Blocks
from workers.csrc.build import c_library
from workers.layers import skinny_gemm as module
from workers.layers.compact_gemm import make_compact_weight
from workers.layers.cpu_weight import CpuWeight
from workers.layers.layer_replacement import make_cpu_method
from workers.layers.linear import can_pack
from workers.layers.skinny_gemm import SkinnyGemm, SkinnyGemmWeight

NUM_ROWS = [1, 2, 5, 6, 7, 8, 12, 13, 17, 24, 25, 32, 33, 100, 193, 400]


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """C kernels that read compact weights, with one thread: with many, these weights have too few outputs for all."""
    found = c_library("bfloat16") if can_pack(torch.bfloat16) else None
    if found is None or SkinnyGemm(found)._blocked_width == 0 or not hasattr(found, "compact_gemm"):
        pytest.skip("this processor has AMX, or no instructions for bfloat16, or there is no compiler")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield found
    torch.set_num_threads(num_threads)


def normal(num_outputs: int, num_inputs: int) -> Tensor:
    return 0.02 * torch.randn(num_outputs, num_inputs)


def with_outliers(num_outputs: int, num_inputs: int) -> Tensor:
    """Zeros of both signs, numbers that are tiny or large, and some that are no numbers."""
    weight = normal(num_outputs, num_inputs)
    places = torch.rand(num_outputs, num_inputs)
    weight[places < 0.0005] *= 1e-30
    weight[places > 0.9995] *= 1e6
    weight[:70, 3], weight[:, 5], weight[9, 8] = 0.0, -0.0, torch.inf
    return weight


def of_two_kinds(num_outputs: int, num_inputs: int) -> Tensor:
    """Numbers with so few upper bytes that most codes have none."""
    return 0.375 * torch.randn(num_outputs, num_inputs).sign()


@pytest.mark.parametrize("make", [normal, with_outliers, of_two_kinds])
@pytest.mark.parametrize("shape", [(1280, 768), (1060, 96), (4096, 64)])
def test_products_are_those_of_plain_weights(
    library: ctypes.CDLL, make: Callable[[int, int], Tensor], shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PackedWeight", Blocks)
    torch.manual_seed(0)
    weight, bias = make(*shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    compact = make_compact_weight(library, weight, bias)
    assert compact is not None
    compact.prefetch_next(compact)
    plain = SkinnyGemm(library).make_weight(weight, bias)
    assert isinstance(plain, SkinnyGemmWeight)
    for num_rows in NUM_ROWS:
        x, to = torch.randn(num_rows, shape[1]).bfloat16(), torch.randn(num_rows, shape[0]).bfloat16()
        assert_same(compact.multiply(x), plain.multiply(x))
        assert_same(compact.multiply_add(x, to), plain.multiply_add(x, to))


def assert_same(one: Tensor, other: Tensor) -> None:
    """Check that they have the same bits; the sums of infinities have others, which are no numbers in both."""
    is_number = one == one
    assert torch.equal(is_number, other == other)
    assert torch.equal(one[is_number].view(torch.int16), other[is_number].view(torch.int16))


def test_inputs_need_not_fill_cache_lines(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    weight, x = normal(1024, 130).bfloat16(), torch.randn(40, 130).bfloat16()
    compact = make_compact_weight(library, weight, None)
    assert compact is not None
    exact = x.double() @ weight.double().T
    assert torch.allclose(compact.multiply(x).double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_products_do_not_depend_on_the_number_of_threads(library: ctypes.CDLL, threads: int) -> None:
    torch.manual_seed(0)
    compact = make_compact_weight(library, with_outliers(1280, 96)[:, 10:].contiguous().bfloat16(), None)
    assert compact is not None
    x, before = torch.randn(300, 86).bfloat16(), torch.get_num_threads()
    alone = compact.multiply(x[7:8])
    try:
        torch.set_num_threads(threads)
        for num_rows in (8, 30, 300):
            assert_same(compact.multiply(x[:num_rows])[7:8], alone)
    finally:
        torch.set_num_threads(before)


def test_a_compact_weight_takes_three_quarters_of_its_bytes(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    made = make_compact_weight(library, normal(1280, 768).bfloat16(), None)
    assert made is not None
    data = made._keeps_alive[0]
    assert isinstance(data, Tensor) and 0.75 < data.nbytes / (1280 * 768 * 2) < 0.78


def test_weights_that_gain_nothing_stay_plain(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    outputs = 4 * 64 * torch.get_num_threads()
    of_all_sizes = torch.randint(-(2**15), 2**15, (outputs, 64), dtype=torch.int16).view(torch.bfloat16)
    assert make_compact_weight(library, of_all_sizes, None) is None, "no upper byte is more frequent than others"
    assert make_compact_weight(library, normal(outputs - 64, 64).bfloat16(), None) is None, "too few panels"
    assert make_compact_weight(library, normal(outputs, 63).bfloat16(), None) is None, "inputs are read two by two"
    assert make_compact_weight(library, normal(outputs, 64), None) is None, "float32"


def test_a_worker_multiplies_by_compact_weights(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    weight = normal(4 * 64 * torch.get_num_threads(), 64).bfloat16()
    made = make_cpu_method(library)(weight, None)
    assert isinstance(made, CpuWeight) and not isinstance(made, SkinnyGemmWeight)
