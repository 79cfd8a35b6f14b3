"""TritonAttention agrees with a softmax in float64 over steps of prompt chunks and single tokens.

flash-attn needs a GPU. Here its functions are replaced by others that compute what its documentation says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.triton_device import DEVICE, gpu_backends, triton, triton_kernels
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


def test_sequences_of_few_tokens_and_of_many_attend_in_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, where tiles differ. The interpreter truncates to bfloat16."""
    chosen: list[int] = []
    choose_tiles = triton_kernels.choose_tiles

    def noted(*args: Any) -> Any:
        chosen.append(choose_tiles(*args).rows)
        return choose_tiles(*args)

    monkeypatch.setattr(triton_kernels, "choose_tiles", noted)
    case = Case((gpu_backends.TritonAttention(PlainPages(torch.bfloat16)), torch.bfloat16), LayerShape(2, 16, 16))
    case.assert_right(3.0)
    assert {16, 32, 64} <= set(chosen)


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


# -- flash attention --------------------------------------------------------------------------------------------------

WINDOWS = pytest.mark.parametrize("window", [None, 9])


def attend_to_blocks(
    queries: Tensor,
    pages: tuple[Tensor, Tensor],
    query_starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    scale: float,
    window: tuple[int, int],
) -> Tensor:
    """Attend one sequence after the other, to (left, right) keys beside each query; -1 is all of them."""
    outputs = []
    for first, stop, length, blocks in zip(query_starts[:-1], query_starts[1:], lengths, table, strict=True):
        asked = queries[first:stop].double()
        keys, values = (each[blocks.long()].flatten(0, 1)[:length].double() for each in pages)
        keys, values = (each.repeat_interleave(queries.shape[1] // each.shape[1], dim=1) for each in (keys, values))
        distance = (torch.arange(length - len(asked), length)[:, None] - torch.arange(length))[:, None]
        visible = (distance <= window[0]) | torch.tensor(window[0] < 0)
        visible &= (-distance <= window[1]) | torch.tensor(window[1] < 0)
        scores = torch.einsum("qhd,khd->qhk", asked, keys).mul(scale).masked_fill(~visible, -torch.inf)
        outputs.append(torch.einsum("qhk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outputs).to(queries.dtype)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """What `flash_attn_varlen_func` of flash-attn 2 does, of which this argument selects the fast way in decodes."""
    assert causal and not softcap and max_seqlen_k >= cu_seqlens_k.diff().max()
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    is_fast = window_size == (-1, -1)
    assert is_fast == (max_seqlen_q == 1 and window_size[0] < 0), "else each query head reads the keys itself"
    right = 0 if causal else window_size[1]
    lengths = cu_seqlens_k.diff()
    return attend_to_blocks(q, (k, v), cu_seqlens_q, lengths, block_table, softmax_scale, (window_size[0], right))


def with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
    max_seqlen_q: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
) -> Tensor:  # fmt: skip
    """What `flash_attn_with_kvcache` of flash-attn 3 does."""
    assert causal and not softcap and max_seqlen_q == cu_seqlens_q.diff().max()
    window, pages = (window_size[0], 0), (k_cache, v_cache)
    return attend_to_blocks(q, pages, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window)


@WINDOWS
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_is_called_as_its_versions_want(version: int, window: int | None) -> None:
    pages = PlainPages(torch.float32)
    backend: Any = gpu_backends.FlashAttention(pages, varlen)
    if version == 3:
        backend = gpu_backends.FlashAttention3(pages, with_kvcache)
    Case((backend, torch.float32), params=AttentionParams(0.2, window)).assert_right()


# -- the check at load ------------------------------------------------------------------------------------------------

CHECKED = gpu_backends.CheckedLayer(LayerShape(1, 16, 16), 2, 0.25, None, None, has_sinks=False)


def failure(backend: Any, layer: Any = CHECKED, dtype: torch.dtype = torch.float32) -> str | None:
    found: str | None = gpu_backends.failure_of(backend, layer, 16, dtype, DEVICE)
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Check few keys, and note the numbers of queries of each call, and of the parts of the first sequence's keys."""
    calls: list[tuple[int, int]] = []
    attend = triton_kernels.attend

    def noted(queries: Tensor, *args: Any) -> None:
        attend(queries, *args)
        calls.append((len(queries), max((int(each.part_starts[1]) for each in args[-1]._made.values()), default=0)))

    monkeypatch.setattr(gpu_backends, "CHECKED_KEYS", 160)
    monkeypatch.setattr(gpu_backends, "MAX_POWER", 4)
    monkeypatch.setattr(triton_kernels, "MIN_PART_KEYS", 1)
    monkeypatch.setattr(triton_kernels, "attend", noted)
    return calls


@pytest.mark.parametrize("has_all", [False, True])
def test_the_check_launches_every_kernel_and_finds_that_they_agree(
    has_all: bool, launched: list[tuple[int, int]]
) -> None:
    options = (100, 5.0, True) if has_all else (None, None, False)
    pages = PlainPages(torch.bfloat16)
    layer = gpu_backends.CheckedLayer(LayerShape(1, 16, 16), 2, 0.25, *options)
    assert failure(gpu_backends.TritonAttention(pages), layer, torch.bfloat16) is None
    for few in (1, 8):
        assert {1, 2, 3} >= {num_parts for count, num_parts in launched if count == few} >= {2, 3}
    tiles = {triton_kernels.choose_tiles(count, 2, 16, 2).rows for count, _ in launched if count > 8}
    assert tiles == {16, 32, 64, 128}


@pytest.mark.usefixtures("launched")
def test_the_check_names_a_kernel_that_gives_other_results() -> None:
    def forgetful(*args: Any, **options: Any) -> Tensor:
        return varlen(*args, **{**options, "softmax_scale": 0.0})

    pages = PlainPages(torch.float32)
    found = failure(gpu_backends.FlashAttention(pages, forgetful))
    assert found is not None and found.startswith("flash_attn with 1 queries gives other results")
    assert failure(gpu_backends.FlashAttention(pages, varlen)) is None


@pytest.mark.usefixtures("launched")
def test_the_check_returns_the_errors_of_kernels_and_all_errors_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    error: Exception = TypeError("got an unexpected keyword argument 'block_table'")

    def failing(*_: Any, **__: Any) -> Tensor:
        raise error

    pages = PlainPages(torch.float32)
    packages: list[Any] = [gpu_backends.FlashAttention, gpu_backends.FlashAttention3, gpu_backends.VarlenAttention]
    for package in packages:
        assert failure(package(pages, failing)) == "TypeError: got an unexpected keyword argument 'block_table'"
    error = triton.TritonError("out of resource: shared memory")
    monkeypatch.setattr(triton_kernels, "attend", failing)
    assert failure(gpu_backends.TritonAttention(pages)) == "TritonError: out of resource: shared memory"
    error = RuntimeError("Failed to find C compiler")
    assert failure(gpu_backends.TritonAttention(pages)) == "RuntimeError: Failed to find C compiler"
    error = ValueError("our mistake")
    with pytest.raises(ValueError, match="our mistake"):
        failure(gpu_backends.TritonAttention(pages))


@pytest.mark.usefixtures("launched")
def test_a_device_without_memory_is_no_failure_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    pages = PlainPages(torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        failure(gpu_backends.FlashAttention(pages, failing))
    monkeypatch.setattr(triton_kernels, "attend", failing)
    with pytest.raises(torch.OutOfMemoryError):
        failure(gpu_backends.TritonAttention(pages))
