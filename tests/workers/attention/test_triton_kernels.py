"""The Triton attention kernels agree with a softmax in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.support.triton_device import DEVICE, NAN, TOLERANCES, assert_same, random, triton_kernels
from workers.kv_cache.kv_quantization import FLOAT8_PAGES, INT8_PAGES, QuantizedPages

attend, store, LayerPages = triton_kernels.attend, triton_kernels.store, triton_kernels.LayerPages
choose_num_segments, choose_tiles = triton_kernels.choose_num_segments, triton_kernels.choose_tiles
make_workspace = triton_kernels.make_workspace

pytestmark = pytest.mark.usefixtures("triton_kernels_run")


class Case:
    """Sequences of (num_queries, length) in scattered pages. Length 0 is padding."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        heads: tuple[int, int] = (6, 2),
        dims: tuple[int, int] = (64, 64),
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        width: int | None = None,
    ) -> None:
        num_heads, num_kv_heads = heads
        self.sequences = sequences
        self.width = width or -(-max(length for _, length in sequences) // block_size) + 2
        self.num_tokens = sum(num_queries for num_queries, _ in sequences)
        used = [-(-length // block_size) for _, length in sequences]
        num_blocks = sum(used) + 1
        self.keys = random(num_blocks, block_size, num_kv_heads, dims[0], dtype=dtype)
        self.values = random(num_blocks, block_size, num_kv_heads, dims[1], dtype=dtype)
        # The last block belongs to no sequence, but entries beyond a sequence's length name it. A kernel that reads it,
        # or multiplies its numbers by zero, gets NaN.
        self.keys[-1], self.values[-1] = NAN, NAN
        free = iter(torch.randperm(num_blocks - 1).tolist())
        table = [[next(free) for _ in range(count)] + [num_blocks - 1] * (self.width - count) for count in used]
        self.block_table = torch.tensor(table, dtype=torch.int32, device=DEVICE)
        # Strided like queries that are a part of a QKV product.
        self.queries = random(self.num_tokens, num_heads * dims[0] + 3, dtype=dtype)[:, 3:].unflatten(1, (-1, dims[0]))
        self.scale = 2.0 * dims[0] ** -0.5
        self.scales: tuple[Tensor | None, Tensor | None] = (None, None)  # of keys, of values: [..., num_kv_heads]

    def quantize(self, dtype: torch.dtype) -> None:
        """Replace the pages by random codes of this dtype, with random scales."""
        scales = [0.01 + torch.rand(*pages.shape[:3], device=DEVICE) for pages in (self.keys, self.values)]
        for each in scales:
            each[-1] = NAN
        if dtype is torch.int8:
            self.keys, self.values = (
                torch.randint_like(pages, -127, 128).to(dtype) for pages in (self.keys, self.values)
            )
        else:
            self.keys, self.values = (pages.to(dtype) for pages in (self.keys, self.values))
        self.scales = (scales[0] / self.keys.float().nan_to_num().abs().max(), scales[1])

    def output(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        num_heads, value_dim = self.queries.shape[1], self.values.shape[-1]
        output = torch.full((self.num_tokens, num_heads, value_dim), NAN, dtype=self.queries.dtype, device=DEVICE)
        query_starts = [0, *itertools.accumulate(num_queries for num_queries, _ in self.sequences)]
        attend(
            self.queries,
            LayerPages(self.keys, self.values, *self.scales),
            torch.tensor(query_starts, dtype=torch.int32, device=DEVICE),
            torch.tensor([length for _, length in self.sequences], dtype=torch.int32, device=DEVICE),
            self.block_table,
            output,
            self.scale,
            make_workspace(num_heads, self.values.shape[2], value_dim, DEVICE),
            window,
            softcap,
            sinks,
        )
        return output

    def expected(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        """Return the result in float64, computed one query at a time."""
        outputs, token = [], -1
        group = self.queries.shape[1] // self.keys.shape[2]
        keys_of_all, values_of_all = (
            pages.double() if scales is None else pages.double() * scales[..., None].double()
            for pages, scales in zip((self.keys, self.values), self.scales, strict=True)
        )
        for (num_queries, length), table in zip(self.sequences, self.block_table.long(), strict=True):
            keys, values = (
                numbers[table].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
                for numbers in (keys_of_all, values_of_all)
            )
            for end in range(length - num_queries + 1, length + 1):
                token += 1
                seen = slice(max(0, end - window) if window else 0, max(end, 0))
                scores = torch.einsum("hd,lhd->hl", self.queries[token].double(), keys[seen]) * self.scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
                weights = torch.softmax(scores, dim=1)[:, : len(values[seen])]
                outputs.append(torch.einsum("hl,lhd->hd", weights, values[seen]))
        return torch.stack(outputs)


MIXED = [(1, 1), (7, 7), (1, 90), (33, 50), (2, 130), (1, 16), (40, 110), (1, 0), (1, 33)]
DECODES = [(1, length) for length in (1, 200, 16, 17, 0, 64, 65, 127)]


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        (torch.float32, (6, 2)),
        (torch.float32, (8, 1)),
        (torch.float16, (1, 1)),
        (torch.float16, (6, 2)),
        (torch.bfloat16, (4, 1)),
        (torch.bfloat16, (6, 2)),
    ],
)
def test_queries_see_the_keys_up_to_their_own_position(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    case = Case(MIXED, heads, dtype=dtype)
    assert_same(case.output(), case.expected())


@pytest.mark.parametrize(
    ("dims", "block_size"),
    [((128, 128), 16), ((80, 80), 32), ((16, 16), 4), ((64, 32), 256), ((24, 40), 16), ((256, 256), 32)],
)
def test_head_dimensions_and_block_sizes_may_be_any(dims: tuple[int, int], block_size: int) -> None:
    case = Case([(5, 70), (1, 33), (1, 0)], (4, 2), dims, block_size)
    assert_same(case.output(), case.expected())


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, True), (None, 3.0, False), (1, None, True), (20, None, False), (20, 3.0, True), (64, 3.0, False)],
)
@pytest.mark.parametrize("sequences", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_windows_soft_caps_and_sinks(
    sequences: list[tuple[int, int]], window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    sinks = random(4) if with_sinks else None
    case = Case(sequences, (4, 1), (16, 16), dtype=torch.float16, width=32)
    assert_same(case.output(window, softcap, sinks), case.expected(window, softcap, sinks))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 40), (torch.bfloat16, 16), (torch.float16, 300)])
