"""Claims about the Triton kernels, against float64: on a GPU where there is one, else in Triton's interpreter.

The interpreter runs programs one after the other, in numpy. It rounds to bfloat16 by cutting off, and to float8 in a
way of its own, so for these the claims are weaker here than on a GPU. That the kernels compile is the claim of
test_triton_compilation.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from servekit.sampling_params import SamplingParams
from tests.triton_device import DEVICE, triton_attention, triton_layers, triton_sampling
from workers import sampler
from workers.sampler import SamplingRow, uniform

attend, store = triton_attention.attend, triton_attention.store
choose_num_segments, choose_tiles = triton_attention.choose_num_segments, triton_attention.choose_tiles
make_workspace = triton_attention.make_workspace
add_norm, rotate_and_store, swiglu = triton_layers.add_norm, triton_layers.rotate_and_store, triton_layers.swiglu
MIN_TEMPERATURE, TILE_SIZE = triton_sampling.MIN_TEMPERATURE, triton_sampling.TILE_SIZE
Filters, sample = triton_sampling.Filters, triton_sampling.sample

# Of a vector's norm. Half a unit in the last place, and for bfloat16 a whole one where the interpreter cuts off.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
NAN = float("nan")


@pytest.fixture(autouse=True)
def _kernels_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(7)
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):  # infinities are meant, and numpy warns of them
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_same(output: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Row by row, by the distance as a share of the length."""
    expected = expected.double()
    distances = (output.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    assert distances.max() <= (tolerance or TOLERANCES[output.dtype]), distances


class Case:
    """Rows of (num_queries, length) in pages that lie anywhere. Length 0 is a padded row."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: tuple[int, int] = (6, 2),
        dims: tuple[int, int] = (64, 64),
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        width: int | None = None,
    ) -> None:
        num_heads, num_kv_heads = heads
        self.rows, self.width = rows, width or -(-max(length for _, length in rows) // block_size) + 2
        self.num_tokens = sum(num_queries for num_queries, _ in rows)
        used = [-(-length // block_size) for _, length in rows]
        num_blocks = sum(used) + 1
        self.keys = random(num_blocks, block_size, num_kv_heads, dims[0], dtype=dtype)
        self.values = random(num_blocks, block_size, num_kv_heads, dims[1], dtype=dtype)
        # The last block is in no row, though entries beyond a row's length say so: who looks there, or multiplies
        # what stands there by zero, gets NaN.
        self.keys[-1], self.values[-1] = NAN, NAN
        free = iter(torch.randperm(num_blocks - 1).tolist())
        table = [[next(free) for _ in range(count)] + [num_blocks - 1] * (self.width - count) for count in used]
        self.block_table = torch.tensor(table, dtype=torch.int32, device=DEVICE)
        # As queries lie in one product with keys and values.
        self.queries = random(self.num_tokens, num_heads * dims[0] + 3, dtype=dtype)[:, 3:].unflatten(1, (-1, dims[0]))
        self.scale = 2.0 * dims[0] ** -0.5
        self.key_scale = self.value_scale = 1.0

    def output(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        num_heads, value_dim = self.queries.shape[1], self.values.shape[-1]
        output = torch.full((self.num_tokens, num_heads, value_dim), NAN, dtype=self.queries.dtype, device=DEVICE)
        query_starts = [0, *itertools.accumulate(num_queries for num_queries, _ in self.rows)]
        attend(
            *(self.queries, self.keys, self.values, torch.tensor(query_starts, dtype=torch.int32, device=DEVICE)),
            torch.tensor([length for _, length in self.rows], dtype=torch.int32, device=DEVICE),
            *(self.block_table, output, self.scale, make_workspace(num_heads, self.values.shape[2], value_dim, DEVICE)),
            *(window, softcap, sinks, self.key_scale, self.value_scale),
        )
        return output

    def expected(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
        """In float64, one query at a time."""
        outputs, token = [], -1
        group = self.queries.shape[1] // self.keys.shape[2]
        for (num_queries, length), table in zip(self.rows, self.block_table.long(), strict=True):
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
        *((torch.float32, heads) for heads in [(6, 2), (8, 1)]),
        *((torch.float16, heads) for heads in [(1, 1), (6, 2)]),
        *((torch.bfloat16, heads) for heads in [(4, 1), (6, 2)]),
    ],
)
def test_queries_of_all_rows_see_the_keys_before_them(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    case = Case(MIXED, heads, dtype=dtype)
    assert_same(case.output(), case.expected())


@pytest.mark.parametrize(
    ("dims", "block_size"),
    [((128, 128), 16), ((80, 80), 32), ((16, 16), 4), ((64, 32), 256), ((24, 40), 16), ((256, 256), 32)],
)
def test_heads_and_blocks_may_have_any_size(dims: tuple[int, int], block_size: int) -> None:
    case = Case([(5, 70), (1, 33), (1, 0)], (4, 2), dims, block_size)
    assert_same(case.output(), case.expected())


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, True), (None, 3.0, False), (1, None, True), (20, None, False), (20, 3.0, True), (64, 3.0, False)],
)
@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_windows_soft_caps_and_sinks(
    rows: list[tuple[int, int]], window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    sinks = random(4) if with_sinks else None
    case = Case(rows, (4, 1), (16, 16), dtype=torch.float16, width=32)
    assert_same(case.output(window, softcap, sinks), case.expected(window, softcap, sinks))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 40), (torch.bfloat16, 16), (torch.float16, 300)])
def test_keys_of_a_decode_row_may_be_split_among_more_programs_than_there_are_keys(
    dtype: torch.dtype, width: int
) -> None:
    case = Case(DECODES, (3, 1), dtype=dtype, width=width)
    assert choose_num_segments(len(DECODES), 1, width * 16) == {16: 2, 40: 4, 300: 32}[width]
    assert_same(case.output(), case.expected())
    assert (case.output()[4] == 0).all(), "a padded row is zero"


def test_large_scores_do_not_overflow() -> None:
    case = Case([(20, 60), (1, 60), (1, 5)], dtype=torch.float16)
    case.scale = 40.0
    assert_same(case.output(), case.expected(), 3e-3)


def test_pages_of_float8_are_multiplied_by_their_scales() -> None:
    case = Case([(9, 40), (1, 60)], dtype=torch.float16)
    case.keys, case.values = (pages.to(torch.float8_e4m3fn) for pages in (case.keys, case.values))
    case.key_scale, case.value_scale = 0.5, 3.0
    assert_same(case.output(), case.expected(), 2e-3)


def test_how_a_step_is_split_depends_on_few_things_and_fits_the_workspace() -> None:
    for num_rows, num_kv_heads, width in itertools.product(range(1, 300), (1, 2, 3, 8, 32), (1, 100, 4000)):
        num_segments = choose_num_segments(num_rows, num_kv_heads, 16 * width)
        assert num_segments in (1, 2, 4, 8, 16, 32) and num_segments * 128 <= max(16 * width, 128)
        if num_segments > 1:
            workspace = make_workspace(4 * num_kv_heads, num_kv_heads, 8, torch.device("cpu"))
            assert num_rows * 4 * num_kv_heads * num_segments * (8 + 2) <= workspace.numel()
    assert choose_num_segments(1, 8, 8192) == 32 and choose_num_segments(64, 8, 8192) == 1


def test_a_tile_has_room_for_a_group_of_heads() -> None:
    for num_queries, group_size, head_dim, itemsize in itertools.product(
        (1, 2, 50, 9999), (1, 3, 7, 71), (64, 128, 256, 512), (2, 4)
    ):
        tiles = choose_tiles(num_queries, group_size, head_dim, itemsize)
        assert tiles.rows >= max(group_size, 16) and tiles.rows & (tiles.rows - 1) == 0 and tiles.keys >= 16


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_keys_and_values_are_stored_in_their_cells_and_nowhere_else(dtype: torch.dtype) -> None:
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


def test_what_a_page_cannot_hold_is_zero_and_in_float8_the_largest() -> None:
    keys = torch.tensor([1.5, 70_000.0, -1e6, 832.0, -3.0, NAN, float("inf"), 0.25], device=DEVICE).view(2, 1, 4)
    cells = torch.tensor([0, 1], device=DEVICE)
    pages = torch.zeros(2, 1, 2, 1, 4, dtype=torch.float16, device=DEVICE)
    store(keys, keys, pages[0], pages[1], cells)
    assert pages[0].flatten().tolist() == pages[1].flatten().tolist() == [1.5, 0, 0, 832, -3, 0, 0, 0.25]
    small = torch.zeros(2, 1, 2, 1, 4, dtype=torch.float8_e4m3fn, device=DEVICE)
    store(keys, keys, small[0], small[1], cells, 2.0, 0.5)
    assert small[0].float().flatten().tolist() == [
        0.75,
        448,
        -448,
        416,
        -1.5,
        0,
        0,
        0.125,
    ]
    assert small[1].float().flatten().tolist() == [3, 448, -448, 448, -6, 0, 0, 0.5]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("with_delta", [True, False])
def test_the_norm_is_of_the_sum_as_it_was_rounded(dtype: torch.dtype, with_delta: bool) -> None:
    residual, delta = random(5, 100, dtype=dtype), (30 * random(5, 130, dtype=dtype))[:, 9:109] if with_delta else None
    weight, before = 1 + random(100, dtype=dtype) / 4, residual.clone()
    normed = add_norm(residual, delta, weight, 1e-5)
    if delta is None:
        assert torch.equal(residual, before)
    elif dtype is torch.bfloat16:
        assert_same(residual, before.double() + delta.double())
    else:
        assert torch.equal(residual, before + delta)
    wide = residual.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_same(normed, expected)
    if dtype is torch.float16:  # rounded once, so it is the nearest, but for what float32 takes for a tie
        assert (normed == expected.half()).double().mean() > 0.99


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_heads", "head_dim", "with_norms"), [(6, 64, False), (2, 80, True), (8, 128, True)])
def test_queries_are_rotated_and_keys_too_on_their_way_to_the_pages(
    dtype: torch.dtype, num_heads: int, head_dim: int, with_norms: bool
) -> None:
    """As transformers' own functions have it, in float64."""
    num_tokens, num_kv_heads, block_size, eps = 6, 2, 4, 1e-6
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = (10 * random(num_tokens, head_dim // 2)).repeat(1, 2)
    norms = [1 + random(head_dim, dtype=dtype) / 4 for _ in range(2)] if with_norms else [None, None]
    pages = torch.zeros(2, 3, block_size, num_kv_heads, head_dim, dtype=dtype, device=DEVICE)
    cells = torch.tensor([9, 2, -1, 11, 0, 5], device=DEVICE)

    heads = qkv.clone().unflatten(1, (-1, head_dim)).double().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    normed = [
        each if norm is None else each * torch.rsqrt(each.square().mean(-1, keepdim=True) + eps) * norm.double()
        for each, norm in zip(heads, norms, strict=False)
    ]
    wide = angles.double()
    queries, keys = apply_rotary_pos_emb(*normed, wide.cos(), wide.sin(), unsqueeze_dim=1)
    before = qkv.clone()
    rotate_and_store(
        *(qkv, num_heads, num_kv_heads, head_dim, wide.cos().float(), wide.sin().float()),
        *(*norms, eps, pages[0], pages[1], cells),
    )
    assert_same(qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim)), queries)
    assert torch.equal(qkv[:, num_heads * head_dim :], before[:, num_heads * head_dim :])
    is_stored = cells >= 0
    assert_same(pages[0].flatten(0, 1)[cells[is_stored]], keys[is_stored])
    assert torch.equal(pages[1].flatten(0, 1)[cells[is_stored]].double(), heads[2][is_stored])
    assert (pages.flatten(1, 2)[:, [1, 3, 4, 6, 7, 8, 10]] == 0).all()


def test_what_overflows_in_a_rotation_is_stored_as_zero() -> None:
    qkv = torch.full((2, 3 * 16), 60_000.0, dtype=torch.float16, device=DEVICE)
    qkv[0, -1] = NAN
    qkv[1, 24:32] *= -1
    pages = torch.full((2, 1, 4, 1, 16), 7.0, dtype=torch.float16, device=DEVICE)
    eighth_turn = torch.full((2, 16), 0.5**0.5, device=DEVICE)
    cells = torch.tensor([0, 2], device=DEVICE)
    rotate_and_store(qkv, 1, 1, 16, eighth_turn, eighth_turn, None, None, 0.0, pages[0], pages[1], cells)
    assert (pages[0, 0, [0, 2]] == 0).all()  # one half is 60,000 (cos - sin), the other more than float16 has
    assert pages[1, 0, 0, 0].tolist() == [60_000.0] * 15 + [0.0]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_swiglu_gates_with_the_first_half(dtype: torch.dtype) -> None:
    gate_up = 5 * random(3, 2 * 1100, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_same(swiglu(gate_up), torch.nn.functional.silu(gate) * up)


def on_device(values: list[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_what_is_greedy_is_agreed_on() -> None:
    assert MIN_TEMPERATURE == sampler.MIN_TEMPERATURE


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = random(5, 2 * TILE_SIZE + 100)
    logits[1, [70, TILE_SIZE, TILE_SIZE + 1]] = 9.0
    logits[2, [TILE_SIZE + 5, 2 * TILE_SIZE + 5]] = 9.0
    logits[3, :] = -float("inf")
    logits[4, :] = -5.0
    token_ids = sample(logits, torch.zeros(5, device=DEVICE), torch.full_like(logits[:, 0], 0.9).double())
    assert token_ids.tolist() == logits.argmax(dim=-1).tolist()
    assert token_ids.tolist()[1:] == [70, TILE_SIZE + 5, 0, 0]


def distribution(logits: Tensor, row: SamplingRow) -> tuple[Tensor, Tensor]:
    """What the sampler of the CPU inverts: tokens in their order, and their probabilities in float64."""
    _, probabilities, _ = sampler._probabilities(logits[None].cpu(), [row], [0])
    order = torch.arange(len(logits))
    if row.is_filtered:
        probabilities, ranks = probabilities.sort(dim=-1, descending=True, stable=True)
        probabilities, order = sampler._keep_top(probabilities, [row.sampling]), ranks[0]
    return order, probabilities[0] / probabilities.sum()


def assert_inverts(token_id: int, number: float, logits: Tensor, row: SamplingRow) -> None:
    """The token is the one of this number, or of one that is nearer than what sums in float32 are off by."""
    order, probabilities = distribution(logits, row)
    rank = int((order == token_id).nonzero())
    assert probabilities[rank] > 0, f"{token_id} is not among what is kept"
    end = float(probabilities[: rank + 1].sum())
    begin = end - float(probabilities[rank])
    assert begin - 1e-6 <= number <= end + 1e-6, (begin, number, end)


def sampled(logits: Tensor, rows: list[SamplingRow], numbers: list[float]) -> list[int]:
    params = [row.sampling for row in rows]
    filters = Filters(
        on_device([each.top_k for each in params], torch.int32),
        on_device([each.top_p for each in params], torch.float32),
        on_device([each.min_p for each in params], torch.float32),
    )
    temperatures = on_device([each.temperature for each in params], torch.float32)
    has_filters = any(row.is_filtered for row in rows)
    token_ids = sample(logits, temperatures, on_device(numbers, torch.float64), filters if has_filters else None)
    return [int(each) for each in token_ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 50.0])
def test_temperature_inverts_the_distribution(dtype: torch.dtype, temperature: float) -> None:
    numbers = [0.0, 1.0 - 2**-53, 0.5, *(uniform(3, position) for position in range(13))]
    logits = (3 * random(1, 2 * TILE_SIZE + 100)).to(dtype).expand(len(numbers), -1).contiguous()
    logits[:, ::3] = -float("inf")  # what a grammar excludes
    row = SamplingRow(SamplingParams(max_tokens=1, temperature=temperature), 0)
    for token_id, number in zip(sampled(logits, [row] * len(numbers), numbers), numbers, strict=True):
        assert_inverts(token_id, number, logits[0].float(), row)
        assert token_id % 3


def test_temperature_has_each_token_between_its_boundaries() -> None:
    logits, row = random(1, 30), SamplingRow(SamplingParams(max_tokens=1, temperature=0.8), 0)
    ends = distribution(logits[0], row)[1].cumsum(0)
    numbers = [float(end) + shift for end in ends[:-1] for shift in (-3e-6, 3e-6)]
    expected = [rank + shift for rank in range(29) for shift in (0, 1)]
    assert sampled(logits.expand(len(numbers), -1).contiguous(), [row] * len(numbers), numbers) == expected


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_number_on_a_boundary_is_the_next_token_s(top_k: int) -> None:
    row = SamplingRow(SamplingParams(max_tokens=1, temperature=0.5, top_k=top_k), 0)
    assert sampled(torch.zeros(4, 4, device=DEVICE), [row] * 4, [0.0, 0.25, 0.5, 0.75]) == [0, 1, 2, 3]


FILTERS: list[dict[str, float]] = [
    {"top_k": 1}, {"top_k": 5}, {"top_k": 40}, {"top_k": 100_000}, {"top_p": 0.0}, {"top_p": 0.1}, {"top_p": 0.9},
    {"top_p": 0.9999}, {"min_p": 0.001}, {"min_p": 0.3}, {"min_p": 1.0}, {"top_k": 30, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02}, {"top_p": 0.7, "min_p": 0.001}, {"temperature": 0.0}, {},
]  # fmt: skip


@pytest.mark.parametrize("spacing", [0.0, 0.5], ids=["distinct", "ties"])
def test_top_k_top_p_and_min_p_keep_what_the_cpu_keeps(spacing: float) -> None:
    chosen = [{"max_tokens": 1, "temperature": (0.7, 2.0)[i % 2], **each} for i, each in enumerate(FILTERS)]
    numbers = [uniform(5, i) for i in range(len(chosen))]
    for last in FILTERS[11:13]:
        chosen += [{"max_tokens": 1, **last}] * 2
        numbers += [0.0, 1 - 2**-53]
    rows = [SamplingRow(SamplingParams(**each), 0) for each in chosen]
    logits = 3 * random(len(rows), TILE_SIZE + 500)
    logits[:, ::5] = -float("inf")
    if spacing:
        logits = (logits / spacing).round() * spacing  # -0 among them
    for row, row_logits, number, token_id in zip(rows, logits, numbers, sampled(logits, rows, numbers), strict=True):
        if row.is_greedy:
            assert token_id == int(row_logits.argmax())
        else:
            assert_inverts(token_id, number, row_logits, row)


def test_filters_find_their_place_among_logits_of_all_magnitudes() -> None:
    magnitudes = 10.0 ** (60 * torch.rand(300, device=DEVICE) - 30)
    logits = (magnitudes * torch.randn(300, device=DEVICE).sign()).expand(4, -1).contiguous()
    order, top_k = logits[0].argsort(descending=True).tolist(), (1, 9, 150, 260)
    # So hot that all are alike in probability: then the number says which of those kept it is.
    rows = [SamplingRow(SamplingParams(max_tokens=1, temperature=1e33, top_k=each), 0) for each in top_k]
    assert sampled(logits, rows, [1 - 0.5 / each for each in top_k]) == [order[each - 1] for each in top_k]


def test_filters_know_equals_apart_by_their_order() -> None:
    """Halves and quarters, where a sum ends exactly at the boundary and one more token would be one too many."""
    logits = torch.tensor([0.25, 0.25, 0.5], device=DEVICE).log().expand(6, -1).contiguous()
    rows = [SamplingRow(SamplingParams(max_tokens=1, temperature=1.0, top_p=0.75), 0)] * 3
    rows += [SamplingRow(SamplingParams(max_tokens=1, temperature=1.0, top_k=2), 0)] * 2
    rows += [SamplingRow(SamplingParams(max_tokens=1, temperature=1.0, top_p=0.5), 0)]
    assert sampled(logits, rows, [0.1, 0.7, 0.99, 0.1, 0.99, 0.99]) == [2, 0, 0, 2, 0, 2]


def test_rows_of_nothing_that_can_be_still_give_a_token() -> None:
    logits = torch.full((4, 50), -float("inf"), device=DEVICE)
    logits[1], logits[2, 3], logits[3, 4:] = NAN, float("inf"), torch.finfo(torch.float32).min
    for top_p in (1.0, 0.5):
        rows = [SamplingRow(SamplingParams(max_tokens=1, temperature=1.0, top_p=top_p), 0)] * 4
        assert all(0 <= token_id < 50 for token_id in sampled(logits, rows, [0.5] * 4))
