"""Attention over KV pages on a GPU, in Triton: one kernel stores keys and values, one attends to them.

All sequences of a step attend in one launch, whether they compute one query or thousands. The query heads that share a
key head are rows of one matrix. So a tile of keys is read once for all of them, and the tensor cores have work even
when a sequence computes a single query. A query sees a range of positions, so tiles before a sliding window and after
the diagonal are never read. The softmax is online (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018, section 3), in float32 and in powers of two.

Sequences of few queries have little to compute and many keys to read. With one program each, most of the GPU would be
idle in a step of few sequences, and, beside a long one, in a step of many. So the keys of all these sequences together
are divided among a given number of programs, about equally, by a kernel that runs once a step. Another kernel combines
the results of parts that belong to one sequence (Dao et al., "Flash-Decoding for long-context inference", 2023).

Grids and kernels depend on shapes alone, never on the contents of a tensor. So CUDA graphs can capture a launch, and
the host never waits for the device. The first call compiles, so it must come before the capture.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# Kernels are in Triton's language, for which mypy has no types.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
# Whether a function is compiled or interpreted is decided when it is defined.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Of a decode step, beside one for each sequence and key head: as many as the 132 multiprocessors of an H100 hold at
# once, four each by their registers.
TARGET_PROGRAMS = 528
MIN_PART_KEYS = 128  # that a program takes: with fewer, its own overhead is longer
MAX_FEW_QUERIES = 8  # of a sequence whose keys are divided, if a tile holds so many
MAX_TILE_ROWS = 128
REDUCED_PARTS = 32  # that are combined at a time
PLANNED_PROGRAMS = 16  # that get their part at a time

_log2_e = tl.constexpr(LOG2_E)
_infinity = tl.constexpr(float("inf"))
_largest_float8 = tl.constexpr(448.0)
_largest_int8 = tl.constexpr(127.0)
_smallest_scale = tl.constexpr(1e-30)  # its reciprocal is finite
_rounds_to_integer = tl.constexpr(1.5 * 2**23)  # a float32 near it has no fraction; Triton has no `rint`


@triton.jit
def finite_or_zero(values):
    """Return values in float32, zeros in place of what is not finite."""
    wide = values.to(tl.float32)
    return tl.where(tl.abs(wide) < _infinity, wide, 0.0)  # the comparison is false for NaN


@triton.jit
def to_page(values, dtype: tl.constexpr):
    """Convert values to the dtype of a plain page. A value that is not finite, in either dtype, becomes zero."""
    wide = finite_or_zero(values)
    return tl.where(tl.abs(wide.to(dtype).to(tl.float32)) < _infinity, wide, 0.0).to(dtype)


@triton.jit
def scale_of(largest, dtype: tl.constexpr):
    """Return the scale of a vector whose largest magnitude is `largest`; see kv_quantization.QuantizedPages."""
    largest_code: tl.constexpr = _largest_float8 if dtype == tl.float8e4nv else _largest_int8
    return tl.maximum(largest / largest_code, _smallest_scale)


@triton.jit
def to_codes(values, scale, dtype: tl.constexpr):
    """Return the codes, of `dtype`, of finite values. They are clamped, because a given scale may be too small."""
    largest_code: tl.constexpr = _largest_float8 if dtype == tl.float8e4nv else _largest_int8
    codes = tl.minimum(tl.maximum(values / scale, -largest_code), largest_code)
    if dtype == tl.int8:
        codes = (codes + _rounds_to_integer) - _rounds_to_integer
    return codes.to(dtype)


@triton.jit
def _store_heads(
    vectors, pages, scales, given_scales, block, offset, token_offset, vector_head_stride, page_block_stride,
    page_offset_stride, page_head_stride, scale_block_stride,
    num_kv_heads: tl.constexpr, dim: tl.constexpr, padded_heads: tl.constexpr, padded_dim: tl.constexpr,
):  # fmt: skip
    """Store the vectors of one token, all heads at once, in their pages. scales: None for plain pages."""
    dtype: tl.constexpr = pages.dtype.element_ty
    heads, dims = tl.arange(0, padded_heads), tl.arange(0, padded_dim)[None, :]
    inside = (heads < num_kv_heads)[:, None] & (dims < dim)
    pointers = vectors + token_offset + heads[:, None] * vector_head_stride + dims
    target = pages + block * page_block_stride + offset * page_offset_stride + heads[:, None] * page_head_stride + dims
    values = tl.load(pointers, mask=inside, other=0.0)
    if scales is None:
        tl.store(target, to_page(values, dtype), mask=inside)
    else:
        values = finite_or_zero(values)
        if given_scales is None:
            scale = scale_of(tl.max(tl.abs(values), axis=1), dtype)
        else:
            scale = tl.load(given_scales + heads, mask=heads < num_kv_heads, other=1.0)
        tl.store(target, to_codes(values, scale[:, None], dtype), mask=inside)
        scale_target = scales + block * scale_block_stride + offset * num_kv_heads + heads
        tl.store(scale_target, scale, mask=heads < num_kv_heads)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _store_kernel(
    keys, values, key_pages, value_pages, key_scales, value_scales, given_key_scales, given_value_scales, slot_mapping,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    key_block_stride, key_offset_stride, key_page_head_stride,
    value_block_stride, value_offset_stride, value_page_head_stride, key_scale_stride, value_scale_stride,
    num_kv_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, block_size: tl.constexpr,
    padded_heads: tl.constexpr, padded_key_dim: tl.constexpr, padded_value_dim: tl.constexpr,
):  # fmt: skip
    """Store the keys and values of one token. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block, offset = slot // block_size, slot % block_size
    _store_heads(
        keys, key_pages, key_scales, given_key_scales, block, offset, token * key_token_stride, key_head_stride,
        key_block_stride, key_offset_stride, key_page_head_stride, key_scale_stride,
        num_kv_heads, key_dim, padded_heads, padded_key_dim,
    )  # fmt: skip
    _store_heads(
        values, value_pages, value_scales, given_value_scales, block, offset, token * value_token_stride,
        value_head_stride, value_block_stride, value_offset_stride, value_page_head_stride, value_scale_stride,
        num_kv_heads, value_dim, padded_heads, padded_value_dim,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer, as the kernels take them.

    Pages in the model's dtype have no scales. Pages of int8 or float8_e4m3fn hold codes, and a number is its code's
    value times the scale of its vector. float8 needs a GPU of compute capability 8.9.
    """

    keys: Tensor  # [num_blocks, block_size, num_kv_heads, key_dim]
    values: Tensor  # [num_blocks, block_size, num_kv_heads, value_dim]
    key_scales: Tensor | None = None  # [num_blocks, block_size, num_kv_heads] float32; a block's are dense
    value_scales: Tensor | None = None
    # [num_kv_heads] float32: the scales with which vectors are stored; None: those that fit each vector
    given_key_scales: Tensor | None = None
    given_value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        num_kv_heads = self.keys.shape[2]
        assert self.keys.stride(-1) == self.values.stride(-1) == 1
        for scales in (self.key_scales, self.value_scales):
            assert scales is None or scales.stride()[1:] == (num_kv_heads, 1)

    @property
    def scale_strides(self) -> tuple[int, int]:
        """From block to block, of the scales of keys and of values."""
        if self.key_scales is None or self.value_scales is None:
            return 0, 0
        return self.key_scales.stride(0), self.value_scales.stride(0)


def store(keys: Tensor, values: Tensor, pages: LayerPages, slot_mapping: Tensor) -> None:
    """Write keys and values [num_tokens, num_kv_heads, dim] into their pages.

    slot_mapping: [num_tokens] int64, block * block_size + offset of each token; if it is negative, nothing is stored.
    Every cell stays finite (see KVCache).
    """
    num_tokens, num_kv_heads, key_dim = keys.shape
    value_dim = values.shape[-1]
    assert keys.stride(-1) == values.stride(-1) == 1
    assert slot_mapping.shape == (num_tokens,) and slot_mapping.is_contiguous()
    if num_tokens == 0:
        return
    _store_kernel[(num_tokens,)](
        keys, values, pages.keys, pages.values, pages.key_scales, pages.value_scales,
        pages.given_key_scales, pages.given_value_scales, slot_mapping,
        *keys.stride()[:2], *values.stride()[:2], *pages.keys.stride()[:3], *pages.values.stride()[:3],
        *pages.scale_strides, num_kv_heads, key_dim, value_dim, pages.keys.shape[1],
        triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _keys_of_tile(first_position, last_position, window, tile_keys: tl.constexpr):
    """Return [begin, end), the positions that the queries see; `begin` is the first position of a tile of keys."""
    begin = first_position * 0
    if window is not None:
        begin = tl.maximum(first_position - window + 1, 0) // tile_keys * tile_keys
    return begin, last_position + 1


@triton.jit(
    do_not_specialize=["num_sequences", "num_programs", "min_queries", "max_queries", "window", "tile_queries"],
    do_not_specialize_on_alignment=["query_starts", "lengths", "part_starts", "sequence_of_program"],
)
def _plan_kernel(
    query_starts, lengths, part_starts, sequence_of_program, num_sequences, num_programs, min_queries, max_queries,
    window, tile_queries, divides_keys: tl.constexpr, tile_keys: tl.constexpr, min_tiles: tl.constexpr,
    padded_sequences: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Divide sequences of min_queries to max_queries queries into parts, each for one program: see `WorkList`.

    Grid: one program. If divides_keys, a part is the same number of tiles of keys, but for the last one of each
    sequence. With T tiles in all, and as many a part as T divided by the programs beyond one for each sequence, there
    are enough programs: a sequence of t tiles has less than t / (tiles a part) + 1 parts. Otherwise, a part is a tile
    of queries.
    """
    sequences = tl.arange(0, padded_sequences)
    exists = sequences < num_sequences
    first_token = tl.load(query_starts + sequences, mask=exists, other=0)
    num_queries = tl.load(query_starts + sequences + 1, mask=exists, other=0) - first_token
    is_chosen = (num_queries >= min_queries) & (num_queries <= max_queries)
    if divides_keys:
        length = tl.load(lengths + sequences, mask=exists, other=0)
        begin, end = _keys_of_tile(length - num_queries, length - 1, window, tile_keys)
        num_tiles = tl.where(is_chosen, tl.cdiv(tl.maximum(end - begin, 0), tile_keys), 0)
        num_extra = num_programs - num_sequences
        tiles_each = tl.maximum(tl.cdiv(tl.sum(num_tiles, axis=0), num_extra), min_tiles)
        num_parts = tl.cdiv(num_tiles, tiles_each)
        tl.store(part_starts + num_sequences + 1, tiles_each)
    else:
        num_parts = tl.where(is_chosen, tl.cdiv(num_queries, tile_queries), 0)
    ends = tl.cumsum(num_parts, axis=0)
    tl.store(part_starts + sequences + 1, ends, mask=exists)
    tl.store(part_starts, 0)
    for first in range(0, num_programs, block):
        programs = first + tl.arange(0, block)
        # Sequences whose parts all come before; for programs without a part, that is all of them.
        before = exists[None, :] & (ends[None, :] <= programs[:, None])
        tl.store(sequence_of_program + programs, tl.sum(before.to(tl.int32), axis=1), mask=programs < num_programs)


@triton.jit
def _visit_keys(
    accumulator, maximum, total, query, positions, begin, end, num_keys, key_pages, value_pages, key_scales,
    value_scales, table_row, scale, window, softcap, key_block_stride, key_offset_stride, value_block_stride,
    value_offset_stride, key_scale_stride, value_scale_stride, num_kv_heads,
    key_dim: tl.constexpr, value_dim: tl.constexpr, padded_key_dim: tl.constexpr, padded_value_dim: tl.constexpr,
    block_size: tl.constexpr, tile_keys: tl.constexpr, dot_dtype: tl.constexpr, value_dot_dtype: tl.constexpr,
    on_boundary: tl.constexpr,
):  # fmt: skip
    """Attend to positions [begin, end), one tile after the other; `begin` is the first position of a tile.

    `on_boundary`: some of the queries do not see some of the keys, so scores are masked. Otherwise all see all of them.
    """
    key_dims, value_dims = tl.arange(0, padded_key_dim)[None, :], tl.arange(0, padded_value_dim)[None, :]
    for start in range(begin, end, tile_keys):
        key_positions = start + tl.arange(0, tile_keys)
        exists = key_positions < num_keys
        if block_size >= tile_keys:  # both are powers of two, so the tile is within one block
            block = tl.load(table_row + start // block_size).to(tl.int64)
            offsets = start % block_size + tl.arange(0, tile_keys)
        else:
            block = tl.load(table_row + key_positions // block_size, mask=exists, other=0).to(tl.int64)
            offsets = key_positions % block_size
        key_cells = block * key_block_stride + offsets * key_offset_stride
        value_cells = block * value_block_stride + offsets * value_offset_stride
        key_pointers = key_pages + key_cells[:, None] + key_dims
        value_pointers = value_pages + value_cells[:, None] + value_dims
        if on_boundary or padded_key_dim > key_dim or padded_value_dim > value_dim:
            key = tl.load(key_pointers, mask=exists[:, None] & (key_dims < key_dim), other=0.0)
            value = tl.load(value_pointers, mask=exists[:, None] & (value_dims < value_dim), other=0.0)
        else:
            key = tl.load(key_pointers)
            value = tl.load(value_pointers)
        # Without a soft cap, `scale` has the factor that makes powers of two of powers of e: one product less.
        scores = tl.dot(query, tl.trans(key.to(dot_dtype)), input_precision="ieee") * scale
        if key_scales is not None:  # codes are exact in the dtype of the product, so their scale can follow it
            key_scale = tl.load(key_scales + block * key_scale_stride + offsets * num_kv_heads, mask=exists, other=0.0)
            scores = scores * key_scale[None, :]
        if softcap is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is accurate at both ends
            exponential = tl.exp2(scores * (2.0 * _log2_e / softcap))
            scores = (softcap - 2.0 * softcap / (exponential + 1.0)) * _log2_e
        if on_boundary:
            visible = key_positions[None, :] <= positions[:, None]
            if window is not None:
                visible &= positions[:, None] - key_positions[None, :] < window
            scores = tl.where(visible, scores, -_infinity)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # The maximum of a query that has seen no key yet is -inf, and -inf - -inf is NaN.
        base = tl.where(new_maximum == -_infinity, 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, axis=1)
        accumulator = accumulator * decay[:, None]
        if value_scales is not None:
            value_scale_pointers = value_scales + block * value_scale_stride + offsets * num_kv_heads
            weights = weights * tl.load(value_scale_pointers, mask=exists, other=0.0)[None, :]
        weights, value = weights.to(value_dot_dtype), value.to(value_dot_dtype)
        accumulator = tl.dot(weights, value, accumulator, input_precision="ieee")
        maximum = new_maximum
    return accumulator, maximum, total


# A kernel is compiled anew where the alignment of an argument differs. What comes from a step begins anywhere, and none
# of it is loaded in vectors.
@triton.jit(
    do_not_specialize=["num_sequences", "window", "table_stride"],
    do_not_specialize_on_alignment=[
        "partial_maximum",
        "partial_total",
        "block_table",
        "query_starts",
        "lengths",
        "part_starts",
        "sequence_of_program",
    ],
)
def _attend_kernel(
    output, partial_output, partial_maximum, partial_total, part_starts, sequence_of_program, queries, key_pages,
    value_pages, key_scales, value_scales, block_table, query_starts, lengths, sinks, num_sequences,
    scale, window, softcap, table_stride, query_token_stride, query_head_stride,
    key_block_stride, key_offset_stride, key_head_stride,
    value_block_stride, value_offset_stride, value_head_stride, key_scale_stride, value_scale_stride,
    output_token_stride, output_head_stride,
    group_size: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, padded_key_dim: tl.constexpr,
    padded_value_dim: tl.constexpr, block_size: tl.constexpr, tile_rows: tl.constexpr, tile_keys: tl.constexpr,
    part_queries: tl.constexpr, dot_dtype: tl.constexpr, value_dot_dtype: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries of one key head. Grid: (programs of the work list, num_kv_heads).

    A tile has tile_rows rows: tile_queries queries times the group_size heads that share the key head. If part_queries
    is 0, a part of a sequence is a tile of its queries. Otherwise it is a part of its keys, for its queries, of which
    there are part_queries or fewer. The result of a sequence's only part goes to `output`; of several parts, each
    writes a partial result for `_reduce_kernel`.

    The kernel is long because its stages share most of their variables. To split it would pass some twenty of them.
    """
    tile_queries: tl.constexpr = tile_rows // group_size
    kv_head = tl.program_id(1)

    # Find the sequence, the queries, and the keys of this program.
    sequence = tl.load(sequence_of_program + tl.program_id(0))
    if sequence >= num_sequences:
        return
    first_part = tl.load(part_starts + sequence)
    part = tl.program_id(0) - first_part
    first_token = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_token
    first_query = part * tile_queries
    if part_queries > 0:
        num_parts = tl.load(part_starts + sequence + 1) - first_part
        first_query = part * 0
    first_position = tl.load(lengths + sequence) - num_queries + first_query
    last_position = first_position + tl.minimum(tile_queries, num_queries - first_query) - 1
    begin, end = _keys_of_tile(first_position, last_position, window, tile_keys)
    num_keys = end
    if part_queries > 0:
        part_keys = tl.load(part_starts + num_sequences + 1) * tile_keys
        begin = begin + part * part_keys
        end = tl.minimum(begin + part_keys, num_keys)

    # Load the queries.
    rows = tl.arange(0, tile_rows)
    query_of_row = first_query + rows // group_size
    heads = kv_head * group_size + rows % group_size
    is_query = (rows < tile_queries * group_size) & (query_of_row < num_queries)
    tokens = (first_token + query_of_row).to(tl.int64)
    key_dims, value_dims = tl.arange(0, padded_key_dim)[None, :], tl.arange(0, padded_value_dim)[None, :]
    query_pointers = queries + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + key_dims
    query = tl.load(query_pointers, mask=is_query[:, None] & (key_dims < key_dim), other=0.0).to(dot_dtype)
    positions = first_position - first_query + query_of_row

    # Attend.
    maximum = tl.full([tile_rows], -_infinity, tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    accumulator = tl.zeros([tile_rows, padded_value_dim], tl.float32)
    if sinks is not None:  # a sink is a key that every query sees, and whose value is zero
        sink = tl.load(sinks + heads, mask=is_query, other=0.0).to(tl.float32) * _log2_e
        if part_queries > 0:  # one of the parts has the sink
            maximum = tl.where(part == 0, sink, maximum)
            total = tl.where(part == 0, 1.0, total)
        else:
            maximum = sink
            total += 1.0
    table_row = block_table + sequence.to(tl.int64) * table_stride
    key_pages += kv_head.to(tl.int64) * key_head_stride
    value_pages += kv_head.to(tl.int64) * value_head_stride
    if key_scales is not None:
        key_scales += kv_head
        value_scales += kv_head
    num_kv_heads = tl.num_programs(1)
    if part_queries > 0:  # one loop has one pipeline to fill, and masking is free where memory bandwidth is the limit
        accumulator, maximum, total = _visit_keys(
            accumulator, maximum, total, query, positions, begin, end, num_keys, key_pages, value_pages, key_scales,
            value_scales, table_row, scale, window, softcap, key_block_stride, key_offset_stride, value_block_stride,
            value_offset_stride, key_scale_stride, value_scale_stride, num_kv_heads, key_dim, value_dim,
            padded_key_dim, padded_value_dim, block_size, tile_keys, dot_dtype, value_dot_dtype, True,
        )  # fmt: skip
    else:
        inner_begin = begin  # from inner_begin to inner_end, all queries see all keys
        inner_end = tl.maximum((first_position + 1) // tile_keys * tile_keys, begin)
        if window is not None:
            inner_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), tile_keys) * tile_keys
            inner_end = tl.maximum(inner_begin, inner_end)
            accumulator, maximum, total = _visit_keys(
                accumulator, maximum, total, query, positions, begin, tl.minimum(inner_begin, end), num_keys,
                key_pages, value_pages, key_scales, value_scales, table_row, scale, window, softcap,
                key_block_stride, key_offset_stride, value_block_stride, value_offset_stride, key_scale_stride,
                value_scale_stride, num_kv_heads, key_dim, value_dim, padded_key_dim, padded_value_dim, block_size,
                tile_keys, dot_dtype, value_dot_dtype, True,
            )  # fmt: skip
        accumulator, maximum, total = _visit_keys(
            accumulator, maximum, total, query, positions, inner_begin, inner_end, num_keys, key_pages, value_pages,
            key_scales, value_scales, table_row, scale, window, softcap, key_block_stride, key_offset_stride,
            value_block_stride, value_offset_stride, key_scale_stride, value_scale_stride, num_kv_heads, key_dim,
            value_dim, padded_key_dim, padded_value_dim, block_size, tile_keys, dot_dtype, value_dot_dtype, False,
        )  # fmt: skip
        accumulator, maximum, total = _visit_keys(
            accumulator, maximum, total, query, positions, inner_end, end, num_keys, key_pages, value_pages, key_scales,
            value_scales, table_row, scale, window, softcap, key_block_stride, key_offset_stride, value_block_stride,
            value_offset_stride, key_scale_stride, value_scale_stride, num_kv_heads, key_dim, value_dim,
            padded_key_dim, padded_value_dim, block_size, tile_keys, dot_dtype, value_dot_dtype, True,
        )  # fmt: skip

    # Store the result.
    inside = is_query[:, None] & (value_dims < value_dim)
    if part_queries > 0:
        if num_parts > 1:
            cells = (tl.program_id(0).to(tl.int64) * part_queries + query_of_row) * (num_kv_heads * group_size) + heads
            tl.store(partial_output + cells[:, None] * value_dim + value_dims, accumulator, mask=inside)
            tl.store(partial_maximum + cells, maximum, mask=is_query)
            tl.store(partial_total + cells, total, mask=is_query)
        inside &= num_parts == 1
    result = accumulator * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    pointers = output + tokens[:, None] * output_token_stride + heads[:, None] * output_head_stride + value_dims
    tl.store(pointers, result.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["partial_maximum", "partial_total", "part_starts", "query_starts"])
def _reduce_kernel(
    output, partial_output, partial_maximum, partial_total, part_starts, query_starts, output_token_stride,
    output_head_stride, part_queries: tl.constexpr, value_dim: tl.constexpr, padded_value_dim: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one sequence's queries, of one head. Grid: (num_sequences, num_heads).

    The only part of a sequence has stored the result itself. A padding sequence has no part, and its result is zero.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    first_part = tl.load(part_starts + sequence)
    num_parts = tl.load(part_starts + sequence + 1) - first_part
    first_token = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_token
    if (num_parts == 1) | (num_queries > part_queries):
        return
    dims = tl.arange(0, padded_value_dim)
    for query in range(num_queries):
        highest = tl.full([1], -_infinity, tl.float32)
        total = tl.zeros([1], tl.float32)
        result = tl.zeros([padded_value_dim], tl.float32)
        for first in range(0, num_parts, block):
            parts = first + tl.arange(0, block)
            exists = parts < num_parts
            cells = ((first_part + parts).to(tl.int64) * part_queries + query) * tl.num_programs(1) + head
            maximum = tl.load(partial_maximum + cells, mask=exists, other=-_infinity)
            new_highest = tl.maximum(highest, tl.max(maximum, axis=0))
            base = tl.where(new_highest == -_infinity, 0.0, new_highest)
            decay, weights = tl.exp2(highest - base), tl.exp2(maximum - base)
            total = total * decay + tl.sum(weights * tl.load(partial_total + cells, mask=exists, other=0.0), axis=0)
            inside = exists[:, None] & (dims < value_dim)[None, :]
            partial = tl.load(partial_output + cells[:, None] * value_dim + dims[None, :], mask=inside, other=0.0)
            result = result * decay + tl.sum(weights[:, None] * partial, axis=0)
            highest = new_highest
        result = result * (1.0 / tl.where(total > 0.0, total, 1.0))
        token = (first_token + query).to(tl.int64)
        pointers = output + token * output_token_stride + head * output_head_stride + dims
        tl.store(pointers, result.to(output.dtype.element_ty), mask=dims < value_dim)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one program divides attention: `rows` of the query matrix against `keys` at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tiles(num_queries_each: int, group_size: int, head_dim: int, itemsize: int) -> Tiles:
    """Return the tiles for sequences with that many queries.

    group_size: the query heads that share a key head; each query has that many rows. itemsize: of queries, in bytes.

    This is a table. Autotuning would neither be reproducible nor work inside a CUDA graph. What the pipeline holds fits
    the shared memory of every GPU since Ampere, including consumers' (99 KiB). The number of stages is that high
    because some of them load entries of the block table; one to two tiles of keys and values remain in flight.
    """
    rows = max(triton.next_power_of_2(group_size), 16)
    if itemsize == 4:  # without tensor cores, which would round to TF32; this serves tests more than users
        return Tiles(rows, 16, num_warps=4, num_stages=1)
    if num_queries_each == 1:
        return Tiles(rows, 64 if head_dim <= 64 else 32 if head_dim <= 256 else 16, num_warps=4, num_stages=5)
    # Each sequence pays for whole tiles, so they are no larger than the one with the most queries needs.
    max_rows, keys = (MAX_TILE_ROWS, 64) if head_dim <= 128 else (64, 32) if head_dim <= 256 else (32, 16)
    rows = max(rows, min(max_rows, triton.next_power_of_2(num_queries_each * group_size + 1) // 2))
    return Tiles(rows, keys, num_warps=8 if rows >= 128 or head_dim > 128 else 4, num_stages=3)


@dataclass(frozen=True, slots=True)
class WorkList:
    """Which sequence, and which part of it, each program takes. On the device.

    Program p takes part p - part_starts[s] of sequence s = sequence_of_program[p]. For a program that takes none, s is
    num_sequences.
    """

    # [num_sequences + 2] int32: where each sequence's parts begin, their number, and the tiles of a part of keys
    part_starts: Tensor
    sequence_of_program: Tensor  # [num_programs] int32


class WorkLists:
    """The work lists of one step, made when a layer first asks for one. Layers of one kind share it.

    The number of programs depends on shapes alone, so that a CUDA graph can hold the launch.
    """

    def __init__(self, query_starts: Tensor, lengths: Tensor, num_programs: int = TARGET_PROGRAMS) -> None:
        """Take what `attend` takes. num_programs: beside one for each sequence and key head."""
        self._query_starts, self._lengths, self._num_programs = query_starts, lengths, num_programs
        self._made: dict[tuple[int, ...], WorkList] = {}

    def of_keys(self, max_queries: int, num_kv_heads: int, window: int | None, tile_keys: int) -> WorkList:
        """Divide the keys of the sequences of up to max_queries queries, in tiles, about equally."""
        num_programs = len(self._lengths) + max(1, self._num_programs // num_kv_heads)
        key = (0, max_queries, num_programs, window or 0, tile_keys)
        if key not in self._made:
            self._made[key] = self._make(num_programs, 1, max_queries, window, 0, tile_keys)
        return self._made[key]

    def of_queries(self, min_queries: int, num_tokens: int, tile_queries: int) -> WorkList:
        """Divide the sequences of min_queries queries or more into tiles of queries."""
        # Each sequence has less than one tile more than it fills.
        num_programs = num_tokens // tile_queries + min(len(self._lengths), num_tokens // min_queries)
        key = (1, min_queries, num_programs, tile_queries)
        if key not in self._made:
            self._made[key] = self._make(num_programs, min_queries, num_tokens, None, tile_queries, 0)
        return self._made[key]

    def _make(
        self, num_programs: int, fewest: int, most: int, window: int | None, tile_queries: int, tile_keys: int
    ) -> WorkList:
        lengths, num_sequences = self._lengths, len(self._lengths)
        part_starts = torch.empty(num_sequences + 2, dtype=torch.int32, device=lengths.device)
        sequence_of_program = torch.empty(num_programs, dtype=torch.int32, device=lengths.device)
        _plan_kernel[(1,)](
            self._query_starts, lengths, part_starts, sequence_of_program, num_sequences, num_programs, fewest, most,
            window, tile_queries, tile_keys > 0, tile_keys, max(1, MIN_PART_KEYS // max(1, tile_keys)),
            max(16, triton.next_power_of_2(num_sequences)), PLANNED_PROGRAMS,
            num_warps=4,
        )  # fmt: skip
        return WorkList(part_starts, sequence_of_program)


def max_few_queries(group_size: int, tiles: Tiles) -> int:
    """Return how many queries a sequence may have for its keys to be divided among programs."""
    return min(MAX_FEW_QUERIES, tiles.rows // group_size)


def padded_head_dim(key_dim: int, value_dim: int) -> int:
    """Return the larger of two head dimensions, as tiles have it."""
    return int(max(16, triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)))


def attend(
    queries: Tensor,
    pages: LayerPages,
    query_starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    output: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    queries_each: tuple[int, int] | None = None,
    work_lists: WorkLists | None = None,
) -> None:
    """Attend with queries [num_tokens, num_heads, key_dim], and write to `output` [num_tokens, num_heads, value_dim].

    The block size of the pages is a power of two. query_starts: [num_sequences + 1] int32, where each sequence's
    queries begin among the tokens. lengths: [num_sequences] int32, the keys that a sequence's last query sees, itself
    included; its other queries are at the positions before. Length 0 with one query is padding, and its output is zero.
    block_table: [num_sequences, width] int32; entries beyond a sequence's length are not used. queries_each: bounds of
    the number of a sequence's queries, from below and from above; None: 1 and the number of tokens. Sequences of few
    queries, and those of many, are attended to in a launch for each kind: tiles that suit one do not suit the other.

    scale: multiplies the scores before they are soft-capped. window: the number of keys that a query sees, itself
    included. sinks: [num_heads], scores of a key that takes probability and has no value (Xiao et al., "Efficient
    streaming language models with attention sinks", 2024, section 3). work_lists: of this step, which its layers
    share; None: made here.
    """
    num_tokens, num_heads, key_dim = queries.shape
    _, block_size, num_kv_heads, value_dim = pages.values.shape
    num_sequences, group_size = lengths.shape[0], num_heads // num_kv_heads
    assert block_size & (block_size - 1) == 0, f"block_size {block_size} is not a power of two"
    assert queries.stride(-1) == output.stride(-1) == 1
    assert block_table.shape[0] == num_sequences and block_table.stride(1) == 1
    assert query_starts.shape == (num_sequences + 1,)
    assert sinks is None or sinks.is_contiguous()
    if num_tokens == 0:
        return
    padded_key_dim, padded_value_dim = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    padded_dim = padded_head_dim(key_dim, value_dim)
    fewest, most = (1, num_tokens) if queries_each is None else queries_each
    few = choose_tiles(1, group_size, padded_dim, queries.itemsize)
    num_few = max_few_queries(group_size, few)

    def launch(work: WorkList, tiles: Tiles, part_queries: int, *partial: Tensor | None) -> None:
        _attend_kernel[(len(work.sequence_of_program), num_kv_heads)](
            output, *partial, work.part_starts, work.sequence_of_program, queries, pages.keys, pages.values,
            pages.key_scales, pages.value_scales, block_table, query_starts, lengths, sinks, num_sequences,
            scale * LOG2_E if softcap is None else scale, window, softcap,
            block_table.stride(0), *queries.stride()[:2], *pages.keys.stride()[:3], *pages.values.stride()[:3],
            *pages.scale_strides, *output.stride()[:2],
            group_size, key_dim, value_dim, padded_key_dim, padded_value_dim, block_size, tiles.rows, tiles.keys,
            part_queries, dot_dtype_of(queries.dtype), _value_dot_dtype(queries.dtype, pages),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )  # fmt: skip

    work_lists = work_lists or WorkLists(query_starts, lengths)
    if most > num_few:
        tiles = choose_tiles(most, group_size, padded_dim, queries.itemsize)
        launch(work_lists.of_queries(num_few + 1, num_tokens, tiles.rows // group_size), tiles, 0, None, None, None)
    if fewest <= num_few:
        part_queries = 1 if most == 1 else num_few  # partial results take memory for so many
        work = work_lists.of_keys(part_queries, num_kv_heads, window, few.keys)
        num_cells = len(work.sequence_of_program) * part_queries * num_heads
        memory = torch.empty(num_cells * (value_dim + 2), dtype=torch.float32, device=queries.device)
        partial = memory.split([num_cells * value_dim, num_cells, num_cells])
        launch(work, few, part_queries, *partial)
        _reduce_kernel[(num_sequences, num_heads)](
            output, *partial, work.part_starts, query_starts, *output.stride()[:2], part_queries, value_dim,
            padded_value_dim, REDUCED_PARTS,
            num_warps=4,
        )  # fmt: skip


def dot_dtype_of(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype for matrix products. The interpreter keeps bfloat16 as integers, and would multiply those."""
    if dtype is torch.bfloat16:
        return tl.float32 if INTERPRETED else tl.bfloat16
    return {torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def _value_dot_dtype(dtype: torch.dtype, pages: LayerPages) -> tl.dtype:
    """Return the dtype for weights times values. A weight times a value's scale may be below what float16 resolves."""
    is_small = dtype is torch.float16 and pages.value_scales is not None
    return dot_dtype_of(torch.bfloat16 if is_small else dtype)
