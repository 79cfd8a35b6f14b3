"""The C kernels attend to pages of codes as exactly as to plain ones: to the numbers that the codes stand for.

These are read from the pages here, by the layout that paged_attention.c describes, and compared with what was stored.
"""

from __future__ import annotations

import ctypes
import math
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.quick_compiler import NOT_INLINED
from tests.workers.attention.test_backends import CPU, TOLERANCES, Case, assert_same
from workers.attention.cpu_backend import CpuAttention
from workers.attention.interface import AttentionParams, HeadNorms, PagedStep
from workers.attention.selector import choose_attention
from workers.csrc import build
from workers.csrc.bindings import declare_prototypes
from workers.csrc.prebuilt import processor_features
from workers.kv_cache.kv_quantization import FLOAT8_PAGES, INT8_PAGES, PageFormat, QuantizedPages
from workers.kv_cache.pages import LayerShape, bytes_per_block

FORMATS = [INT8_PAGES, FLOAT8_PAGES]
LINE, TILE_TOKENS = 64, 16
LANES_PER_GROUP = 4 if "avx512vbmi" in processor_features().split() else 16  # as kv_codes.h was compiled


class QuantizedCase(Case):
    """The case of the other backends' tests, over pages of codes."""

    def __init__(
        self,
        pages: QuantizedPages,
        dtype: torch.dtype,
        shape: LayerShape = LayerShape(2, 64, 64),  # noqa: B008 - a value
        **options: Any,
    ) -> None:
        attention = options.pop("attention", None)
        self.pages = pages
        self.lanes_per_group = LANES_PER_GROUP
        if attention is None:
            attention = choose_attention(CPU, dtype, [shape], [], 16, pages.name)
            assert isinstance(attention, CpuAttention)
        super().__init__((attention, dtype), shape, **options)

    def stored(self, sequence: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the numbers in a sequence's pages, [num_tokens, num_kv_heads, dim], and their scales.

        They are keys, values, scales of keys, scales of values.
        """
        token, lanes = torch.arange(TILE_TOKENS)[:, None], self.lanes_per_group

        def place(vector: Tensor, lane: Tensor, code: Tensor) -> Tensor:
            return lane // lanes * 4 * lanes + vector * 2 * lanes + lane % lanes * 2 + code

        d = torch.arange(self.shape.key_dim)
        in_keys = d // 4 * LINE + place(d // 2 % 2, token, d % 2)
        d = torch.arange(self.shape.value_dim)
        in_values = d // 16 * 4 * LINE + token // 4 * LINE + place(token // 2 % 2, d % 16, token % 2)
        numbers, scales = [], []
        for pages, places in ((self.cache.keys[0], in_keys), (self.cache.values[0], in_values)):
            tiles = pages[torch.from_numpy(self.tables[sequence])]  # [blocks, heads, tiles, bytes]
            of_tokens = tiles[..., :LINE].clone(memory_format=torch.contiguous_format).view(torch.float32)
            codes = tiles[..., LINE:][..., places]  # [blocks, heads, tiles, 16, dim]
            if self.pages is INT8_PAGES:
                values = (codes & 127).double() * (1 - 2 * (codes >> 7).double())
            else:
                values = codes.view(torch.float8_e4m3fn).double()
            # A block of fewer than sixteen tokens, or of no multiple of sixteen, uses its last tile in part.
            by_token = [
                each.transpose(1, 2).transpose(2, 3).flatten(1, 2)[:, : self.block_size].flatten(0, 1)
                for each in (values * of_tokens[..., None].double(), of_tokens[..., None])
            ]
            length = len(self.sequences[sequence][0])
            numbers.append(by_token[0][:length])
            scales.append(by_token[1][:length])
        return numbers[0], numbers[1], scales[0], scales[1]

    def assert_attends_to_what_is_stored(self, factor: float = 1.0) -> None:
        for i, output in enumerate(self.run(self.attend)):
            queries, keys, values = self.sequences[i]
            stored_keys, stored_values, key_scales, value_scales = self.stored(i)
            assert_encoded(self.pages, stored_keys, key_scales, keys)
            assert_encoded(self.pages, stored_values, value_scales, values)
            assert_same(output, self.expected(queries, stored_keys, stored_values), factor)


def assert_encoded(pages: PageFormat, stored: Tensor, scales: Tensor, vectors: Tensor, slack: float = 1e-4) -> None:
    """Check that each number is the nearest one that the format has with its vector's scale."""
    exact, scales = vectors.double(), scales.double()
    # float8 has three bits of mantissa; below 2^-6 its steps are 2^-9.
    of_float8 = torch.maximum(exact.abs() * 2**-4, scales * 2**-10)
    half_a_step = scales * 0.5 if pages is INT8_PAGES else of_float8
    assert ((stored - exact).abs() <= half_a_step * (1 + slack) + slack * scales).all()


@pytest.fixture(params=FORMATS, ids=lambda pages: pages.name)
def pages(request: pytest.FixtureRequest) -> QuantizedPages:
    found: QuantizedPages = request.param
    return found


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.mark.parametrize(
    ("dims", "heads"),
    [
        ((8, 8), (1, 1)),
        ((16, 16), (2, 2)),
        ((64, 64), (1, 3)),
        ((80, 80), (2, 4)),
        ((48, 32), (1, 5)),
        ((64, 64), (1, 7)),
        ((128, 128), (1, 8)),
        ((192, 128), (2, 12)),
    ],
)
def test_heads_and_dimensions_may_be_any(
    pages: QuantizedPages, dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int]
) -> None:
    params = AttentionParams(1.3 / math.sqrt(dims[0]))
    case = QuantizedCase(pages, dtype, LayerShape(heads[0], *dims), num_groups=heads[1], params=params)
    case.assert_attends_to_what_is_stored()


