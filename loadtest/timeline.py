"""The records as arrays on the run's clock, and what happened when: second by second, and while the load held still.

All times are seconds since the run's beginning. Latencies are of requests that were answered whole (`Outcome.OK`); of
the others they are NaN, for a quick refusal is no short latency.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from math import ceil, sqrt
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadtest.errors import LoadTestError
from loadtest.record import Outcome, Record
from loadtest.statistics import Floats, Integers, OpenCount, open_count, trend

Booleans = NDArray[np.bool_]
Scrape = tuple[float, Mapping[str, float]]  # when, and the value of each sample by its name

STOPPED_BY_USER = "stopped by the user"  # the error of a request that Ctrl-C cut, as the runner writes it
NUM_BINS = 100  # in which a steady state is looked for
MIN_STEADY_BINS = 10

# What servers call the same thing: the first name that is there counts.
SERVER_SERIES: dict[str, tuple[str, ...]] = {
    "batch_size": ("servekit_scheduler_batch_size", "vllm:num_requests_running"),
    "num_running": ("servekit_num_requests_running", "vllm:num_requests_running"),
    "num_waiting": ("servekit_num_requests_waiting", "vllm:num_requests_waiting"),
    "kv_cache_usage": ("servekit_kv_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "num_preemptions": ("servekit_num_preemptions_total", "vllm:num_preemptions_total"),
    # In tokens of prompts.
    "num_prefix_cache_queries": (
        *("servekit_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
        "vllm:gpu_prefix_cache_queries_total",
    ),
    "num_prefix_cache_hits": (
        *("servekit_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
        "vllm:gpu_prefix_cache_hits_total",
    ),
}
COUNTERS = ("num_preemptions", "num_prefix_cache_queries", "num_prefix_cache_hits")


class Measurements(Struct, frozen=True):
    """Records as arrays: by request, in the order of the records, and by pause between two events of an answer."""

    records: Sequence[Record]
    index: Integers  # in the plan
    intended_s: Floats
    started_s: Floats
    ended_s: Floats
    answered_s: Floats  # the same; NaN of requests not answered
    first_s: Floats  # when the first tokens came; NaN of requests not answered, and of answers that came whole
    last_s: Floats
    num_tokens: Floats  # 0 of requests not answered
    num_tokens_told: Floats  # by events, first one included
    num_tokens_first: Floats  # that came with the first event
    num_events: Integers
    num_prompt_tokens: Floats  # NaN if not told
    queue_s: Floats  # NaN if not told
    process: Integers
    is_begun: Booleans
    is_answered: Booleans
    is_stopped: Booleans  # cut by the user, who ended the run: no fault of the server
    second_token_s: Floats  # from the first event to the second one; NaN if there is none
    longest_pause_s: Floats  # between two events; NaN if there is no second one
    pause_s: Floats  # by pause, of answered requests
    pause_tokens: Integers  # that came after it
    pause_ended_s: Floats
    event_s: Floats  # by event, of answered requests
    event_tokens: Floats  # so that they add up to num_tokens

    @property
    def ttft_s(self) -> Floats:
        """Time to the first token, from the intended start."""
        return self.first_s - self.intended_s

    @property
    def ttft_from_start_s(self) -> Floats:
        return self.first_s - self.started_s

    @property
    def e2e_s(self) -> Floats:
        """From the intended start to the end."""
        return self.answered_s - self.intended_s

    @property
    def e2e_from_start_s(self) -> Floats:
        return self.answered_s - self.started_s

    @property
    def tpot_s(self) -> Floats:
        """Time per output token after the first event: (last - first) / (n - 1), where that event brought one token.

        If it brought more, they are subtracted instead of the 1, and an answer that came in one event has no such time
        (NaN): what came with the first tokens took no time after them, and would make a server that holds tokens back
        look the faster the more it does.
        """
        num_later = self.num_tokens - self.num_tokens_first
        is_known = (self.num_events > 1) & (num_later > 0)
        return _quotient(self.last_s - self.first_s, num_later, is_known)

    @property
    def tokens_per_s(self) -> Floats:
        """How fast one reader's text grows after the first event; NaN as `tpot_s`."""
        tpot_s = self.tpot_s
        return _quotient(np.ones(len(tpot_s)), tpot_s, tpot_s > 0.0)

    def inter_token_s(self, chosen: Booleans | None = None) -> Floats:
        """Inter-token latencies: an event of k tokens after a pause g counts as k of g/k each.

        Their mean is then the mean per token, whatever a server puts together, and those of two servers can be held
        side by side. As one of g and k - 1 of 0, the median would be 0; as one of g, the mean would be k times too
        long. What this cannot show is the stuttering: that is in `pause_s`, which a server that puts tokens together
        makes longer, never shorter.
        """
        pause_s, tokens = self.pause_s, self.pause_tokens
        if chosen is not None:
            pause_s, tokens = pause_s[chosen], tokens[chosen]
        return np.repeat(pause_s / tokens, tokens)

    def token_arrivals(self) -> tuple[Floats, Floats]:
        """When tokens came, and how many; those of an answer without any event, which came whole, came at its end."""
        is_whole = self.is_answered & (self.num_events == 0)
        return (
            np.concatenate([self.event_s, self.ended_s[is_whole]]),
            np.concatenate([self.event_tokens, self.num_tokens[is_whole]]),
        )

    @property
    def is_failed(self) -> Booleans:
        """Begun, and neither answered nor cut by the user."""
        return self.is_begun & ~self.is_answered & ~self.is_stopped

    def in_flight(self) -> OpenCount:
        """Requests that were begun and had not ended, however they did."""
        return open_count(self.started_s[self.is_begun], self.ended_s[self.is_begun])

    def span_s(self) -> tuple[float, float]:
        """From the first intended start to the last end, of requests that were begun."""
        if not self.is_begun.any():
            return 0.0, 0.0
        return float(self.intended_s[self.is_begun].min()), float(self.ended_s[self.is_begun].max())


