"""Compute the figures of a run: throughput, latencies, idle slots, unused memory."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from msgspec import Struct

from servekit.laboratory.timeline import RequestTimeline, Timeline


class Summary(Struct, frozen=True, kw_only=True):
    """The figures of one run. Times are in seconds, shares from 0 to 1."""

    num_requests: int
    num_output_tokens: int
    duration_s: float  # from the first arrival to the last token
    tokens_per_s: float
    # The same until the last request has a slot: after that there is nothing left to fill free slots with. 0 if
    # requests waited for less than half of that time.
    tokens_per_s_while_waiting: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    last_token_s: float  # between the last two tokens of all; if there is only one, from the first arrival to it
    idle_slot_share: float  # of the slots' time
    unused_memory_share: float  # of the places in the KV cache that running sequences held
    cached_prompt_share: float  # of the prompts' tokens
    num_steps: int


def percentile(values: list[float], share: float) -> float:
    """The value that this share of all values does not exceed: the nearest rank. 0 without values."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else 0.0


def summarise(timeline: Timeline, num_slots: int) -> Summary:
    """Compute the figures of a run in which every answer has ended."""
    requests = sorted(timeline.requests.values(), key=lambda request: request.arrival_s)
    began_s = requests[0].arrival_s
    duration_s = max(request.ended_s for request in requests) - began_s
    num_tokens = sum(len(request.token_times_s) for request in requests)
    gaps = [later - sooner for request in requests for sooner, later in pairwise(request.token_times_s)]
    times_s = sorted(at_s for request in requests for at_s in request.token_times_s)
    ttft = [request.token_times_s[0] - request.arrival_s for request in requests]
    busy_s = sum(request.ended_s - _admitted_s(request) for request in requests)
    filled_s = max(map(_admitted_s, requests)) - began_s
    num_early = sum(at_s <= began_s + filled_s for request in requests for at_s in request.token_times_s)
    reserved = sum(step.num_reserved_tokens * (step.done_s - step.began_s) for step in timeline.steps)
    unused = sum(step.num_unused_tokens * (step.done_s - step.began_s) for step in timeline.steps)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    return Summary(
        num_requests=len(requests),
        num_output_tokens=num_tokens,
        duration_s=duration_s,
        tokens_per_s=num_tokens / duration_s if duration_s else 0.0,
        tokens_per_s_while_waiting=num_early / filled_s if _waiting_s(requests) > filled_s / 2 else 0.0,
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        itl_p50_s=percentile(gaps, 0.5),
        itl_p99_s=percentile(gaps, 0.99),
        last_token_s=times_s[-1] - (times_s[-2] if len(times_s) > 1 else began_s),
        idle_slot_share=1.0 - busy_s / (num_slots * duration_s) if duration_s else 0.0,
        unused_memory_share=unused / reserved if reserved else 0.0,
        cached_prompt_share=sum(request.num_cached_tokens for request in requests) / num_prompt_tokens,
        num_steps=len(timeline.steps),
    )


def _waiting_s(requests: list[RequestTimeline]) -> float:
    """How long at least one request waited for a slot. `requests` are in order of arrival."""
    waiting_s, until_s = 0.0, 0.0
    for request in requests:
        admitted_s = _admitted_s(request)
        waiting_s += max(0.0, admitted_s - max(request.arrival_s, until_s))
        until_s = max(until_s, admitted_s)
    return waiting_s


def _admitted_s(request: RequestTimeline) -> float:
    assert request.admitted_s is not None, "every answer has ended, so every request had a slot"
    return request.admitted_s
