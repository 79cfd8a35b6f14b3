"""Is b faster than a? Each figure's ratio with an interval, so that chance is not taken for an improvement.

Only figures that each request has one of are compared: what times between tokens say is in the time per token and in
the longest pause of each answer.

Latencies of neighbours in a queue are alike, so what is resampled is blocks of consecutive requests, several times as
long as the queue remembers. A run that is too short for that gets no verdict on latencies: intervals from it would be
many times too narrow, and would call half of all runs faster than themselves.

Each interval holds by itself: of twenty comparisons of a thing with itself, one is expected to show a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from loadtest.statistics import (
    Floats,
    bootstrap_percentiles,
    bootstrap_rates,
    central_interval,
    correlation_length,
    widening,
)
from loadtest.summary import Summary, prefix_cache_hit_rate
from loadtest.timeline import Measurements

FASTER = "faster"
SLOWER = "slower"
NO_DIFFERENCE = "no difference seen"
TOO_SHORT = "too short to tell"
NUM_BLOCKS = 20  # of time, in each run
MAX_BLOCKS = 50  # of requests, in each run: longer ones are safer, and more of them say hardly more
BLOCK_LENGTHS = 5.0  # correlation lengths in a block: what it has in common with its neighbours is a tenth of it
LEAST_LENGTHS = 50.0  # correlation lengths on a side: ten blocks, and as many as it takes to know the length itself
ENOUGH_RUNS = 5  # that are pieces by themselves, however short they are

# What must be the same on both sides, or the ratio is of something else. Addresses and models are what one compares.
SETTINGS = (
    *("arrivals", "workload", "seed", "num_requests", "num_clients", "duration_s"),
    *("characters_per_token", "num_warm_up"),
    *("door", "fields", "batch_size", "timeout_s", "max_connections"),
)

LATENCIES: dict[str, Callable[[Measurements], Floats]] = {
    "TTFT": lambda measured: measured.ttft_s,
    "TPOT": lambda measured: measured.tpot_s,
    "longest pause": lambda measured: measured.longest_pause_s,
    "E2E": lambda measured: measured.e2e_s,
}
PERCENTS = (50.0, 99.0)
NOTABLE_HITS = 0.1  # of the prompts' tokens: by how much the sides' prefix caches may differ without a word


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
    """Figures that one of the sides does not have are left out."""
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
            told = f"{name} p{percent:g}"
            if not all(cut.is_enough for cut in cuts):
                if pooled[0] > 0.0:
                    ratio = pooled[1] / pooled[0]
                    figures.append(Compared(told, "s", pooled[0], pooled[1], ratio, None, None, TOO_SHORT))
                continue
            resampled = [bootstrap_percentiles(cut.blocks, percent, num_resamples, generator) for cut in cuts]
            factor = widening(min(cut.num_pieces for cut in cuts), confidence)
            figures.append(_compared(told, "s", pooled, resampled, confidence, factor, is_rate=False))
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
    """One latency of a side's runs, in blocks that hardly know of each other."""

    percentile: float
    blocks: list[list[Floats]]  # by run
    num_pieces: int  # that are independent
    longest: float  # correlation length, in requests
    is_enough: bool


def _in_order(measured: Measurements, values: Floats) -> Floats:
    """Those that there are, by intended start."""
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
    return _Cut(percentile, blocks, num_pieces, max(lengths), are_pieces or total >= LEAST_LENGTHS)


def _length(run: Floats, percentile: float) -> float:
    """Of what a percentile is made of, which is who is above it; and of ranks, for above a high one there are few."""
    ranks = np.argsort(np.argsort(run, kind="stable")).astype(np.float64)
    return max(correlation_length(ranks), correlation_length((run > percentile).astype(np.float64)))


def _shortness(name: str, longest: float) -> str:
    return (
        f"{name} is too short for intervals of latencies: up to {longest:.0f} requests in a row go together, and "
        f"{LEAST_LENGTHS:g} times as many are needed, {LEAST_LENGTHS * longest:.0f} or more, or {ENOUGH_RUNS} runs"
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
    """`factor` is what the interval is lengthened by, on a logarithmic scale, from the ratio on."""
    a, b = pooled
    num = min(len(each) for each in resampled)
    divisors = resampled[0][:num]
    if a == 0.0 or not divisors.all():
        return None  # nothing can be said in ratios to zero
    low, high = central_interval(resampled[1][:num] / divisors, confidence)
    ratio = b / a
    if ratio > 0.0:
        low, high = ratio * (low / ratio) ** factor, ratio * (high / ratio) ** factor
    verdict = FASTER if (low > 1.0) == is_rate else SLOWER
    if low <= 1.0 <= high:
        verdict = NO_DIFFERENCE
    return Compared(name, unit, a, b, ratio, low, high, verdict)


def _requests(measured: Measurements) -> tuple[Floats, Floats]:
    """When answers ended."""
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
        # Side against side: that repetitions have seeds of their own is as it should be.
        if all(values) and set(values[0]) != set(values[1]):
            told = [" and ".join(dict.fromkeys(side)) for side in values]
            warnings.append(f"{name} differs: {told[0]} in {a.name}, {told[1]} in {b.name}")
    for side in (a, b):
        if num_invalid := sum(not each.is_valid for each in side.summaries):
            warnings.append(f"{num_invalid} of {len(side.summaries)} runs of {side.name} are not valid")
        if len(side.runs) == 1:
            warnings.append(f"{side.name} is one run: what differs from run to run is in no interval")
    failed, lengths = [_share_failed(side) for side in (a, b)], [_mean_tokens(side) for side in (a, b)]
    if abs(failed[0] - failed[1]) > 0.001:
        warnings.append(
            f"{failed[0]:.2%} of the requests failed in {a.name}, {failed[1]:.2%} in {b.name}: "
            "latencies are of the others"
        )
    if abs(lengths[0] - lengths[1]) > 0.01 * max(lengths):
        warnings.append(f"answers have {lengths[0]:.4g} tokens on average in {a.name}, {lengths[1]:.4g} in {b.name}")
    hit_rates = [prefix_cache_hit_rate(side.summaries) for side in (a, b)]
    if hit_rates[0] is not None and hit_rates[1] is not None and abs(hit_rates[0] - hit_rates[1]) > NOTABLE_HITS:
        warnings.append(
            f"the server's prefix cache held {hit_rates[0]:.0%} of the prompts' tokens in {a.name}, {hit_rates[1]:.0%} "
            f"in {b.name}: what is asked twice is answered sooner; repeat with another --seed, or restart the server"
        )
    return warnings


def _share_failed(side: Side) -> float:
    num = sum(int(run.is_begun.sum()) for run in side.runs)
    return sum(int(run.is_failed.sum()) for run in side.runs) / max(1, num)


def _mean_tokens(side: Side) -> float:
    num = sum(int(run.is_answered.sum()) for run in side.runs)
    return float(sum(run.num_tokens.sum() for run in side.runs)) / max(1, num)