def measure(records: Sequence[Record]) -> Measurements:
    """Goes through the tokens of all records once. Raises LoadTestError for records that contradict themselves."""
    num = len(records)
    is_begun = np.fromiter((each.outcome is not Outcome.SKIPPED for each in records), bool, num)
    is_answered = np.fromiter((each.outcome is Outcome.OK for each in records), bool, num)
    is_stopped = [each.outcome is Outcome.CUT and each.error == STOPPED_BY_USER for each in records]
    ended_s = np.fromiter((each.ended_s for each in records), float, num)
    num_tokens = np.fromiter((each.num_output_tokens for each in records), float, num)

    # Only events of answered requests: that of others is no output that somebody asked for.
    answered = [each for each in records if each.outcome is Outcome.OK]
    num_events = np.zeros(num, np.int64)
    num_events[is_answered] = [len(each.token_times_s) for each in answered]
    total = int(num_events.sum())
    event_s = np.fromiter(chain.from_iterable(each.token_times_s for each in answered), float, total)
    told = np.fromiter(chain.from_iterable(_tokens_of_events(answered)), np.int64, total)
    owner = np.repeat(np.arange(num), num_events)

    has_events = num_events > 0
    first = (np.cumsum(num_events) - num_events)[has_events]
    last = first + num_events[has_events] - 1
    answered_s = np.where(is_answered, ended_s, np.nan)
    first_s, last_s = np.full(num, np.nan), np.full(num, np.nan)
    first_s[has_events], last_s[has_events] = event_s[first], event_s[last]
    num_tokens_told = np.bincount(owner, told, num).astype(np.float64)
    num_tokens_first = np.zeros(num)
    num_tokens_first[has_events] = told[first]
    # Who gives no total has given what came.
    num_tokens = np.where(is_answered, np.where(num_tokens > 0, num_tokens, num_tokens_told), 0.0)
    scale = _quotient(num_tokens, num_tokens_told, num_tokens_told > 0)

    is_later = np.ones(total, bool)
    is_later[first] = False
    pause_s = np.diff(event_s, prepend=0.0)[is_later]
    second_token_s, longest_pause_s = np.full(num, np.nan), np.full(num, np.nan)
    has_pauses = num_events > 1
    if has_pauses.any():
        first_pause = (np.cumsum(num_events - has_events) - (num_events - has_events))[has_pauses]
        second_token_s[has_pauses] = pause_s[first_pause]
        longest_pause_s[has_pauses] = np.maximum.reduceat(pause_s, first_pause)

    return Measurements(
        records=records,
        index=np.fromiter((each.index for each in records), np.int64, num),
        intended_s=np.fromiter((each.intended_s for each in records), float, num),
        started_s=np.fromiter((each.started_s for each in records), float, num),
        ended_s=ended_s,
        answered_s=answered_s,
        first_s=first_s,
        last_s=last_s,
        num_tokens=num_tokens,
        num_tokens_told=num_tokens_told,
        num_tokens_first=num_tokens_first,
        num_events=num_events,
        num_prompt_tokens=_known(each.num_prompt_tokens for each in records),
        queue_s=_known(each.queue_s for each in records),
        process=np.fromiter((each.process for each in records), np.int64, num),
        is_begun=is_begun,
        is_answered=is_answered,
        is_stopped=np.array(is_stopped, bool),
        second_token_s=second_token_s,
        longest_pause_s=longest_pause_s,
        pause_s=pause_s,
        pause_tokens=told[is_later],
        pause_ended_s=event_s[is_later],
        event_s=event_s,
        event_tokens=told * scale[owner],
    )


def _quotient(dividends: Floats, divisors: Floats, where: Booleans) -> Floats:
    """NaN elsewhere."""
    quotients = np.full(len(divisors), np.nan)
    np.divide(dividends, divisors, out=quotients, where=where)
    return quotients


