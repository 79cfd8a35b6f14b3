"""TritonAttention agrees with a softmax in float64 over steps of prompt chunks and single tokens."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_device import DEVICE, gpu_backends
from tests.workers.attention.test_backends import TOLERANCES, Case, assert_same
from workers.attention.interface import AttentionParams
from workers.kv_cache.kv_quantization import FLOAT8_PAGES, INT8_PAGES, PlainPages, QuantizedPages
from workers.kv_cache.pages import LayerShape

if DEVICE.type != "cpu":
    pytest.skip("Case computes on the CPU", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("triton_kernels_run")


@pytest.mark.parametrize(
    "params", [AttentionParams(0.2), AttentionParams(0.2, 9, 4.0, torch.linspace(-1, 1, 6))], ids=["plain", "all"]
)
def test_triton_attention_is_attention(params: AttentionParams) -> None:
    Case((gpu_backends.TritonAttention(PlainPages(torch.float32)), torch.float32), params=params).assert_right()


@pytest.mark.parametrize("pages", [INT8_PAGES, FLOAT8_PAGES], ids=lambda pages: pages.name)
@pytest.mark.parametrize("block_size", [1, 16])
def test_triton_attends_to_the_numbers_that_codes_in_pages_stand_for(pages: QuantizedPages, block_size: int) -> None:
    shape = LayerShape(2, 40, 24)
    case = Case((gpu_backends.TritonAttention(pages), torch.float32), shape, block_size=block_size)
    for i, output in enumerate(case.run(case.attend)):
        queries, _, _ = case.sequences[i]
        layer, table = case.attention._pages(case.cache, 0), torch.from_numpy(case.tables[i])
        keys, values = (
            (codes[table].double() * scales[table][..., None]).flatten(0, 1)[: len(queries)]
            for codes, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales))
        )
        assert_same(output, case.expected(queries, keys, values))
        # int8 rounds by half a 127th of the largest of some 30 numbers; the interpreter rounds badly to float8.
        error = 0.02 if pages is INT8_PAGES else 0.2
        assert_same(output, case.expected(*case.sequences[i]), 2 * error / TOLERANCES[torch.float32])


@pytest.mark.parametrize("pages", [INT8_PAGES, FLOAT8_PAGES], ids=lambda pages: pages.name)
def test_a_copied_block_of_codes_brings_its_scales(pages: QuantizedPages) -> None:
    attention, shape = gpu_backends.TritonAttention(pages), LayerShape(3, 20, 12)
    keys, values = attention.block_shapes(shape, 4)
    assert keys == (240 + 48,) and values == (144 + 48,), "codes, then scales, each a multiple of 16 bytes"
    case = Case((attention, torch.float32), shape, block_size=4)
    case.run(case.attend)
    full = int(case.tables[3][0])
    case.cache.copy_blocks(torch.tensor([full]), torch.tensor([case.spare]))
    layer = attention._pages(case.cache, 0)
    assert torch.equal(layer.key_scales[full], layer.key_scales[case.spare]) and layer.key_scales[full].min() > 0
    assert torch.equal(layer.values[full].float(), layer.values[case.spare].float())
