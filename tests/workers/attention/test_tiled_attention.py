"""AMX tiles compute attention of prompts as exactly as vectors, and are not used if they compute wrongly."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.emulated_attention import emulated_attention
from tests.workers.attention.test_backends import CPU, LongPrompts
from workers.attention import selector, tiles_check
from workers.attention.cpu_backend import CpuAttention
from workers.attention.interface import AttentionParams
from workers.kv_cache.kv_quantization import INT8_PAGES, PageFormat, PlainPages
from workers.kv_cache.pages import KVCache, LayerShape

PLAIN = PlainPages(torch.bfloat16)
SHAPE, PARAMS = LayerShape(2, 64, 64), AttentionParams(0.2)


@pytest.fixture
def attention() -> Iterator[CpuAttention]:
    found = CpuAttention(emulated_attention(), torch.bfloat16, PLAIN)
    yield found
    found.allow_tiles(True)


def uses_tiles(attention: CpuAttention, shape: LayerShape = SHAPE) -> bool:
    cache = KVCache([shape], attention.block_shapes, 1, 16, attention.page_dtype, CPU)
    return attention.uses_tiles(cache, 0, 2, PARAMS)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "pages", "expected"),
    [
        (64, 64, PLAIN, True),
        (96, 32, PLAIN, True),
        (512, 512, PLAIN, True),
        (80, 64, PLAIN, False),
        (64, 48, PLAIN, False),
        (16, 16, PLAIN, False),
        (64, 64, INT8_PAGES, False),
    ],
)
def test_tiles_are_used_for_whole_tiles_of_bfloat16(
    key_dim: int, value_dim: int, pages: PageFormat, expected: bool
) -> None:
    attention = CpuAttention(emulated_attention(), torch.bfloat16, pages)
    assert uses_tiles(attention, LayerShape(2, key_dim, value_dim)) == expected


@pytest.mark.parametrize("block_size", [16, 24, 64])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128)])
def test_results_are_as_near_to_those_in_float64_as_without_tiles(
    attention: CpuAttention, dims: tuple[int, int], block_size: int
) -> None:
    case = LongPrompts(
        (attention, torch.bfloat16), LayerShape(2, *dims), 3, block_size, AttentionParams(1.3 / math.sqrt(dims[0]))
    )
    expected = torch.cat([case.expected(*sequence) for sequence in case.sequences])

    def distances() -> Any:
        return (torch.cat(case.run(case.attend)).double() - expected).norm(dim=-1) / expected.norm(dim=-1)

    by_tiles = distances()
    attention.allow_tiles(False)
    by_vectors = distances()
    assert not torch.equal(by_tiles, by_vectors), "tiles were not used"
    assert by_tiles.mean() <= 1.01 * by_vectors.mean()
    assert by_tiles.max() <= 1.2 * by_vectors.max()


@pytest.fixture
def _nothing_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_check, "_checked", set())


def choose(
    monkeypatch: pytest.MonkeyPatch, *macros: str, params: AttentionParams = PARAMS, block_size: int = 16
) -> CpuAttention:
    monkeypatch.setattr(selector, "c_library", lambda _: emulated_attention(*macros))
    chosen = selector.choose_attention(CPU, torch.bfloat16, [SHAPE, SHAPE], [params] * 2, block_size)
    assert isinstance(chosen, CpuAttention)
    return chosen


@pytest.mark.usefixtures("_nothing_checked")
@pytest.mark.parametrize("block_size", [16, 100, 256])
@pytest.mark.parametrize(
    "params", [AttentionParams(0.1), AttentionParams(0.2, 20, 3.0), AttentionParams(0.2, None, None, torch.ones(4))]
)
def test_tiles_that_compute_rightly_pass_the_check(
    params: AttentionParams, block_size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert uses_tiles(choose(monkeypatch, params=params, block_size=block_size))
    assert not caplog.records


@pytest.mark.usefixtures("_nothing_checked")
def test_tiles_that_compute_wrongly_are_not_used_and_one_line_of_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = "-DFORGOTTEN_BYTES=2"
    with caplog.at_level(logging.INFO):
        chosen, again = choose(monkeypatch, wrong), choose(monkeypatch, wrong)
    assert not uses_tiles(chosen) and not uses_tiles(again)
    (record,) = caplog.records
    assert "attention of prompts uses vectors, because AMX tiles give other results here" in record.message
    LongPrompts((chosen, torch.bfloat16)).assert_right()
    chosen.allow_tiles(True)
    with pytest.raises(AssertionError):
        LongPrompts((chosen, torch.bfloat16)).assert_right()
