"""Puts a plan together: what is asked (workloads, traces) at the times that arrivals have it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np
from msgspec import structs
from numpy.random import Generator

from loadtest.arrivals import MAX_DURATION_S, Arrivals, Closed, Open, Traced, parse_arrivals
from loadtest.errors import LoadTestError
from loadtest.planned import Plan, Request
from loadtest.traces import Trace
from loadtest.words import CHARACTERS_PER_TOKEN, Words
from loadtest.workloads import WORKLOADS, Turn, Workload, parse_workload

MAX_REQUESTS = 5_000_000
MAX_CHARACTERS = 4_000_000_000  # of all prompts together, which are held in memory until they are sent

Start = tuple[float | None, list[Turn]]


def make_plan(
    arrivals: str,
    workload: str,
    *,
    seed: int = 0,
    num_requests: int | None = None,
    duration_s: float | None = None,
    characters_per_token: float = CHARACTERS_PER_TOKEN,
) -> Plan:
    """What to ask, and when: the same arguments give the same plan, with the same numpy.

    The forms of `arrivals` are those of loadtest.arrivals; of `workload` those of loadtest.workloads, and
    `trace:FILE[,format=…,output=…,turns=…,think=…]`, see loadtest.traces.

    It ends with `num_requests`, every turn of a conversation counted and the last conversation cut short where it must
    be, or before `duration_s`, whichever comes first. A trace also ends by itself. At other arrivals than its own it
    must have as many starts as were asked for: to ask its prompts again would find them in the server's prefix cache.
    In a closed loop only a number of requests, or a trace, says how many to prepare.

    Arrivals, text and all else draw from separate generators, so that another workload does not move the starts, nor
    another rate the prompts. `characters_per_token` is the server's ratio for text of loadtest.words.

    Raises LoadTestError for what is none of the forms, what never ends, what asks nothing, and what is too much.
    """
    _check_limits(seed, num_requests, duration_s, characters_per_token)
    when = parse_arrivals(arrivals)
    what = parse_workload(workload, {**WORKLOADS, "trace": Trace})
    end_s = when.end_s(duration_s) if isinstance(when, Open) else duration_s
    for_arrivals, for_words, for_workload = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    starts: Iterator[Start]
    if isinstance(when, Traced):
        starts = _traced(when, what, end_s, Words(for_words, characters_per_token), for_workload)
    else:
        times_s = _times_s(when, for_arrivals, num_requests, end_s, is_endless=not isinstance(what, Trace))
        conversations = what.conversations(Words(for_words, characters_per_token), for_workload)
        must_suffice = num_requests is not None or (isinstance(when, Open) and end_s is not None)
        starts = _paired(times_s, conversations, must_suffice)
    requests = _requests(starts, num_requests)
    if not requests:
        raise LoadTestError(
            f"arrivals {arrivals} with workload {workload} ask nothing; give more time, or more of them"
        )
    num_clients = when.num_clients if isinstance(when, Closed) else None
    return Plan(requests, arrivals, workload, seed, num_clients, end_s)


def shares(plan: Plan, num_processes: int) -> list[Plan]:
    """The plan dealt to the client's processes: each has its part of the requests, and of the clients.

    Of `num_processes` each gets every `num_processes`-th start, that is the same arrivals thinned out, and none has a
    busy time of its own. The turns of a conversation stay together. In a closed loop requests are dealt to the clients
    and these to the processes, so that a process with one client more also has its requests. Indices stay those of
    the whole plan, which must be in hand: a share cannot be dealt again.
    """
    assert num_processes >= 1
    num_hands = plan.num_clients or num_processes
    processes: list[int] = []  # by request
    dealt: list[list[Request]] = [[] for _ in range(num_processes)]
    num_starts = 0
    for request in plan.requests:
        assert request.index == len(processes), "this is a share already"
        if request.follows is None:
            process = num_starts % num_hands % num_processes
            num_starts += 1
        else:
            process = processes[request.follows]
        processes.append(process)
        dealt[process].append(request)
    return [
        structs.replace(
            plan,
            requests=requests,
            num_clients=None if plan.num_clients is None else len(range(process, plan.num_clients, num_processes)),
        )
        for process, requests in enumerate(dealt)
    ]


def _check_limits(seed: int, num_requests: int | None, duration_s: float | None, characters_per_token: float) -> None:
    if seed < 0:
        raise LoadTestError(f"the seed is {seed}; it must be 0 or more")
    if num_requests is not None and not 1 <= num_requests <= MAX_REQUESTS:
        raise LoadTestError(f"the number of requests is {num_requests}; it must be from 1 to {MAX_REQUESTS:,}")
    if duration_s is not None and not 0 < duration_s <= MAX_DURATION_S:
        raise LoadTestError(f"the duration is {duration_s} s; it must be above 0 and at most {MAX_DURATION_S:,.0f} s")
    if not 0.1 <= characters_per_token <= 100:
        raise LoadTestError(f"characters per token are {characters_per_token}; they must be from 0.1 to 100")


def _times_s(
    when: Arrivals, generator: Generator, num_requests: int | None, end_s: float | None, is_endless: bool
) -> Iterator[float | None]:
    """The intended starts; as many as there may be requests, for a start may be of one only."""
    if isinstance(when, Closed):
        if num_requests is None and is_endless:
            raise LoadTestError("how many a closed loop asks is not known before: give a number of requests to prepare")
        return repeat(None, num_requests or MAX_REQUESTS)
    assert isinstance(when, Open)
    if num_requests is None and end_s is None and is_endless:
        raise LoadTestError("this would never end: give a number of requests, or a duration, or both")
    times_s = when.starts_s(generator, num_requests or MAX_REQUESTS + 1, end_s)
    if num_requests is None and end_s is not None and len(times_s) > MAX_REQUESTS:
        raise LoadTestError(
            f"more than {MAX_REQUESTS:,} requests would start within {end_s:g} s: lower the rate or the duration"
        )
    return map(float, times_s)


def _paired(
    times_s: Iterator[float | None], conversations: Iterator[list[Turn]], must_suffice: bool
) -> Iterator[Start]:
    for num_starts, start_s in enumerate(times_s):
        turns = next(conversations, None)
        if turns is None:
            if must_suffice:
                raise LoadTestError(f"the trace ends after {num_starts} starts, and more were asked for: ask for fewer")
            return
        yield start_s, turns


def _traced(when: Traced, what: Workload, end_s: float | None, words: Words, generator: Generator) -> Iterator[Start]:
    """A trace at its own times, from its first one on."""
    if not isinstance(what, Trace):
        raise LoadTestError("arrivals trace need a trace as their workload: trace:FILE")
    first_s: float | None = None
    latest_s = 0.0
    for number, entry in enumerate(what.entries(words, generator), 1):
        if entry.start_s is None:
            raise LoadTestError(
                f"trace {what.file}: request {number} has no time; choose other arrivals, such as poisson:10"
            )
        first_s = entry.start_s if first_s is None else first_s
        start_s = (entry.start_s - first_s) / when.speedup
        if start_s < latest_s:
            raise LoadTestError(
                f"trace {what.file}: request {number} is earlier than the one before; sort them by time"
            )
        if end_s is not None and start_s >= end_s:
            return
        latest_s = start_s
        yield start_s, entry.turns


def _requests(starts: Iterator[Start], num_requests: int | None) -> list[Request]:
    requests: list[Request] = []
    num_characters = 0
    most = num_requests or MAX_REQUESTS
    for start_s, turns in starts:
        follows = None
        for turn in turns[: most - len(requests)]:
            index = len(requests)
            intended_s = start_s if follows is None else None
            requests.append(Request(index, intended_s, turn.prompt, turn.max_tokens, follows, turn.think_s, turn.group))
            follows = index
            num_characters += len(turn.prompt)
        if num_characters > MAX_CHARACTERS:
            raise LoadTestError(
                f"{len(requests):,} prompts have more than {MAX_CHARACTERS:,} characters; ask for fewer or shorter ones"
            )
        if len(requests) == most:
            break
    return requests
