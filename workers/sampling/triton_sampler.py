"""Choose token ids from logits on a GPU, in Triton, without sorting the vocabulary.

One program for each tile of each row finds the tile's largest logit and its mass. One program for each row then chooses
a tile, and in it a token, by inverting the cumulative distribution at a given number. Rows with top-k, top-p or min-p
are chosen from the most probable token down, as `sampler.sample` does. Each filter needs one place of the sorted
vocabulary: the token at which a count or a mass, summed from the top, exceeds some number. Such a place is found by
narrowing an interval of logits, with a few sums over the row a turn: about three turns for a mass, eight for a count.
They sum over the probable logits only, where that is enough: an eighth of a row's bytes at most. (That a search for
pivots is quicker than sorting is the idea of "Qrita", arXiv 2602.01518.)

The largest logit of a row counts as mass 1. Sums of single numbers are in float32, those of tiles in float64; what
comes out is the token of the exact distribution, unless the number is within 1e-6 of a boundary between two.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# Kernels are Triton's language, which has no types that mypy knows.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
MIN_TEMPERATURE = 1e-5  # the sampler's
TILE_SIZE = 4096
# The filters look for tokens among the probable ones, which are copied first: KEPT_SIZE of each tile or fewer, whose
# logits are within KEPT_RANGE temperatures of the largest one. Where that leaves out tokens that may be kept, they look
# among all.
KEPT_SIZE, KEPT_RANGE = 512, 12.0
# Turns that divide an interval of logits evenly. Later turns divide it into equal numbers of float32 values. The former
# come near the boundary quickly; the latter end for certain, after 16 more.
NUM_LINEAR_TURNS = 6

_log2_e = tl.constexpr(LOG2_E)
_infinity = tl.constexpr(float("inf"))
_lowest = tl.constexpr(-3.4028234663852886e38)  # of float32
_min_temperature = tl.constexpr(MIN_TEMPERATURE)
_kept_range = tl.constexpr(KEPT_RANGE)
_num_linear_turns = tl.constexpr(NUM_LINEAR_TURNS)


@triton.jit
def _load_tile(row_logits, columns, vocab_size):
    """Return a tile's logits in float32; NaN, and columns beyond the end, are -inf. -0.0 becomes 0.0."""
    values = tl.load(row_logits + columns, mask=columns < vocab_size, other=-_infinity).to(tl.float32)
    return tl.where(values == values, values + 0.0, -_infinity)


@triton.jit
def _mass(values, maximum, sharpness):
    """Return probabilities relative to the largest logit's; `sharpness` is log2(e) / temperature."""
    # -inf minus -inf, in a row without a possible token, would be NaN
    return tl.exp2(tl.where(values == -_infinity, -_infinity, (values - maximum) * sharpness))


@triton.jit
def _sharpness(temperature):
    return _log2_e / tl.maximum(temperature, _min_temperature)


