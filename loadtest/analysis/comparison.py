"""Is b faster than a? The ratio of each figure with an interval, so that chance is not taken for an improvement.

Only figures that each request has one of are compared. Times between tokens are covered by the time per token and the
longest pause of each answer.

Latencies of neighbours in a queue are alike. Resampling therefore draws blocks of consecutive requests, several times
as long as the queue's memory. A run that is too short for that gets no verdict on latencies: intervals from it would be
many times too narrow, and would call half of all runs faster than themselves.

Each interval holds by itself: of twenty comparisons of a server with itself, one is expected to show a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from loadtest.analysis.measurements import Measurements
from loadtest.analysis.statistics import (
    Floats,
    bootstrap_percentiles,
    bootstrap_rates,
    central_interval,
    correlation_length,
    widening,
)
from loadtest.analysis.summary import Summary, prefix_cache_hit_rate

FASTER = "faster"
SLOWER = "slower"
NO_DIFFERENCE = "no difference seen"
TOO_SHORT = "too short to tell"
NUM_BLOCKS = 20  # blocks of time in each run
MAX_BLOCKS = 50  # blocks of requests in each run: longer ones are safer, and more add hardly any information
BLOCK_LENGTHS = 5.0  # correlation lengths in a block: a tenth of a block depends on its neighbours
MIN_LENGTHS = 50.0  # correlation lengths on a side: ten blocks, and enough to estimate the length itself
ENOUGH_RUNS = 5  # runs that count as independent pieces, however short they are

# Settings that must be equal, or the ratio is of something else. URLs and models are what one compares.
SETTINGS = (
    "arrivals",
    "workload",
    "seed",
    "num_requests",
    "num_clients",
    "duration_s",
    "characters_per_token",
    "num_warm_up",
    "api",
    "fields",
    "batch_size",
    "timeout_s",
    "max_connections",
    "keep_alive",
)

LATENCIES: dict[str, Callable[[Measurements], Floats]] = {
    "TTFT": lambda measured: measured.ttft_s,
    "TPOT": lambda measured: measured.tpot_s,
    "longest pause": lambda measured: measured.longest_pause_s,
    "E2E": lambda measured: measured.e2e_s,
}
PERCENTS = (50.0, 99.0)
MAX_HIT_RATE_DIFFERENCE = (
    0.1  # of prompt tokens: a greater difference between the sides' cache hit rates gives a warning
)


class Side(Struct, frozen=True):
    """One or more repetitions of the same run; summaries, if there are any, one for each."""

    name: str
    runs: Sequence[Measurements]
    summaries: Sequence[Summary] = ()


class Compared(Struct, frozen=True):
    """One figure on both sides: in seconds, or per second."""

    name: str
    unit: str
    a: float
    b: float
    ratio: float  # b / a
    low: float | None  # None: the runs are too short for an interval
    high: float | None
    verdict: str  # about b


class Comparison(Struct, frozen=True):
    a: str
    b: str
    confidence: float
    figures: list[Compared]
    warnings: list[str]


def compare(
    a: Side, b: Side, generator: np.random.Generator, num_resamples: int = 2000, confidence: float = 0.95
) -> Comparison:
    """Compare all figures that both sides have."""
    assert a.runs and b.runs
    figures: list[Compared | None] = []
    too_short: dict[str, float] = {}
    for name, values in LATENCIES.items():
        sides = [[_in_order(run, values(run)) for run in side.runs] for side in (a, b)]
        if any(not sum(len(run) for run in side) for side in sides):
            continue
        for percent in PERCENTS:
            cuts = [_cut(side, percent) for side in sides]
            for side, cut in zip((a, b), cuts, strict=True):
                if not cut.is_enough:
                    too_short[side.name] = max(too_short.get(side.name, 0.0), cut.longest)
            pooled = [cut.percentile for cut in cuts]
            figure = f"{name} p{percent:g}"
            if not all(cut.is_enough for cut in cuts):
                if pooled[0] > 0.0:
                    ratio = pooled[1] / pooled[0]
                    figures.append(Compared(figure, "s", pooled[0], pooled[1], ratio, None, None, TOO_SHORT))
                continue
            resampled = [bootstrap_percentiles(cut.blocks, percent, num_resamples, generator) for cut in cuts]
            factor = widening(min(cut.num_pieces for cut in cuts), confidence)
            figures.append(_compared(figure, "s", pooled, resampled, confidence, factor, is_rate=False))
    for name, unit, amounts in (
        ("output tokens", "tokens/s", Measurements.token_arrivals),
        ("requests", "requests/s", _requests),
    ):
        pooled, resampled = [], []
        for side in (a, b):
            blocks = [_blocks(run, *amounts(run)) for run in side.runs]
            lengths_s = [max(run.span_s()[1] - run.span_s()[0], 1e-9) / NUM_BLOCKS for run in side.runs]
            pooled.append(float(sum(each.sum() for each in blocks)) / (sum(lengths_s) * NUM_BLOCKS))
            resampled.append(bootstrap_rates(blocks, lengths_s, num_resamples, generator))
        figures.append(_compared(name, unit, pooled, resampled, confidence, 1.0, is_rate=True))
    warnings = [*_warnings(a, b), *(_shortness(name, longest) for name, longest in too_short.items())]
    return Comparison(a.name, b.name, confidence, [each for each in figures if each is not None], warnings)


class _Cut(Struct, frozen=True):
    """One latency of a side, cut into nearly independent blocks."""

    percentile: float
    blocks: list[list[Floats]]  # by run
    num_pieces: int  # independent ones
    longest: float  # correlation length, in requests
    is_enough: bool


def _in_order(measured: Measurements, values: Floats) -> Floats:
    """Return the known values by intended start."""
    ordered = values[np.argsort(measured.intended_s, kind="stable")]
    return ordered[~np.isnan(ordered)]


def _cut(runs: Sequence[Floats], percent: float) -> _Cut:
    percentile = float(np.percentile(np.concatenate(runs), percent))
    lengths = [_length(run, percentile) for run in runs]
    blocks = []
    for run, length in zip(runs, lengths, strict=True):
        num_blocks = min(MAX_BLOCKS, max(1, int(len(run) / (BLOCK_LENGTHS * length))))
        blocks.append(np.array_split(run, num_blocks) if len(run) else [])
    num_runs = sum(len(run) > 0 for run in runs)
    total = sum(len(run) / length for run, length in zip(runs, lengths, strict=True))
    are_pieces = num_runs >= ENOUGH_RUNS
    num_pieces = num_runs if are_pieces else sum(len(each) for each in blocks)
    return _Cut(percentile, blocks, num_pieces, max(lengths), are_pieces or total >= MIN_LENGTHS)


def _length(run: Floats, percentile: float) -> float:
    """Return the correlation length of what decides a percentile: which requests exceed it.

    Ranks are checked as well, because few requests exceed a high percentile.
    """
    ranks = np.argsort(np.argsort(run, kind="stable")).astype(np.float64)
    return max(correlation_length(ranks), correlation_length((run > percentile).astype(np.float64)))


def _shortness(name: str, longest: float) -> str:
    return (
        f"{name} is too short for intervals of latencies: up to {longest:.0f} requests in a row depend on each other; "
        f"use at least {MIN_LENGTHS:g} times as many ({MIN_LENGTHS * longest:.0f}), or {ENOUGH_RUNS} runs"
    )


def _compared(
    name: str,
    unit: str,
    pooled: Sequence[float],
    resampled: Sequence[Floats],
    confidence: float,
    factor: float,
    *,
    is_rate: bool,
) -> Compared | None:
    """Return one figure; `factor` lengthens its interval around the ratio, on a logarithmic scale."""
    a, b = pooled
    num = min(len(each) for each in resampled)
    divisors = resampled[0][:num]
    if a == 0.0 or not divisors.all():
        return None  # there is no ratio to zero
    low, high = central_interval(resampled[1][:num] / divisors, confidence)
    ratio = b / a
    if ratio > 0.0:
        low, high = ratio * (low / ratio) ** factor, ratio * (high / ratio) ** factor
    verdict = FASTER if (low > 1.0) == is_rate else SLOWER
    if low <= 1.0 <= high:
        verdict = NO_DIFFERENCE
    return Compared(name, unit, a, b, ratio, low, high, verdict)


def _requests(measured: Measurements) -> tuple[Floats, Floats]:
    """Return the times at which answers ended."""
    ends_s = measured.ended_s[measured.is_answered]
    return ends_s, np.ones(len(ends_s))


def _blocks(measured: Measurements, times_s: Floats, amounts: Floats) -> Floats:
    from_s, to_s = measured.span_s()
    return np.histogram(times_s, NUM_BLOCKS, (from_s, max(to_s, from_s + 1e-9)), weights=amounts)[0].astype(np.float64)


# -- what makes a comparison doubtful ---------------------------------------------------------------------------------


def _warnings(a: Side, b: Side) -> list[str]:
    warnings = []
    for name in SETTINGS:
        values = [[str(getattr(each.settings, name)) for each in side.summaries] for side in (a, b)]
        # Sides are compared as a whole: repetitions should have different seeds.
        if all(values) and set(values[0]) != set(values[1]):
            texts = [" and ".join(dict.fromkeys(side)) for side in values]
            warnings.append(f"{name} differs: {texts[0]} in {a.name}, {texts[1]} in {b.name}")
    for side in (a, b):
        if num_invalid := sum(not each.is_valid for each in side.summaries):
            warnings.append(f"{num_invalid} of {len(side.summaries)} runs of {side.name} are not valid")
        if len(side.runs) == 1:
            warnings.append(f"{side.name} is one run: intervals do not include differences from run to run")
    failed, lengths = [_share_failed(side) for side in (a, b)], [_mean_tokens(side) for side in (a, b)]
    if abs(failed[0] - failed[1]) > 0.001:
        warnings.append(
            f"{failed[0]:.2%} of the requests failed in {a.name}, {failed[1]:.2%} in {b.name}; latencies leave them out"
        )
    if abs(lengths[0] - lengths[1]) > 0.01 * max(lengths):
        warnings.append(f"answers have {lengths[0]:.4g} tokens on average in {a.name}, {lengths[1]:.4g} in {b.name}")
    hit_rates = [prefix_cache_hit_rate(side.summaries) for side in (a, b)]
    if (
        hit_rates[0] is not None
        and hit_rates[1] is not None
        and abs(hit_rates[0] - hit_rates[1]) > MAX_HIT_RATE_DIFFERENCE
    ):
        warnings.append(
            f"the server's prefix cache held {hit_rates[0]:.0%} of prompt tokens in {a.name}, {hit_rates[1]:.0%} in "
            f"{b.name}; repeated prompts are answered sooner, so use another --seed, or restart the server"
        )
    return warnings


def _share_failed(side: Side) -> float:
    num = sum(int(run.is_begun.sum()) for run in side.runs)
    return sum(int(run.is_failed.sum()) for run in side.runs) / max(1, num)


def _mean_tokens(side: Side) -> float:
    num = sum(int(run.is_answered.sum()) for run in side.runs)
    return float(sum(run.num_tokens.sum() for run in side.runs)) / max(1, num)
