"""What happened when: the run in bins of time, for charts and timeline.csv."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from math import ceil
from pathlib import Path

import numpy as np
from msgspec import Struct

from loadtest.analysis.measurements import Measurements
from loadtest.analysis.server_metrics import Scrape
from loadtest.analysis.statistics import Floats, Integers


class Timeline(Struct, frozen=True):
    """One element for each bin of `bin_s` seconds that begins at `t_s`. None: nothing was measured in the bin."""

    bin_s: float
    t_s: list[float]
    num_begun: list[int]
    num_answered: list[int]
    num_failed: list[int]
    in_flight: list[float]  # mean
    output_tokens_per_s: list[float]
    ttft_p50_s: list[float | None]  # of requests whose intended start is in the bin
    ttft_p99_s: list[float | None]
    server: dict[str, list[float | None]]  # the last scrape in the bin, by sample name


def timeline(measured: Measurements, scrapes: Sequence[Scrape] = (), bin_s: float = 1.0) -> Timeline:
    """Return the bins from the beginning of the run to the last end, or to the last scrape if that is later."""
    last_s = max([measured.span_s()[1], *(t_s for t_s, _ in scrapes)])
    num_bins = max(1, ceil(last_s / bin_s - 1e-9))
    edges_s = np.arange(num_bins + 1, dtype=np.float64) * bin_s

    def counted(times_s: Floats) -> list[int]:
        return [int(each) for each in _per_bin(times_s, None, bin_s, num_bins)]

    tokens = _per_bin(*measured.token_arrivals(), bin_s, num_bins)
    p50_s, p99_s = _percentiles_per_bin(measured.intended_s, measured.ttft_s, bin_s, num_bins)
    return Timeline(
        bin_s=bin_s,
        t_s=[float(each) for each in edges_s[:-1]],
        num_begun=counted(measured.started_s[measured.is_begun]),
        num_answered=counted(measured.ended_s[measured.is_answered]),
        num_failed=counted(measured.ended_s[measured.is_failed]),
        in_flight=[float(each) for each in measured.in_flight().means(edges_s)],
        output_tokens_per_s=[float(each) for each in tokens / bin_s],
        ttft_p50_s=p50_s,
        ttft_p99_s=p99_s,
        server=_scrapes_per_bin(scrapes, bin_s, num_bins),
    )


def _bins(times_s: Floats, bin_s: float, num_bins: int) -> Integers:
    """What happens at the very end belongs to the last bin."""
    return np.clip(np.floor(times_s / bin_s), 0, num_bins - 1).astype(np.int64)


def _per_bin(times_s: Floats, weights: Floats | None, bin_s: float, num_bins: int) -> Floats:
    return np.bincount(_bins(times_s, bin_s, num_bins), weights, num_bins).astype(np.float64)


def _percentiles_per_bin(
    times_s: Floats, values: Floats, bin_s: float, num_bins: int
) -> tuple[list[float | None], list[float | None]]:
    is_known = ~np.isnan(values)
    bins, values = _bins(times_s[is_known], bin_s, num_bins), values[is_known]
    values = values[np.argsort(bins, kind="stable")]
    ends = np.cumsum(np.bincount(bins, minlength=num_bins))
    p50: list[float | None] = []
    p99: list[float | None] = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        median, high = np.percentile(values[start:end], [50.0, 99.0]) if end > start else (None, None)
        p50.append(None if median is None else float(median))
        p99.append(None if high is None else float(high))
    return p50, p99


def _scrapes_per_bin(scrapes: Sequence[Scrape], bin_s: float, num_bins: int) -> dict[str, list[float | None]]:
    server: dict[str, list[float | None]] = {}
    for t_s, values in scrapes:
        if t_s < 0.0:
            continue
        place = min(int(t_s / bin_s), num_bins - 1)
        for name, value in values.items():
            server.setdefault(name, [None] * num_bins)[place] = value
    return server


def write_csv(series: Timeline, path: Path) -> None:
    """Write one line for each bin; a field is empty if nothing was measured."""
    columns: dict[str, Sequence[float | None]] = {
        "t_s": series.t_s,
        "num_begun": series.num_begun,
        "num_answered": series.num_answered,
        "num_failed": series.num_failed,
        "in_flight": series.in_flight,
        "output_tokens_per_s": series.output_tokens_per_s,
        "ttft_p50_s": series.ttft_p50_s,
        "ttft_p99_s": series.ttft_p99_s,
        **series.server,
    }
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
