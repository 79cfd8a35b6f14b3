"""The plan of a run: what is sent, and when. Fixed from a seed before the first byte is sent."""

from __future__ import annotations

from msgspec import Struct


class Request(Struct, frozen=True, gc=False):
    """One request. `index` is its position in the plan.

    `intended_s` counts from the start of the run, and nothing that happens during the run changes it: whatever delays
    the request, the server or this client, counts as latency (Tene, "How NOT to measure latency", 2015). It is None if
    there is no such time: in a closed loop, whose clients send as soon as they have an answer, and for later turns of a
    conversation, which start `think_s` after the end of the turn before.
    """

    index: int
    intended_s: float | None
    prompt: str
    max_tokens: int
    follows: int | None = None  # index of the turn before; its prompt and answer precede this prompt
    think_s: float = 0.0
    group: int | None = None  # number of the group of prompts with the same prefix


class Plan(Struct, frozen=True):
    """All requests, in the order of their intended starts."""

    requests: list[Request]
    arrivals: str  # as requested: `poisson:20`
    workload: str  # as requested
    seed: int
    num_clients: int | None = None  # of a closed loop; None for an open loop
    duration_s: float | None = None  # no request is started later
