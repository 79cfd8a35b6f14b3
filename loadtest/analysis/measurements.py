"""The records of a run as arrays, on the run's clock.

All times are seconds since the run's beginning. Latencies are of requests that were answered whole (`Outcome.OK`) and
NaN for all others: a request that is refused quickly does not have a short latency.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat

import numpy as np
from msgspec import Struct

from loadtest.analysis.statistics import Booleans, Floats, Integers, OpenCount, open_count
from loadtest.errors import LoadTestError
from loadtest.record import STOPPED_BY_USER, Outcome, Record


class Measurements(Struct, frozen=True):
    """Records as arrays: one element for each request, in the order of the records; or for each event or pause."""

    records: Sequence[Record]
    index: Integers  # in the plan
    intended_s: Floats
    started_s: Floats
    ended_s: Floats
    answered_s: Floats  # the same, NaN of requests not answered
    first_s: Floats  # of the first event; NaN of requests not answered and of answers without events
    last_s: Floats
    num_tokens: Floats  # 0 of requests not answered
    num_tokens_in_events: Floats  # sum over events, the first included
    num_tokens_first: Floats  # in the first event
    num_events: Integers
    num_prompt_tokens: Floats  # NaN if not reported
    queue_s: Floats  # NaN if not reported
    process: Integers
    is_begun: Booleans
    is_answered: Booleans
    is_stopped: Booleans  # cut because the user stopped the run, which is no fault of the server
    second_token_s: Floats  # from the first event to the second; NaN if there is none
    longest_pause_s: Floats  # between two events; NaN if there is only one
    pause_s: Floats  # by pause, of answered requests
    pause_tokens: Integers  # in the event after the pause
    pause_ended_s: Floats
    event_s: Floats  # by event, of answered requests
    event_tokens: Floats  # scaled to add up to num_tokens

    @property
    def ttft_s(self) -> Floats:
        """Time to the first token, from the intended start."""
        return self.first_s - self.intended_s

    @property
    def ttft_from_start_s(self) -> Floats:
        return self.first_s - self.started_s

    @property
    def e2e_s(self) -> Floats:
        """Time to the end of the answer, from the intended start."""
        return self.answered_s - self.intended_s

    @property
    def e2e_from_start_s(self) -> Floats:
        return self.answered_s - self.started_s

    @property
    def tpot_s(self) -> Floats:
        """Time per output token after the first event: (last - first) / (n - 1), if that event carried one token.

        If it carried more, they are subtracted instead of the 1, and an answer that came in one event has no TPOT
        (NaN). Tokens that came with the first event took no time after it; counting them would make a server look
        faster the longer it holds tokens back.
        """
        num_later = self.num_tokens - self.num_tokens_first
        is_known = (self.num_events > 1) & (num_later > 0)
        return _quotient(self.last_s - self.first_s, num_later, is_known)

    @property
    def tokens_per_s(self) -> Floats:
        """Tokens per second of one answer after its first event; NaN as `tpot_s`."""
        tpot_s = self.tpot_s
        return _quotient(np.ones(len(tpot_s)), tpot_s, tpot_s > 0.0)

    def inter_token_s(self, chosen: Booleans | None = None) -> Floats:
        """Inter-token latencies: an event of k tokens after a pause g counts as k times g/k.

        Their mean is then the mean per token, however a server groups tokens, and two servers can be compared. Counted
        as one pause of g and k - 1 of 0, the median would be 0; counted as one pause of g, the mean would be k times
        too long. This does not show stutter. `pause_s` does: grouping tokens makes pauses longer, never shorter.
        """
        pause_s, tokens = self.pause_s, self.pause_tokens
        if chosen is not None:
            pause_s, tokens = pause_s[chosen], tokens[chosen]
        return np.repeat(pause_s / tokens, tokens)

    def token_arrivals(self) -> tuple[Floats, Floats]:
        """Return when tokens came, and how many. Tokens of an answer without events came at its end."""
        is_whole = self.is_answered & (self.num_events == 0)
        return (
            np.concatenate([self.event_s, self.ended_s[is_whole]]),
            np.concatenate([self.event_tokens, self.num_tokens[is_whole]]),
        )

    @property
    def is_failed(self) -> Booleans:
        """Started, and neither answered nor stopped by the user."""
        return self.is_begun & ~self.is_answered & ~self.is_stopped

    def limited_s(self) -> dict[str, Floats]:
        """Return the times that limits for each request apply to, by the names of slo.NAMES."""
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "itl": self.longest_pause_s, "e2e": self.e2e_s}

    def in_flight(self) -> OpenCount:
        """Return how many requests were in flight over time, whatever became of them."""
        return open_count(self.started_s[self.is_begun], self.ended_s[self.is_begun])

    def span_s(self) -> tuple[float, float]:
        """Return the first intended start and the last end of the requests that were started."""
        if not self.is_begun.any():
            return 0.0, 0.0
        return float(self.intended_s[self.is_begun].min()), float(self.ended_s[self.is_begun].max())


def measure(records: Sequence[Record]) -> Measurements:
    """Turn records into arrays, in one pass. Raises LoadTestError for records that contradict themselves."""
    num = len(records)
    is_begun = np.fromiter((each.outcome is not Outcome.SKIPPED for each in records), bool, num)
    is_answered = np.fromiter((each.outcome is Outcome.OK for each in records), bool, num)
    is_stopped = [each.outcome is Outcome.CUT and each.error == STOPPED_BY_USER for each in records]
    ended_s = np.fromiter((each.ended_s for each in records), float, num)
    num_tokens = np.fromiter((each.num_output_tokens for each in records), float, num)

    # Only events of answered requests: other tokens are not output that was delivered.
    answered = [each for each in records if each.outcome is Outcome.OK]
    num_events = np.zeros(num, np.int64)
    num_events[is_answered] = [len(each.token_times_s) for each in answered]
    total = int(num_events.sum())
    event_s = np.fromiter(chain.from_iterable(each.token_times_s for each in answered), float, total)
    counts = np.fromiter(chain.from_iterable(_tokens_of_events(answered)), np.int64, total)
    owner = np.repeat(np.arange(num), num_events)

    has_events = num_events > 0
    first = (np.cumsum(num_events) - num_events)[has_events]
    last = first + num_events[has_events] - 1
    answered_s = np.where(is_answered, ended_s, np.nan)
    first_s, last_s = np.full(num, np.nan), np.full(num, np.nan)
    first_s[has_events], last_s[has_events] = event_s[first], event_s[last]
    num_tokens_in_events = np.bincount(owner, counts, num).astype(np.float64)
    num_tokens_first = np.zeros(num)
    num_tokens_first[has_events] = counts[first]
    # Without a total from the server, the sum over events is used.
    num_tokens = np.where(is_answered, np.where(num_tokens > 0, num_tokens, num_tokens_in_events), 0.0)
    scale = _quotient(num_tokens, num_tokens_in_events, num_tokens_in_events > 0)

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
        num_tokens_in_events=num_tokens_in_events,
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
        pause_tokens=counts[is_later],
        pause_ended_s=event_s[is_later],
        event_s=event_s,
        event_tokens=counts * scale[owner],
    )


def _quotient(dividends: Floats, divisors: Floats, where: Booleans) -> Floats:
    """Divide where `where` is true; NaN elsewhere."""
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
                f"record {each.index} has {len(each.token_times_s)} event times and token counts "
                f"{each.tokens_per_event}; there must be one count of at least 1 for each"
            )
        yield each.tokens_per_event