def test_a_sequence_may_have_fewer_keys_than_programs_that_share_them(dtype: torch.dtype, width: int) -> None:
    case = Case(DECODES, (3, 1), dtype=dtype, width=width)
    assert choose_num_segments(len(DECODES), 1, width * 16) == {16: 2, 40: 4, 300: 32}[width]
    output = case.output()
    assert_same(output, case.expected())
    assert (output[4] == 0).all(), "the output of padding is zero"


def test_large_scores_do_not_overflow() -> None:
    case = Case([(20, 60), (1, 60), (1, 5)], dtype=torch.float16)
    case.scale = 40.0
    assert_same(case.output(), case.expected(), 3e-3)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("sequences", "block_size"), [(MIXED, 16), (DECODES, 16), (DECODES, 128)])
def test_codes_are_multiplied_by_the_scales_of_their_vectors(
    sequences: list[tuple[int, int]], block_size: int, dtype: torch.dtype, codes: torch.dtype
) -> None:
    case = Case(sequences, (4, 2), (32, 16), block_size, dtype)
    case.quantize(codes)
    assert_same(case.output(), case.expected())


def test_tiny_scales_of_values_are_not_lost_in_float16() -> None:
    case = Case(DECODES, (4, 2), (32, 32), dtype=torch.float16)
    case.quantize(torch.int8)
    assert case.scales[1] is not None
    case.scales = (case.scales[0], case.scales[1] * 1e-4)
    assert_same(case.output(), case.expected(), 5e-3)


def test_segments_are_a_power_of_two_and_fit_the_workspace() -> None:
    for num_sequences, num_kv_heads, width in itertools.product(range(1, 300), (1, 2, 3, 8, 32), (1, 100, 4000)):
        num_segments = choose_num_segments(num_sequences, num_kv_heads, 16 * width)
        assert num_segments in (1, 2, 4, 8, 16, 32) and num_segments * 128 <= max(16 * width, 128)
        if num_segments > 1:
            workspace = make_workspace(4 * num_kv_heads, num_kv_heads, 8, torch.device("cpu"))
            assert num_sequences * 4 * num_kv_heads * num_segments * (8 + 2) <= workspace.numel()
    assert choose_num_segments(1, 8, 8192) == 32 and choose_num_segments(64, 8, 8192) == 1


