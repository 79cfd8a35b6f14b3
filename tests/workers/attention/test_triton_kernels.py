"""The Triton attention kernels agree with a softmax in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.support.triton_device import DEVICE, NAN, TOLERANCES, assert_same, random, triton_kernels
from workers.kv_cache.kv_quantization import FLOAT8_PAGES, INT8_PAGES, QuantizedPages

attend, store, LayerPages = triton_kernels.attend, triton_kernels.store, triton_kernels.LayerPages
choose_tiles, WorkLists = triton_kernels.choose_tiles, triton_kernels.WorkLists

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
        self.num_programs = triton_kernels.TARGET_PROGRAMS
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
        lengths = torch.tensor([length for _, length in self.sequences], dtype=torch.int32, device=DEVICE)
        counts = [num_queries for num_queries, _ in self.sequences]
        query_starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
        attend(
            self.queries,
            LayerPages(self.keys, self.values, *self.scales),
            query_starts,
            lengths,
            self.block_table,
            output,
            self.scale,
            window,
            softcap,
            sinks,
            (min(counts), max(counts)),
            WorkLists(query_starts, lengths, self.num_programs),
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


@pytest.mark.parametrize(("num_programs", "dtype"), [(1, torch.float16), (6, torch.float32), (64, torch.bfloat16)])
def test_keys_may_be_divided_among_any_number_of_programs(
    num_programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "MIN_PART_KEYS", 1)
    monkeypatch.setattr(triton_kernels, "REDUCED_PARTS", 4)
    window = None if num_programs == 6 else 300
    for others in ([(1, 500)], [(3, 500), (4, 90), (5, 5)], [(1, 500), (40, 200), (2, 300)]):
        case = Case([*DECODES, *others], (3, 1), (16, 16), dtype=dtype)
        case.num_programs = num_programs
        output = case.output(window)
        assert_same(output, case.expected(window))
        assert (output[4] == 0).all(), "the output of padding is zero"


@pytest.mark.parametrize("seed", range(4))
def test_a_work_list_divides_all_keys_into_parts_of_equal_size(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "MIN_PART_KEYS", (128, 1)[seed % 2])
    generator = torch.Generator().manual_seed(seed)
    num_sequences, num_extra = (1, 5, 33, 64)[seed], (16, 3, 8, 40)[seed]
    lengths = torch.randint(0, 900, (num_sequences,), generator=generator, dtype=torch.int32)
    lengths[0] = 5000
    num_queries = torch.randint(0, 7, (num_sequences,), generator=generator).minimum(lengths)
    num_queries[0] = 1
    query_starts = torch.cat([torch.zeros(1), num_queries.cumsum(0)]).int()
    window = None if seed < 2 else 700
    lists = WorkLists(query_starts.to(DEVICE), lengths.to(DEVICE), 3 * num_extra)
    work = lists.of_keys(4, 3, window, 32)
    assert lists.of_keys(4, 3, window, 32) is work
    *starts, num_parts, tiles_each = work.part_starts.tolist()
    owners = work.sequence_of_program.tolist()
    assert len(owners) == num_sequences + num_extra >= num_parts, "there is a program for every part"
    tiles = []
    for count, length in zip(num_queries.tolist(), lengths.tolist(), strict=True):
        begin = max(0, length - count + 1 - window) // 32 * 32 if window else 0  # what the first query sees
        tiles.append(-(-(length - begin) // 32) if 1 <= count <= 4 else 0)
    assert tiles_each == max(-(-sum(tiles) // num_extra), (4, 1)[seed % 2])
    assert [stop - start for start, stop in itertools.pairwise([*starts, num_parts])] == [
        -(-count // tiles_each) for count in tiles
    ]
    expected = [sequence for sequence, count in enumerate(tiles) for _ in range(-(-count // tiles_each))]
    assert owners == expected + [num_sequences] * (len(owners) - num_parts)


def test_a_work_list_divides_the_queries_of_prompts_into_tiles() -> None:
    num_queries = [1, 40, 0, 7, 8, 16, 3, 129]
    query_starts = torch.tensor([0, *itertools.accumulate(num_queries)], dtype=torch.int32, device=DEVICE)
    lists = WorkLists(query_starts, query_starts[1:] + 5)
    work = lists.of_queries(8, sum(num_queries), 16)
    num_tiles = [-(-count // 16) if count >= 8 else 0 for count in num_queries]
    assert work.part_starts.tolist()[:-1] == [0, *itertools.accumulate(num_tiles)]
    expected = [sequence for sequence, count in enumerate(num_tiles) for _ in range(count)]
    owners = work.sequence_of_program.tolist()
    assert owners == expected + [len(num_queries)] * (len(owners) - len(expected))


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