# tile_mass is behind tile_maximum, so its alignment depends on the number of rows.
@triton.jit(do_not_specialize_on_alignment=["tile_mass"])
def _survey_kernel(
    logits, temperatures, tile_maximum, tile_argmax, tile_mass, row_stride, vocab_size, num_tiles,
    tile_size: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * tile_size + tl.arange(0, tile_size)
    values = _load_tile(logits + row * row_stride, columns, vocab_size)
    maximum, place = tl.max(values, axis=0, return_indices=True)  # of equals, the first
    tl.store(tile_maximum + row * num_tiles + tile, maximum)
    tl.store(tile_argmax + row * num_tiles + tile, tile * tile_size + place)
    sharpness = _sharpness(tl.load(temperatures + row))
    tl.store(tile_mass + row * num_tiles + tile, tl.sum(_mass(values, maximum, sharpness), axis=0))


@triton.jit(do_not_specialize_on_alignment=["tile_mass"])
def _choose_kernel(
    logits, temperatures, uniforms, tile_maximum, tile_argmax, tile_mass, token_ids, row_stride, vocab_size, num_tiles,
    padded_tiles: tl.constexpr, tile_size: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, padded_tiles)
    exists = tiles < num_tiles
    maxima = tl.load(tile_maximum + row * num_tiles + tiles, mask=exists, other=-_infinity)
    maximum = tl.max(maxima, axis=0)
    temperature = tl.load(temperatures + row)
    if temperature < _min_temperature:
        first_tile = tl.min(tl.where(exists & (maxima == maximum), tiles, padded_tiles), axis=0)
        tl.store(token_ids + row, tl.load(tile_argmax + row * num_tiles + first_tile).to(tl.int64))
        return
    sharpness = _sharpness(temperature)
    masses = tl.load(tile_mass + row * num_tiles + tiles, mask=exists, other=0.0) * _mass(maxima, maximum, sharpness)
    masses = masses.to(tl.float64)
    target = tl.load(uniforms + row) * tl.sum(masses, axis=0)
    tile = _first_to_pass(masses, target, padded_tiles)
    # How far into the tile: as a share, since its mass is summed anew. In float64, because what a sum in float32 is off
    # by is more than what improbable tokens have, and chance would now and then fall to one of them.
    before = tl.sum(tl.where(tiles < tile, masses, 0.0), axis=0)
    share = (target - before) / tl.sum(tl.where(tiles == tile, masses, 0.0), axis=0)
    values = _load_tile(logits + row * row_stride, tile * tile_size + tl.arange(0, tile_size), vocab_size)
    masses = _mass(values, maximum, sharpness).to(tl.float64)
    place = _first_to_pass(masses, share * tl.sum(masses, axis=0), tile_size)
    tl.store(token_ids + row, (tile * tile_size + place).to(tl.int64))


@triton.jit
def _first_to_pass(masses, target, size: tl.constexpr):
    """Return the first place that has mass and whose cumulative mass exceeds the target; 0 if no place has mass."""
    places = tl.arange(0, size)
    has_mass = masses > 0.0
    passes = has_mass & (tl.cumsum(masses, axis=0) > target)
    last = tl.max(tl.where(has_mass, places, 0), axis=0)  # where rounding let none pass
    return tl.minimum(tl.min(tl.where(passes, places, size), axis=0), last)


@triton.jit
def _as_ordered(value):
    """Return an integer for a float32, such that integers compare as the floats do."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_ordered(ordered):
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _sum_above(
    row_logits, vocab_size, maximum, sharpness, low, high, first, second, third, tile_size: tl.constexpr
):  # fmt: skip
    """Return, of all logits, how many are at least `first`, `second`, `third`, and their masses; and of the logits from
    `low` to below `high`, the smallest, the largest, and how many there are. Bounds are ordered integers.
    """
    low, high = _from_ordered(low), _from_ordered(high)
    first, second, third = _from_ordered(first), _from_ordered(second), _from_ordered(third)
    nothing, no_mass = tl.zeros([tile_size], tl.int32), tl.zeros([tile_size], tl.float32)
    first_count, second_count, third_count, num_inside = nothing, nothing, nothing, nothing
    first_mass, second_mass, third_mass = no_mass, no_mass, no_mass
    smallest, largest = no_mass + _infinity, no_mass - _infinity
    for start in tl.range(0, vocab_size, tile_size, num_stages=3):
        values = _load_tile(row_logits, start + tl.arange(0, tile_size), vocab_size)
        masses = _mass(values, maximum, sharpness)
        first_count += (values >= first).to(tl.int32)
        second_count += (values >= second).to(tl.int32)
        third_count += (values >= third).to(tl.int32)
        first_mass += tl.where(values >= first, masses, 0.0)
        second_mass += tl.where(values >= second, masses, 0.0)
        third_mass += tl.where(values >= third, masses, 0.0)
        is_inside = (values >= low) & (values < high)
        num_inside += is_inside.to(tl.int32)
        smallest = tl.minimum(smallest, tl.where(is_inside, values, _infinity))
        largest = tl.maximum(largest, tl.where(is_inside, values, -_infinity))
    return (
        tl.sum(first_count, axis=0), tl.sum(first_mass.to(tl.float64), axis=0),
        tl.sum(second_count, axis=0), tl.sum(second_mass.to(tl.float64), axis=0),
        tl.sum(third_count, axis=0), tl.sum(third_mass.to(tl.float64), axis=0),
        tl.min(smallest, axis=0), tl.max(largest, axis=0), tl.sum(num_inside, axis=0),
    )  # fmt: skip


@triton.jit
def _descend(
    row_logits, vocab_size, maximum, sharpness, target, lowest, by_count: tl.constexpr, tile_size: tl.constexpr
):  # fmt: skip
    """Find the logit at which the count, or the mass, of the logits from the largest down exceeds `target`.

    Returns (value, count_above, mass_above, num_equal): the logits above `value` do not exceed the target, and together
    with the `num_equal` logits that equal `value` they do. Down to `lowest`, the target is taken to be exceeded.

    Invariant: the value is in [low, high). The sum of the logits from `low` up exceeds the target, that from `high` up
    does not. Each turn sums at three places between them and moves both bounds; when one value is left, it is the
    result. One is always left: where two sums differ, there is a logit between them. (The sum at `lowest` counts as
    exceeding the target, whatever rounding makes of it. So does the sum at a place below all logits of the interval.)
    """
    low, high = _as_ordered(lowest), _as_ordered(maximum) + 1
    turn = low * 0
    count_above, num_equal = turn.to(tl.int32), turn.to(tl.int32)
    mass_above = turn.to(tl.float64)
    smallest, largest = maximum - _infinity, maximum + _infinity
    while smallest < largest:
        first, second, third = _places(low, high, maximum, sharpness, turn)
        (
            first_count, first_mass, second_count, second_mass, third_count, third_mass, smallest, largest, num_equal
        ) = _sum_above(
            row_logits, vocab_size, maximum, sharpness, low, high, first, second, third, tile_size
        )  # fmt: skip
        min_inside = _as_ordered(smallest)
        if by_count:
            passes_first = (first_count > target) | (first <= min_inside)
            passes_second = (second_count > target) | (second <= min_inside)
            passes_third = (third_count > target) | (third <= min_inside)
        else:
            passes_first = (first_mass > target) | (first <= min_inside)
            passes_second = (second_mass > target) | (second <= min_inside)
            passes_third = (third_mass > target) | (third <= min_inside)
        count_below_third = tl.where(passes_second, third_count, tl.where(passes_first, second_count, first_count))
        mass_below_third = tl.where(passes_second, third_mass, tl.where(passes_first, second_mass, first_mass))
        count_above = tl.where(passes_third, count_above, count_below_third)
        mass_above = tl.where(passes_third, mass_above, mass_below_third)
        high_below_third = tl.where(passes_second, third, tl.where(passes_first, second, first))
        high = tl.minimum(tl.where(passes_third, high, high_below_third), _as_ordered(largest) + 1)
        low_below_third = tl.where(passes_second, second, tl.where(passes_first, first, low))
        low = tl.maximum(tl.where(passes_third, third, low_below_third), min_inside)
        turn += 1
    return smallest, count_above, mass_above, num_equal


@triton.jit
def _places(low, high, maximum, sharpness, turn):
    """Choose where to sum: first where probable logits are expected, then evenly, and at last by bits, which ends."""
    low_value = _from_ordered(low)
    step = _from_ordered(high - 1) * 0.25 - low_value * 0.25
    quarter = (high - low) // 4
    temperature = _log2_e / sharpness
    by_value = turn <= _num_linear_turns
    first = tl.where(by_value, _as_ordered(low_value + step), low + quarter)
    second = tl.where(by_value, _as_ordered(low_value + 2.0 * step), low + 2 * quarter)
    third = tl.where(by_value, _as_ordered(low_value + 3.0 * step), low + 3 * quarter)
    first = tl.where(turn == 0, _as_ordered(maximum - 16.0 * temperature), first)
    second = tl.where(turn == 0, _as_ordered(maximum - 8.0 * temperature), second)
    third = tl.where(turn == 0, _as_ordered(maximum - 4.0 * temperature), third)
    first = tl.minimum(tl.maximum(first, low + 1), high - 1)  # so that something moves
    second = tl.minimum(tl.maximum(second, first), high)
    third = tl.minimum(tl.maximum(third, second), high)
    return first, second, third


@triton.jit
def _keep_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, tile_maximum, kept, kept_counts, kept_masses, row_stride, vocab_size,
    num_tiles, padded_tiles: tl.constexpr, tile_size: tl.constexpr, kept_size: tl.constexpr,
):  # fmt: skip
    """Copy the probable logits of one tile, in their order, to `kept` [num_rows, num_tiles, kept_size].

    Places behind them become -inf. If there are more than kept_size, the first ones are copied. Counts and masses are
    of all of them.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    if (temperature < _min_temperature) | ((top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0)):
        return
    tiles = tl.arange(0, padded_tiles)
    maxima = tl.load(tile_maximum + row * num_tiles + tiles, mask=tiles < num_tiles, other=-_infinity)
    maximum = tl.max(maxima, axis=0)
    values = _load_tile(logits + row * row_stride, tile * tile_size + tl.arange(0, tile_size), vocab_size)
    is_kept = values >= maximum - _kept_range * temperature
    places = tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
    count = tl.sum(is_kept.to(tl.int32), axis=0)
    cell = row * num_tiles + tile
    tl.store(kept + cell * kept_size + places, values, mask=is_kept & (places < kept_size))
    others = tl.arange(0, kept_size)
    tl.store(kept + cell * kept_size + others, others * 0.0 - _infinity, mask=others >= count)
    tl.store(kept_counts + cell, count)
    masses = tl.where(is_kept, _mass(values, maximum, _sharpness(temperature)), 0.0)
    tl.store(kept_masses + cell, tl.sum(masses, axis=0))


@triton.jit(do_not_specialize_on_alignment=["tile_mass"])
def _choose_filtered_kernel(
    logits, temperatures, uniforms, top_ks, top_ps, min_ps, tile_maximum, tile_mass, kept, kept_counts, kept_masses,
    token_ids, row_stride, vocab_size, num_tiles, padded_tiles: tl.constexpr, tile_size: tl.constexpr,
    kept_size: tl.constexpr,
):  # fmt: skip
    """Choose one row's token among those that its filters keep."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    if (temperature < _min_temperature) | ((top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0)):
        return
    tiles = tl.arange(0, padded_tiles)
    exists, cells = tiles < num_tiles, row * num_tiles + tiles
    maxima = tl.load(tile_maximum + cells, mask=exists, other=-_infinity)
    maximum = tl.max(maxima, axis=0)
    if (maximum == -_infinity) | (maximum == _infinity):  # there is no choice, and `_choose_kernel` made it
        return
    sharpness = _sharpness(temperature)
    masses = tl.load(tile_mass + cells, mask=exists, other=0.0)
    mass = tl.sum((masses * _mass(maxima, maximum, sharpness)).to(tl.float64), axis=0)
    # Are all tokens that the filters keep among the logits that were copied?
    counts = tl.load(kept_counts + cells, mask=exists, other=0)
    copied_mass = tl.sum(tl.load(kept_masses + cells, mask=exists, other=0.0).to(tl.float64), axis=0)
    is_copied = maximum + tl.log2(min_p) / sharpness >= maximum - _kept_range * temperature
    is_copied = tl.where(top_p < 1.0, copied_mass > mass * top_p * (1.0 + 1e-6), is_copied)
    is_copied = tl.where((top_k > 0) & (top_k < vocab_size), tl.sum(counts, axis=0) >= top_k, is_copied)
    row_logits = logits + row * row_stride
    number = tl.load(uniforms + row)
    if is_copied & (tl.max(counts, axis=0) <= kept_size):
        value, rank = _draw(
            kept + row * num_tiles * kept_size, num_tiles * kept_size, vocab_size, maximum, sharpness, mass, top_k,
            top_p, min_p, number, tile_size,
        )  # fmt: skip
    else:
        value, rank = _draw(
            row_logits, vocab_size, vocab_size, maximum, sharpness, mass, top_k, top_p, min_p, number, tile_size
        )
    tl.store(token_ids + row, _place_of_equal(row_logits, vocab_size, value, rank, tile_size).to(tl.int64))


@triton.jit
def _draw(
    values, size, vocab_size, maximum, sharpness, kept_mass, top_k, top_p, min_p, number, tile_size: tl.constexpr
):  # fmt: skip
    """Return the logit of the token at `number` of what the filters keep, and which of the tokens with it that is.

    `values` are all logits of the row, or at least those that are kept. `kept_mass` is the mass of all logits. What is
    kept are the logits above `min_kept`, and `num_at_min` of those that equal it.
    """
    min_kept, num_at_min = maximum * 0.0 + _lowest, vocab_size + top_k * 0
    if (top_k > 0) & (top_k < vocab_size):
        min_kept, count_above, mass_above, num_equal = _descend(
            values, size, maximum, sharpness, top_k - 1, min_kept, True, tile_size
        )
        num_at_min = tl.minimum(top_k - count_above, num_equal)
        kept_mass = mass_above + num_at_min * _mass(min_kept, maximum, sharpness).to(tl.float64)
    if top_p < 1.0:
        # A little less: a set that reaches top-p exactly must not grow because a sum was rounded.
        target = kept_mass * top_p * (1.0 - 1e-7)
        value, _, mass_above, num_equal = _descend(values, size, maximum, sharpness, target, min_kept, False, tile_size)
        mass_each = tl.maximum(_mass(value, maximum, sharpness), 1e-37).to(tl.float64)
        num_equal = tl.minimum(num_equal, tl.where(value == min_kept, num_at_min, num_equal))
        num_at_min = tl.minimum(tl.maximum(tl.ceil((target - mass_above) / mass_each), 1.0).to(tl.int32), num_equal)
        min_kept = value
        kept_mass = mass_above + num_at_min * mass_each
    min_probable = maximum + tl.log2(min_p) / sharpness
    if min_probable > min_kept:
        place = _as_ordered(min_probable)
        _, kept_mass, _, _, _, _, _, _, _ = _sum_above(
            values, size, maximum, sharpness, place, place, place, place, place, tile_size
        )
        min_kept = min_probable
        num_at_min = vocab_size + top_k * 0

    target = number * kept_mass
    value, _, mass_above, num_equal = _descend(values, size, maximum, sharpness, target, min_kept, False, tile_size)
    mass_each = tl.maximum(_mass(value, maximum, sharpness), 1e-37).to(tl.float64)
    num_equal = tl.minimum(num_equal, tl.where(value == min_kept, num_at_min, num_equal))
    rank = tl.minimum(tl.maximum((target - mass_above) / mass_each, 0.0).to(tl.int32), num_equal - 1)
    return value, rank


@triton.jit
def _place_of_equal(row_logits, vocab_size, value, rank, tile_size: tl.constexpr):
    """Return the token that is number `rank`, from 0, of the tokens with this logit."""
    start = rank * 0
    found = start - 1
    places = tl.arange(0, tile_size)
    while (found < 0) & (start < vocab_size):
        is_equal = (_load_tile(row_logits, start + places, vocab_size) == value).to(tl.int32)
        is_found = (is_equal == 1) & (tl.cumsum(is_equal, axis=0) == rank + 1)
        found = tl.max(tl.where(is_found, start + places, -1), axis=0)
        rank -= tl.sum(is_equal, axis=0)
        start += tile_size
    return tl.maximum(found, 0)


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters that keep a row's more probable tokens; see `sampler._keep_top`. Typical-p is not among them."""

    top_k: Tensor  # [num_rows] int32; 0 keeps all
    top_p: Tensor  # [num_rows] float32; 1 keeps all
    min_p: Tensor  # [num_rows] float32; 0 keeps all


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor, filters: Filters | None = None) -> Tensor:
    """Return token ids [num_rows] int64 for logits [num_rows, vocab_size].

    temperatures: [num_rows] float32. Below MIN_TEMPERATURE the largest logit is taken, of equal ones the first.
    uniforms: [num_rows] float64 in [0, 1), at which the cumulative distribution is inverted: in the order of the
    vocabulary or, for rows with filters, of falling probability. Rows do not depend on each other.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and temperatures.dtype is torch.float32 and uniforms.dtype is torch.float64
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    num_tiles = triton.cdiv(vocab_size, TILE_SIZE)
    tile_maximum, tile_mass = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    tile_argmax = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    size = (logits.stride(0), vocab_size, num_tiles)
    padded_tiles = triton.next_power_of_2(num_tiles)
    _survey_kernel[(num_rows, num_tiles)](
        logits, temperatures, tile_maximum, tile_argmax, tile_mass, *size, TILE_SIZE, num_warps=8
    )
    _choose_kernel[(num_rows,)](
        logits,
        temperatures,
        uniforms,
        tile_maximum,
        tile_argmax,
        tile_mass,
        token_ids,
        *size,
        padded_tiles,
        TILE_SIZE,
        num_warps=8,
    )
    if filters is not None:
        kept = torch.empty((num_rows, num_tiles * KEPT_SIZE), dtype=torch.float32, device=logits.device)
        kept_counts = torch.empty_like(tile_argmax)
        kept_masses = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
        _keep_kernel[(num_rows, num_tiles)](
            logits,
            temperatures,
            filters.top_k,
            filters.top_p,
            filters.min_p,
            tile_maximum,
            kept,
            kept_counts,
            kept_masses,
            *size,
            padded_tiles,
            TILE_SIZE,
            KEPT_SIZE,
            num_warps=8,
        )
        _choose_filtered_kernel[(num_rows,)](
            logits,
            temperatures,
            uniforms,
            filters.top_k,
            filters.top_p,
            filters.min_p,
            tile_maximum,
            tile_mass,
            kept,
            kept_counts,
            kept_masses,
            token_ids,
            *size,
            padded_tiles,
            TILE_SIZE,
            KEPT_SIZE,
            num_warps=16,
        )
    return token_ids