def test_a_tile_holds_all_query_heads_of_a_key_head() -> None:
    for num_queries, group_size, head_dim, itemsize in itertools.product(
        (1, 2, 50, 9999), (1, 3, 7, 71), (64, 128, 256, 512), (2, 4)
    ):
        tiles = choose_tiles(num_queries, group_size, head_dim, itemsize)
        assert tiles.rows >= max(group_size, 16) and tiles.rows & (tiles.rows - 1) == 0 and tiles.keys >= 16


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_keys_and_values_are_stored_in_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    num_tokens, num_kv_heads, key_dim, value_dim = 7, 3, 20, 12
    row = random(num_tokens, num_kv_heads * (key_dim + value_dim), dtype=dtype)
    row[2, 5], row[2, 6], row[3, -1] = float("inf"), NAN, -float("inf")
    keys, values = row.split([num_kv_heads * key_dim, num_kv_heads * value_dim], dim=1)
    keys, values = keys.unflatten(1, (num_kv_heads, -1)), values.unflatten(1, (num_kv_heads, -1))
    key_pages = torch.full((5, 4, num_kv_heads, key_dim), 7.0, dtype=dtype, device=DEVICE)
    value_pages = torch.full((5, 4, num_kv_heads, value_dim), 7.0, dtype=dtype, device=DEVICE)
    cells = torch.tensor([3, 19, 4, 5, -1, 0, -1], device=DEVICE)
    store(keys, values, LayerPages(key_pages, value_pages), cells)
    for pages, stored in ((key_pages, keys), (value_pages, values)):
        expected = torch.full_like(pages, 7.0)
        expected.flatten(0, 1)[cells[cells >= 0]] = stored[cells >= 0].nan_to_num(0.0, 0.0, 0.0)
        assert torch.equal(pages, expected)


def test_numbers_beyond_the_range_of_a_page_are_zero() -> None:
    keys = torch.tensor([1.5, 70_000.0, -1e6, 832.0, -3.0, NAN, float("inf"), 0.25], device=DEVICE).view(2, 1, 4)
    pages = torch.zeros(2, 1, 2, 1, 4, dtype=torch.float16, device=DEVICE)
    store(keys, keys, LayerPages(pages[0], pages[1]), torch.tensor([0, 1], device=DEVICE))
    assert pages[0].flatten().tolist() == pages[1].flatten().tolist() == [1.5, 0, 0, 832, -3, 0, 0, 0.25]


def assert_rounded(pages: QuantizedPages, read: Tensor, exact: Tensor) -> None:
    """Check that numbers were rounded to the nearest codes of their vectors [..., dim]."""
    largest = exact.abs().amax(dim=-1, keepdim=True)
    if pages is INT8_PAGES:
        assert ((read - exact).abs() <= 1.001 * largest / 254 + 1e-6).all()
    else:  # the interpreter loses the carry of a mantissa that is rounded up to the next power of two
        is_near = (read - exact).abs() <= 1.001 * (exact.abs() / 16 + largest * 2**-18) + 1e-6
        assert is_near.double().mean() >= (1.0 if DEVICE.type == "cuda" else 0.9)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("pages", [INT8_PAGES, FLOAT8_PAGES], ids=lambda pages: pages.name)
def test_vectors_are_stored_as_codes_with_a_scale_that_fits_them(pages: QuantizedPages, dtype: torch.dtype) -> None:
    num_kv_heads, dims, cells = 3, (20, 12), torch.tensor([3, 19, 4, 5, -1, 0], device=DEVICE)
    vectors = [(1e3 * random(6, num_kv_heads, dim)).to(dtype) for dim in dims]
    vectors[0][2, 1, 5], vectors[1][3, 0, -1], vectors[1][5, 2] = NAN, float("inf"), 0.0
    codes = [torch.zeros(5, 4, num_kv_heads, dim, dtype=torch.uint8, device=DEVICE) for dim in dims]
    codes = [each.view(pages.code_dtype) for each in codes]
    scales = [torch.zeros(5, 4, num_kv_heads, device=DEVICE) for _ in dims]
    store(vectors[0], vectors[1], LayerPages(codes[0], codes[1], scales[0], scales[1]), cells)
    is_stored = cells >= 0
    for each, found, of_vectors in zip(vectors, codes, scales, strict=True):
        exact = each.double().nan_to_num(0.0, 0.0, 0.0)[is_stored]
        read = (found.float() * of_vectors[..., None]).flatten(0, 1)
        largest = exact.abs().amax(dim=-1)
        assert of_vectors.flatten(0, 1)[cells[is_stored]].allclose((largest / pages.largest_code).float(), atol=1e-30)
        assert_rounded(pages, read[cells[is_stored]], exact)
        assert (read[[1, 2, 6, 7, 8, 18]] == 0).all(), "other slots were written"


def test_numbers_beyond_a_given_scale_are_clamped() -> None:
    keys = torch.tensor([1.5, 70_000.0, -1e6, 832.0, -3.0, NAN, float("inf"), 0.25], device=DEVICE).view(2, 1, 4)
    codes = torch.zeros(2, 1, 2, 1, 4, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.zeros(2, 1, 2, 1, device=DEVICE)
    given = torch.tensor([[2.0], [0.5]], device=DEVICE)
    store(keys, keys, LayerPages(*codes, *scales, *given), torch.tensor([0, 1], device=DEVICE))
    assert codes[0].float().flatten().tolist() == [0.75, 448, -448, 416, -1.5, 0, 0, 0.125]
    assert codes[1].float().flatten().tolist() == [3, 448, -448, 448, -6, 0, 0, 0.5]
    assert scales.flatten().tolist() == [2.0, 2.0, 0.5, 0.5]