@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 100])
@pytest.mark.parametrize("window", [None, 20])
def test_block_sizes_may_be_any(pages: QuantizedPages, dtype: torch.dtype, block_size: int, window: int | None) -> None:
    case = QuantizedCase(pages, dtype, block_size=block_size, params=AttentionParams(0.2, window))
    case.assert_attends_to_what_is_stored()


@pytest.mark.parametrize(("window", "softcap", "with_sinks"), [(1, None, True), (16, 3.0, False), (40, 3.0, True)])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_windows_soft_caps_and_sinks(
    pages: QuantizedPages,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    num_groups: int,
) -> None:
    sinks = torch.linspace(-3, 3, 2 * num_groups).to(dtype) if with_sinks else None
    params = AttentionParams(0.2, window, softcap, sinks)
    QuantizedCase(pages, dtype, num_groups=num_groups, params=params).assert_attends_to_what_is_stored()


@pytest.mark.parametrize("with_norms", [False, True])
def test_rotated_keys_are_stored_and_attended_to(pages: QuantizedPages, dtype: torch.dtype, with_norms: bool) -> None:
    head_dim = 64
    case = QuantizedCase(pages, dtype, params=AttentionParams(head_dim**-0.5))
    norms = HeadNorms(*(torch.rand(2, head_dim) + 0.5), 1e-5) if with_norms else None
    angles = torch.outer(torch.arange(71), 1000.0 ** -torch.linspace(0, 1, head_dim // 2)).repeat(1, 2)
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)

    def compute(step: PagedStep, flat: list[Tensor]) -> Tensor:
        ends, counts = step.metadata.num_keys, step.metadata.num_queries
        at = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, counts, strict=True)])
        qkv = torch.cat([each.flatten(1) for each in flat], dim=1)
        cosines, sines = (each[at].contiguous() for each in rotation)
        output = case.attention.rotate_and_attend(step, 0, qkv, (cosines, sines), norms, case.params)
        return output.view(len(at), case.num_heads, head_dim)

    def rotated(heads: Tensor, weight: Tensor | None) -> Tensor:
        heads = heads.double()
        if weight is not None:
            heads = torch.nn.functional.rms_norm(heads, (head_dim,), weight.double(), 1e-5)
        cosines, sines = (each[: len(heads)].double()[:, None] for each in rotation)
        turned = torch.cat([-heads[..., head_dim // 2 :], heads[..., : head_dim // 2]], dim=-1)
        return heads * cosines + turned * sines

    for i, output in enumerate(case.run(compute)):
        queries, keys, values = case.sequences[i]
        stored_keys, stored_values, key_scales, value_scales = case.stored(i)
        weights = (None, None) if norms is None else (norms.query_weight, norms.key_weight)
        # In bfloat16, keys are rounded once before they are encoded: by up to half a step of int8.
        slack = 1e-3 if dtype is torch.float32 else 0.3
        assert_encoded(pages, stored_keys, key_scales, rotated(keys, weights[1]), slack)
        assert_encoded(pages, stored_values, value_scales, values)
        assert_same(output, case.expected(rotated(queries, weights[0]), stored_keys, stored_values), factor=3)


def test_large_scores_neither_overflow_nor_vanish(pages: QuantizedPages, dtype: torch.dtype) -> None:
    QuantizedCase(pages, dtype, params=AttentionParams(40.0)).assert_attends_to_what_is_stored(factor=20)


def test_numbers_that_are_not_finite_affect_only_their_own_sequence(pages: QuantizedPages, dtype: torch.dtype) -> None:
    case = QuantizedCase(pages, dtype)
    for poison, tensor in zip((math.nan, math.inf, -math.inf), case.sequences[3], strict=True):
        tensor[40:50] = poison
    outputs = case.run(case.attend)
    for i in range(5):
        stored_keys, stored_values, key_scales, value_scales = case.stored(i)
        assert all(torch.isfinite(each).all() for each in (stored_keys, stored_values, key_scales, value_scales))
        if i != 3:
            assert_same(outputs[i], case.expected(case.sequences[i][0], stored_keys, stored_values))


@pytest.mark.parametrize("size", [1e38, 1e-38])
def test_a_reused_block_may_hold_the_largest_and_smallest_numbers(
    pages: QuantizedPages, dtype: torch.dtype, size: float
) -> None:
    case = QuantizedCase(pages, dtype)
    ordinary = case.sequences
    case.sequences = [[queries, keys * size, values * size] for queries, keys, values in ordinary]
    case.run(case.attend)
    assert all(torch.isfinite(each).all() for i in range(5) for each in case.stored(i))
    case.sequences = ordinary
    lengths = [len(table) for table in case.tables]
    case.tables = np.split(
        np.concatenate(case.tables)[::-1].copy(), np.cumsum(lengths)[:-1]
    )  # each block has a new owner
    case.assert_attends_to_what_is_stored()


def test_a_copied_block_gives_the_same_result(pages: QuantizedPages, dtype: torch.dtype) -> None:
    case = QuantizedCase(pages, dtype)
    case.run(case.attend)
    begin, end = (0, 0, 0, 70, 0), (0, 0, 0, 71, 0)
    metadata, _ = case.metadata(begin, end)
    flat = [kind[70:71] for kind in case.sequences[3]]
    before = case.attend(PagedStep(case.attention, case.cache, metadata), flat)
    old = int(case.tables[3][-1])
    case.cache.copy_blocks(torch.tensor([old]), torch.tensor([case.spare]))
    case.cache.keys[0][old] = case.cache.values[0][old] = 0
    case.tables[3][-1] = case.spare
    metadata, _ = case.metadata(begin, end)
    after = case.attend(PagedStep(case.attention, case.cache, metadata), flat)
    assert torch.equal(before, after)


def test_a_checkpoints_scales_are_those_of_its_heads_and_clamp_what_is_larger(dtype: torch.dtype) -> None:
    shape = LayerShape(2, 64, 64, key_scales=(0.5, 0.001), value_scales=(2.0, 0.25))
    case = QuantizedCase(FLOAT8_PAGES, dtype, shape)
    outputs = case.run(case.attend)
    for i, output in enumerate(outputs):
        queries, keys, values = case.sequences[i]
        stored_keys, stored_values, key_scales, value_scales = case.stored(i)
        assert torch.equal(key_scales[:, :, 0], torch.tensor(shape.key_scales).expand(len(keys), 2))
        assert torch.equal(value_scales[:, :, 0], torch.tensor(shape.value_scales).expand(len(keys), 2))
        clamped = torch.stack([keys[:, 0], keys[:, 1].clamp(-0.448, 0.448)], dim=1)
        assert_encoded(FLOAT8_PAGES, stored_keys, key_scales, clamped, slack=1e-2)
        assert_encoded(FLOAT8_PAGES, stored_values, value_scales, values)
        assert_same(output, case.expected(queries, stored_keys, stored_values))


@pytest.mark.long
@pytest.mark.parametrize("dtype_name", build.MACROS)
@pytest.mark.parametrize("architecture", ["x86-64", "x86-64-v3"])
def test_processors_without_wide_vectors_compute_the_same(
    dtype_name: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = build.find_compiler()
    if platform.machine() != "x86_64" or compiler is None:
        pytest.skip("another processor, or no compiler")
    flags = tuple(flag for flag in build.FLAGS if flag != "-O3")
    monkeypatch.setattr(build, "FLAGS", (*flags, f"-march={architecture}", "-O1", NOT_INLINED))
    monkeypatch.setattr(build, "SOURCES", ("paged_attention.c", "tiled_attention.c"))
    library = declare_prototypes(
        ctypes.CDLL(str(build.compile_library(compiler, build.MACROS[dtype_name], tmp_path / "a.so")))
    )
    dtype = getattr(torch, dtype_name)
    for pages in FORMATS:
        for shape, groups in ((LayerShape(2, 64, 64), 3), (LayerShape(1, 80, 48), 1), (LayerShape(1, 16, 16), 8)):
            attention = CpuAttention(library, dtype, pages)
            case = QuantizedCase(pages, dtype, shape, attention=attention, num_groups=groups)
            case.lanes_per_group = 16
            case.assert_attends_to_what_is_stored()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_takes_a_byte_for_each_number_and_four_for_each_scale(
    pages: QuantizedPages, dtype: torch.dtype
) -> None:
    layers = [LayerShape(4, 64, 64), LayerShape(2, 96, 32)]
    attention = choose_attention(CPU, dtype, layers, [], 16, pages.name)
    expected = 16 * (4 * 2 * (64 + 4) + 2 * (96 + 4 + 32 + 4))
    assert bytes_per_block(layers, attention.block_shapes, 16, attention.page_dtype) == expected
