"""Claims about linear layers of few rows, and about decoders that are one call of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.inprocess import InProcessEngine
from tests.tiny_models import ARCHITECTURES, make_model
from workers import c_library as compiling
from workers import few_rows as module
from workers.c_library import c_library
from workers.cpu_decoder import CpuDecoder
from workers.few_rows import FewRows, StreamedWeight
from workers.model_manager import ModelManager
from workers.packed_linear import PackedWeight, can_pack

LIBRARY = c_library("bfloat16") if can_pack(torch.bfloat16) else None
pytestmark = pytest.mark.skipif(
    LIBRARY is None or FewRows(LIBRARY).most == 0,
    reason="this processor has no instruction for it, or there is no compiler",
)
NUM_ROWS = [1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}  # multiples of 32, as in real models


class Blocks:
    """A weight in blocks of 64 outputs, as oneDNN has it for processors without tiles; NaN fills the last one."""

    width = 64

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        num_outputs, num_inputs = weight.shape
        num_blocks = -(-num_outputs // self.width)
        padded = torch.full((num_blocks * self.width, num_inputs), torch.nan, dtype=weight.dtype)
        padded[:num_outputs] = weight
        blocks = padded.view(num_blocks, self.width, num_inputs // 2, 2)
        self._laid_out = blocks.transpose(1, 2).contiguous()
        self.address, self.num_bytes = self._laid_out.data_ptr(), 2 * self._laid_out.numel()
        plain = PackedWeight(weight, bias)
        self.multiply, self.add = plain.multiply, plain.add


@pytest.fixture(scope="module", params=["as it is", "vectors alone"])
def few_rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FewRows]:
    """With what this processor has; and without its tiles, as if it had none."""
    if request.param == "as it is":
        assert LIBRARY is not None
        yield FewRows(LIBRARY)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-O1", "-mno-amx-bf16", "-mno-amx-tile"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        library = c_library.__wrapped__("bfloat16")
    if library is None:
        pytest.skip("the compiler does not know of tiles")
    assert FewRows(library).most == 8
    yield FewRows(library)


@pytest.mark.parametrize("layout", [PackedWeight, Blocks])
@pytest.mark.parametrize("shape", [(32, 32), (70, 64), (200, 96), (1, 64), (33, 2048), (1280, 768)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_multiplies_as_float64_does(
    few_rows: FewRows,
    layout: type[PackedWeight] | type[Blocks],
    shape: tuple[int, int],
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PackedWeight", layout)
    torch.manual_seed(0)
    weight, offset = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16() if bias else None
    made = few_rows.weight(weight, offset)
    assert isinstance(made, StreamedWeight) or layout is PackedWeight, "it lies as the C reads it"
    if isinstance(made, StreamedWeight):
        made.precede(made)
    for num_rows in NUM_ROWS:
        x, to = torch.randn(1, num_rows, shape[1]).bfloat16(), torch.randn(1, num_rows, shape[0]).bfloat16()
        exact = x.double() @ weight.double().T + (0.0 if offset is None else offset.double())
        with torch.inference_mode():
            _assert_rounded(made.multiply(x), exact)
            _assert_rounded(made.add(x, to), exact + to.double())


def _assert_rounded(output: Tensor, exact: Tensor) -> None:
    """To nearest: half a unit of the last of eight bits is 2^-8 of the number; and what float32 sums lose."""
    assert output.dtype is torch.bfloat16 and output.shape == exact.shape
    slack = 1e-5 * exact.abs().max() + 1e-5
    assert bool(((output.double() - exact).abs() <= exact.abs() * (2**-8) + slack).all())


def test_a_weight_that_lies_in_another_way_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Others(Blocks):
        width = 32

        def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
            super().__init__(weight, bias)
            self._laid_out.view(torch.int16).view(-1)[-1] += 1  # one number is another one

    assert LIBRARY is not None
    few_rows, weight = FewRows(LIBRARY), torch.randn(64, 64).bfloat16()
    assert isinstance(few_rows.weight(torch.randn(64, 33).bfloat16(), None), PackedWeight), "33 inputs are in no pairs"
    monkeypatch.setattr(module, "PackedWeight", Others)
    assert isinstance(few_rows.weight(weight, None), Others)


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "qwen2", "qwen3"])
def test_a_decoder_in_one_call_says_what_its_layers_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LIBRARY is not None
    if not isinstance(FewRows(LIBRARY).weight(torch.randn(64, 64).bfloat16(), None), StreamedWeight):
        pytest.skip("oneDNN lays weights out in another way here")
    model_type, sizes = ARCHITECTURES[name]
    make_model(tmp_path, model_type, {**sizes, **SIZES})
    runner = InProcessEngine(ModelManager("cpu").load(tmp_path, "bfloat16", None)).runner
    calls: list[int] = []
    decode = CpuDecoder.decode
    monkeypatch.setattr(CpuDecoder, "decode", lambda self, x, *rest: (calls.append(len(x)), decode(self, x, *rest)))
    of_tokens = tuple(range(1, 25))
    in_one_call = runner._run_in_chunks(of_tokens)
    assert calls and max(calls) <= 32, "no step went that way"
    assert runner.self_check() < 0.05
    calls.clear()
    monkeypatch.setattr(CpuDecoder, "can_take", lambda *_: False)
    by_layers = runner._run_in_chunks(of_tokens)
    assert not calls
    assert (in_one_call - by_layers).norm() <= 0.02 * by_layers.norm()
    monkeypatch.setattr(StreamedWeight, "multiply", lambda self, x: self._packed.multiply(x))
    monkeypatch.setattr(StreamedWeight, "add", lambda self, x, to: self._packed.add(x, to))
    by_onednn = runner._run_in_chunks(of_tokens)
    assert (by_layers - by_onednn).norm() <= 0.02 * by_onednn.norm()


def test_float32_is_left_to_onednn(tmp_path: Path) -> None:
    library = c_library("float32")
    assert library is not None
    few_rows = FewRows(library)
    assert few_rows.most == 0 and isinstance(few_rows.weight(torch.randn(64, 64), None), PackedWeight)