def _known(values: Iterable[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _tokens_of_events(records: Iterable[Record]) -> Iterable[Iterable[int]]:
    for each in records:
        if each.tokens_per_event is None:
            yield repeat(1, len(each.token_times_s))
            continue
        if len(each.tokens_per_event) != len(each.token_times_s) or min(each.tokens_per_event, default=1) < 1:
            raise LoadTestError(
                f"record {each.index} has {len(each.token_times_s)} times of events that brought tokens, and "
                f"{each.tokens_per_event} tokens in them: there must be one number, at least 1, for each time"
            )
        yield each.tokens_per_event


# -- the steady state -------------------------------------------------------------------------------------------------


def steady_window(measured: Measurements, is_open: bool, share: float = 0.9) -> tuple[float, float] | None:
    """The longest span in which the number in flight stayed at or above `share` of its plateau; None if there is none.

    The run is cut into 100 equal bins, so that the moment between one request's end and the next one's start does not
    count as a gap. The plateau is the median of those bins' means that are at least half of the highest one.

    In an open loop, three standard deviations are allowed below the share: with Poisson arrivals and enough seats the
    number in flight is Poisson distributed, so its variance is its mean (M/G/inf; Takacs, "Introduction to the Theory
    of Queues", 1962), and without that allowance the longest span would be the luckiest one.

    If the number drifts in it by more than what the share leaves, a twentieth is taken off at both ends, until half is
    left. There is no steady state if that drifts, too, as with a server that falls behind, or is shorter than a tenth
    of the run.
    """
    from_s, to_s = measured.span_s()
    if to_s <= from_s:
        return None
    edges_s = np.linspace(from_s, to_s, NUM_BINS + 1)
    means = measured.in_flight().means(edges_s)
    plateau = float(np.median(means[means >= 0.5 * means.max()]))
    deviation = sqrt(plateau) if is_open else 0.0
    first, last = longest_stretch(means >= share * plateau - 3.0 * deviation)
    least = max(MIN_STEADY_BINS, (last - first) // 2)
    while last - first >= least:
        if not _drifts(means[first:last], max((1.0 - share) * plateau, 2.0 * deviation)):
            return float(edges_s[first]), float(edges_s[last])
        # What is above the level may still be coming up to the plateau, or leaving it.
        margin = ceil((last - first) / 20)
        first, last = first + margin, last - margin
    return None


def _drifts(means: Floats, limit: float) -> bool:
    """By halves, too: a queue that grows until the last request and drains then has no drift on the whole."""
    for part in (means, means[: len(means) // 2], means[len(means) // 2 :]):
        drift = trend(np.arange(len(part), dtype=np.float64), part)
        if drift.is_significant and abs(drift.slope) * (len(part) - 1) > limit:
            return True
    return False


def longest_stretch(is_in: Booleans) -> tuple[int, int]:
    """Of neighbours that are True, as [first, last); (0, 0) if none is."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], is_in, [False]]).astype(np.int8)))
    if not changes.size:
        return 0, 0
    firsts, lasts = changes[::2], changes[1::2]
    longest = int(np.argmax(lasts - firsts))
    return int(firsts[longest]), int(lasts[longest])


# -- second by second -------------------------------------------------------------------------------------------------


class Timeline(Struct, frozen=True):
    """One element for each bin of time, of `bin_s` from its `t_s` on. None is where there was nothing to measure."""

    bin_s: float
    t_s: list[float]
    num_begun: list[int]
    num_answered: list[int]
    num_failed: list[int]
    in_flight: list[float]  # mean
    output_tokens_per_s: list[float]
    ttft_p50_s: list[float | None]  # of requests that were meant to start in it, from the intended start
    ttft_p99_s: list[float | None]
    server: dict[str, list[float | None]]  # the last scrape in it, by the sample's name


def timeline(measured: Measurements, scrapes: Sequence[Scrape] = (), bin_s: float = 1.0) -> Timeline:
    """From the run's beginning to the last end, or to the last scrape if that is later."""
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
    """What happens at the very end belongs to the last one."""
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


def server_series(scrapes: Sequence[Scrape]) -> dict[str, tuple[Floats, Floats]]:
    """What is drawn of a server: times and values by the names in SERVER_SERIES, of those that it tells.

    A sample's name may carry labels (`name{engine="0"}`). Counts are added up over them, shares are averaged.
    """
    series = {}
    for meaning, names in SERVER_SERIES.items():
        for name in names:
            points = [(t_s, value) for t_s, values in scrapes if (value := _read(name, values)) is not None]
            if points:
                series[meaning] = (np.array([t for t, _ in points]), np.array([value for _, value in points]))
                break
    return series


def _read(name: str, values: Mapping[str, float]) -> float | None:
    found = [value for each, value in values.items() if each == name or each.startswith(f"{name}{{")]
    if not found:
        return None
    return sum(found) / (len(found) if name.endswith("_perc") else 1)


def write_csv(series: Timeline, path: Path) -> None:
    """One line for each bin; an empty field is where there was nothing to measure."""
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
