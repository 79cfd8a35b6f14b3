"""What a run is going to ask, and when: fixed from a seed before the first byte is sent."""

from __future__ import annotations

from msgspec import Struct


class Request(Struct, frozen=True, gc=False):
    """One query. `index` is its place in the plan.

    `intended_s` counts from the run's beginning, and nothing that happens during the run moves it: what a server, or
    this client, holds up is seen as latency (Tene, "How NOT to measure latency", 2015). It is None where there is no
    such time: in a closed loop, whose clients ask as soon as they were answered, and for the later turns of a
    conversation, which begin `think_s` after the end of the turn before.
    """

    index: int
    intended_s: float | None
    prompt: str
    max_tokens: int
    follows: int | None = None  # the turn before: its prompt and its answer stand before this prompt
    think_s: float = 0.0
    group: int | None = None  # of prompts that begin alike


class Plan(Struct, frozen=True):
    """All queries, in the order of their intended starts."""

    requests: list[Request]
    arrivals: str  # as asked for: `poisson:20`
    workload: str  # likewise
    seed: int
    num_clients: int | None = None  # who ask in a closed loop; None is an open one
    duration_s: float | None = None  # then nothing more is begun
