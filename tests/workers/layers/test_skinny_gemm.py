"""The skinny and the blocked GEMM agree with float64, and weights in a layout that C cannot read are left to oneDNN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from workers.csrc import build as compiling
from workers.csrc.build import c_library
from workers.layers import skinny_gemm as module
from workers.layers.linear import PackedWeight, can_pack
from workers.layers.skinny_gemm import SkinnyGemm, SkinnyGemmWeight

NUM_ROWS = [1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 100, 193]


def native_gemm(dtype: torch.dtype) -> SkinnyGemm:
    """Return the skinny GEMM with all that this processor has; skip the test if it has none for the dtype."""
    library = c_library(str(dtype).removeprefix("torch.")) if can_pack(dtype) else None
    if library is None or SkinnyGemm(library).max_rows == 0:
        pytest.skip(f"this processor has no instructions for {dtype}, or there is no compiler")
    return SkinnyGemm(library)


class Blocks:
    """A weight in blocks of 64 outputs, oneDNN's layout for processors without AMX; NaN fills the last block."""

    width = 64

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        num_outputs, num_inputs = weight.shape
        num_blocks = -(-num_outputs // self.width)
        padded = torch.full((num_blocks * self.width, num_inputs), torch.nan, dtype=weight.dtype)
        padded[:num_outputs] = weight
        unit = 4 // weight.element_size()
        blocks = padded.view(num_blocks, self.width, num_inputs // unit, unit)
        self._blocks = blocks.transpose(1, 2).contiguous()
        self.address, self.num_bytes = self._blocks.data_ptr(), self._blocks.nbytes
        plain = PackedWeight(weight, bias)
        self.multiply, self.multiply_add = plain.multiply, plain.multiply_add


@pytest.fixture(scope="module", params=["bfloat16", "bfloat16 without AMX", "float32"])
def gemm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkinnyGemm]:
    """Return the skinny GEMM for a dtype, and one compiled without AMX tiles."""
    if request.param != "bfloat16 without AMX":
        yield native_gemm(getattr(torch, request.param))
        return
    native_gemm(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-O1", "-mno-amx-bf16", "-mno-amx-tile"))
        patch.setattr(compiling, "SOURCES", ("skinny_gemm.c", "blocked_gemm.c", "team.c"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        library = c_library.__wrapped__("bfloat16")
    if library is None:
        pytest.skip("the compiler does not know AMX")
    assert SkinnyGemm(library).max_rows == 32
    yield SkinnyGemm(library)


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Return the dtype of the `gemm` fixture."""
    name: str = request.node.callspec.params["gemm"]
    found: torch.dtype = getattr(torch, name.partition(" ")[0])
    return found


@pytest.mark.parametrize("layout", [PackedWeight, Blocks])
@pytest.mark.parametrize("shape", [(32, 32), (70, 64), (200, 96), (1, 64), (33, 2048), (1280, 768)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_float64_rounded_once(
    gemm: SkinnyGemm,
    dtype: torch.dtype,
    layout: type[PackedWeight] | type[Blocks],
    shape: tuple[int, int],
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PackedWeight", layout)
    torch.manual_seed(0)
    weight, offset = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype) if bias else None
    packed = gemm.make_weight(weight, offset)
    assert isinstance(packed, SkinnyGemmWeight) or layout is PackedWeight, "the C code can read this layout"
    if isinstance(packed, SkinnyGemmWeight):
        packed.prefetch_next(packed)
    for num_rows in NUM_ROWS:
        x, to = torch.randn(1, num_rows, shape[1]).to(dtype), torch.randn(1, num_rows, shape[0]).to(dtype)
        exact = x.double() @ weight.double().T + (0.0 if offset is None else offset.double())
        with torch.inference_mode():
            _assert_rounded(packed.multiply(x), exact, dtype)
            _assert_rounded(packed.multiply_add(x, to), exact + to.double(), dtype)


def test_c_multiplies_more_rows_than_are_left_to_it(
    gemm: SkinnyGemm, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Narrow(Blocks):
        width = 32

    torch.manual_seed(0)
    x, to = torch.randn(100, 64).to(dtype), torch.randn(100, 70).to(dtype)
    for layout in (Blocks, Narrow):  # the blocked GEMM cannot read the second one
        monkeypatch.setattr(module, "PackedWeight", layout)
        weight = torch.randn(70, 64).to(dtype)
        packed = gemm.make_weight(weight, None)
        assert isinstance(packed, SkinnyGemmWeight)
        exact = x.double() @ weight.double().T
        _assert_rounded(packed.multiply_by_c(x, None), exact, dtype)
        _assert_rounded(packed.multiply_by_c(x, to), exact + to.double(), dtype)


def _assert_rounded(output: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Check for rounding to nearest: half a unit of the last of eight bits is 2^-8; float32 sums add a little."""
    assert output.dtype is dtype and output.shape == exact.shape
    rounding = 2**-8 if dtype is torch.bfloat16 else 0.0
    slack = 1e-5 * exact.abs().max() + 1e-5
    assert bool(((output.double() - exact).abs() <= exact.abs() * rounding + slack).all())


def test_many_rows_are_multiplied_by_c_where_vectors_multiply_bfloat16_and_there_are_no_tiles(
    gemm: SkinnyGemm, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(module, "PackedWeight", Blocks)
    packed = gemm.make_weight(torch.randn(64, 64).to(dtype), None)
    by_onednn: list[int] = []
    assert isinstance(packed, SkinnyGemmWeight)
    packed._packed.multiply = lambda x: by_onednn.append(len(x)) or x  # type: ignore[func-returns-value,method-assign]
    has_tiles = "without AMX" not in request.node.callspec.params["gemm"] and torch.cpu._is_amx_tile_supported()
    is_blocked = dtype is torch.bfloat16 and not has_tiles
    for num_rows in (gemm.max_rows, gemm.max_rows + 1, 1000):
        packed.multiply(torch.randn(num_rows, 64).to(dtype))
    assert by_onednn == ([] if is_blocked else [gemm.max_rows + 1, 1000])


@pytest.mark.parametrize("num_outputs", [24, 40, 200, 1280])  # 1280: panels for up to five threads
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_products_by_c_depend_neither_on_other_rows_nor_on_the_number_of_threads(
    gemm: SkinnyGemm, dtype: torch.dtype, threads: int, num_outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PackedWeight", Blocks)
    if not gemm._blocked_width:
        pytest.skip("oneDNN multiplies many rows here")
    torch.manual_seed(0)
    packed = gemm.make_weight(torch.randn(num_outputs, 96).to(dtype), torch.randn(num_outputs).to(dtype))
    x = torch.randn(400, 96).to(dtype)
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            torch.set_num_threads(1)
            to = -packed.multiply(x)  # what is left then are the last bits of the sums
            one_by_one = torch.cat([packed.multiply_add(x[row : row + 1], to[row : row + 1]) for row in range(400)])
            torch.set_num_threads(threads)
            for num_rows in (*range(1, 34), 40, 400):  # with many threads, fewer rows are divided otherwise
                assert torch.equal(packed.multiply_add(x[:num_rows], to[:num_rows]), one_by_one[:num_rows]), num_rows
    finally:
        torch.set_num_threads(before)


def test_a_weight_in_another_layout_is_left_to_onednn(
    gemm: SkinnyGemm, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherLayout(Blocks):
        width = 32

        def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
            super().__init__(weight, bias)
            self._blocks.view(torch.int16).view(-1)[-1] += 1  # one number differs

    odd = gemm.make_weight(torch.randn(64, 33).to(dtype), None)
    assert isinstance(odd, PackedWeight), "33 inputs are not whole cache lines"
    monkeypatch.setattr(module, "PackedWeight", OtherLayout)
    assert isinstance(gemm.make_weight(torch.randn(64, 64).to(dtype), None), OtherLayout)
