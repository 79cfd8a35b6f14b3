"""The Triton attention kernels agree with a softmax in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.support.triton_device import DEVICE, NAN, TOLERANCES, assert_same, random, triton_kernels

attend, store = triton_kernels.attend, triton_kernels.store
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
        self.key_scale = self.value_scale = 1.0

    def output(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        num_heads, value_dim = self.queries.shape[1], self.values.shape[-1]
        output = torch.full((self.num_tokens, num_heads, value_dim), NAN, dtype=self.queries.dtype, device=DEVICE)
        query_starts = [0, *itertools.accumulate(num_queries for num_queries, _ in self.sequences)]
        attend(
            self.queries,
            self.keys,
            self.values,
            torch.tensor(query_starts, dtype=torch.int32, device=DEVICE),
            torch.tensor([length for _, length in self.sequences], dtype=torch.int32, device=DEVICE),
            self.block_table,
            output,
            self.scale,
            make_workspace(num_heads, self.values.shape[2], value_dim, DEVICE),
            window,
            softcap,
            sinks,
            self.key_scale,
            self.value_scale,
        )
        return output

    def expected(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        """Return the result in float64, computed one query at a time."""
        outputs, token = [], -1
        group = self.queries.shape[1] // self.keys.shape[2]
        for (num_queries, length), table in zip(self.sequences, self.block_table.long(), strict=True):
            keys, values = (
                pages[table].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1) * scale
                for pages, scale in ((self.keys, self.key_scale), (self.values, self.value_scale))
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


def test_pages_of_float8_are_multiplied_by_their_scales() -> None:
    case = Case([(9, 40), (1, 60)], dtype=torch.float16)
    case.keys, case.values = (pages.to(torch.float8_e4m3fn) for pages in (case.keys, case.values))
    case.key_scale, case.value_scale = 0.5, 3.0
    assert_same(case.output(), case.expected(), 2e-3)


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
    store(keys, values, key_pages, value_pages, cells)
    for pages, stored in ((key_pages, keys), (value_pages, values)):
        expected = torch.full_like(pages, 7.0)
        expected.flatten(0, 1)[cells[cells >= 0]] = stored[cells >= 0].nan_to_num(0.0, 0.0, 0.0)
        assert torch.equal(pages, expected)


def test_numbers_beyond_the_range_of_a_page_are_zero_or_in_float8_clamped() -> None:
    keys = torch.tensor([1.5, 70_000.0, -1e6, 832.0, -3.0, NAN, float("inf"), 0.25], device=DEVICE).view(2, 1, 4)
    cells = torch.tensor([0, 1], device=DEVICE)
    pages = torch.zeros(2, 1, 2, 1, 4, dtype=torch.float16, device=DEVICE)
    store(keys, keys, pages[0], pages[1], cells)
    assert pages[0].flatten().tolist() == pages[1].flatten().tolist() == [1.5, 0, 0, 832, -3, 0, 0, 0.25]
    small = torch.zeros(2, 1, 2, 1, 4, dtype=torch.float8_e4m3fn, device=DEVICE)
    store(keys, keys, small[0], small[1], cells, 2.0, 0.5)
    assert small[0].float().flatten().tolist() == [0.75, 448, -448, 416, -1.5, 0, 0, 0.125]
    assert small[1].float().flatten().tolist() == [3, 448, -448, 448, -6, 0, 0, 0.5]
