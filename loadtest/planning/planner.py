"""Make a plan: what is sent (workloads, traces) at the times of the arrivals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np
from msgspec import structs
from numpy.random import Generator

from loadtest.errors import LoadTestError
from loadtest.planning.arrivals import MAX_DURATION_S, Arrivals, Closed, Open, Traced, parse_arrivals
from loadtest.planning.plan import Plan, Request
from loadtest.planning.text import CHARACTERS_PER_TOKEN, TextGenerator
from loadtest.planning.traces import Trace
from loadtest.planning.workloads import WORKLOADS, Turn, Workload, parse_workload

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
    """Plan what is sent, and when: the same arguments give the same plan, with the same numpy.

    The forms of `arrivals` are listed in planning/arrivals.py; those of `workload` in planning/workloads.py, and
    `trace:FILE[,format=…,output=…,turns=…,think=…]` in planning/traces.py.

    The plan ends with `num_requests` or before `duration_s`, whichever comes first. Every turn of a conversation counts
    as a request; the last conversation is cut short if necessary. A trace also ends by itself. With other arrivals than
    its own it must have enough prompts: repeated ones would be found in the server's prefix cache. For a closed loop,
    only a number of requests or a trace says how many to prepare.

    Arrivals, text and everything else draw from separate generators: another workload does not change the starts, nor
    another rate the prompts. `characters_per_token` is the server's ratio for the text of planning/text.py.

    Raises LoadTestError for unknown forms, and for plans that never end, are empty or are too large.
    """
    _check_limits(seed, num_requests, duration_s, characters_per_token)
    when = parse_arrivals(arrivals)
    what = parse_workload(workload, {**WORKLOADS, "trace": Trace})
    end_s = when.end_s(duration_s) if isinstance(when, Open) else duration_s
    for_arrivals, for_words, for_workload = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    starts: Iterator[Start]
    if isinstance(when, Traced):
        starts = _traced(when, what, end_s, TextGenerator(for_words, characters_per_token), for_workload)
    else:
        times_s = _times_s(when, for_arrivals, num_requests, end_s, is_endless=not isinstance(what, Trace))
        conversations = what.conversations(TextGenerator(for_words, characters_per_token), for_workload)
        must_suffice = num_requests is not None or (isinstance(when, Open) and end_s is not None)
        starts = _paired(times_s, conversations, must_suffice)
    requests = _requests(starts, num_requests)
    if not requests:
        raise LoadTestError(
            f"--arrivals {arrivals} with --workload {workload} start no request; raise --duration or the rate"
        )
    num_clients = when.num_clients if isinstance(when, Closed) else None
    return Plan(requests, arrivals, workload, seed, num_clients, end_s)


def shares(plan: Plan, num_processes: int) -> list[Plan]:
    """Divide a plan among client processes: each gets part of the requests and, in a closed loop, of the clients.

    Each of `num_processes` gets every `num_processes`-th start, that is, the same arrivals at a lower rate; no process
    has its own rush. Turns of a conversation stay together. In a closed loop, requests are divided among the clients
    and these among the processes, so that a process with one client more also gets its requests. Indices stay those of
    the whole plan; a share cannot be divided again.
    """
    assert num_processes >= 1
    num_owners = plan.num_clients or num_processes
    processes: list[int] = []  # by request
    requests_by_process: list[list[Request]] = [[] for _ in range(num_processes)]
    num_starts = 0
    for request in plan.requests:
        assert request.index == len(processes), "this is a share already"
        if request.follows is None:
            process = num_starts % num_owners % num_processes
            num_starts += 1
        else:
            process = processes[request.follows]
        processes.append(process)
        requests_by_process[process].append(request)
    return [
        structs.replace(
            plan,
            requests=requests,
            num_clients=None if plan.num_clients is None else len(range(process, plan.num_clients, num_processes)),
        )
        for process, requests in enumerate(requests_by_process)
    ]


def _check_limits(seed: int, num_requests: int | None, duration_s: float | None, characters_per_token: float) -> None:
    if seed < 0:
        raise LoadTestError(f"--seed {seed} is below 0")
    if num_requests is not None and not 1 <= num_requests <= MAX_REQUESTS:
        raise LoadTestError(f"--requests {num_requests} is not within 1 to {MAX_REQUESTS:,}")
    if duration_s is not None and not 0 < duration_s <= MAX_DURATION_S:
        raise LoadTestError(f"--duration {duration_s} is not above 0 and at most {MAX_DURATION_S:,.0f} s")
    if not 0.1 <= characters_per_token <= 100:
        raise LoadTestError(f"--characters-per-token {characters_per_token} is not within 0.1 to 100")


def _times_s(
    when: Arrivals, generator: Generator, num_requests: int | None, end_s: float | None, is_endless: bool
) -> Iterator[float | None]:
    """Return the intended starts; as many as there may be requests, as a start may have only one."""
    if isinstance(when, Closed):
        if num_requests is None and is_endless:
            raise LoadTestError("a closed loop needs --requests: how many it will send is not known in advance")
        return repeat(None, num_requests or MAX_REQUESTS)
    assert isinstance(when, Open)
    if num_requests is None and end_s is None and is_endless:
        raise LoadTestError("this run would never end; give --requests, --duration or both")
    times_s = when.starts_s(generator, num_requests or MAX_REQUESTS + 1, end_s)
    if num_requests is None and end_s is not None and len(times_s) > MAX_REQUESTS:
        raise LoadTestError(
            f"more than {MAX_REQUESTS:,} requests would start within {end_s:g} s; lower the rate or the duration"
        )
    return map(float, times_s)


def _paired(
    times_s: Iterator[float | None], conversations: Iterator[list[Turn]], must_suffice: bool
) -> Iterator[Start]:
    for num_starts, start_s in enumerate(times_s):
        turns = next(conversations, None)
        if turns is None:
            if must_suffice:
                raise LoadTestError(
                    f"the trace ends after {num_starts} starts, fewer than requested; lower --requests, --duration or "
                    "the rate"
                )
            return
        yield start_s, turns


def _traced(
    when: Traced, what: Workload, end_s: float | None, words: TextGenerator, generator: Generator
) -> Iterator[Start]:
    """Return a trace at its own times, counted from its first one."""
    if not isinstance(what, Trace):
        raise LoadTestError("--arrivals trace needs --workload trace:FILE")
    first_s: float | None = None
    latest_s = 0.0
    for number, entry in enumerate(what.entries(words, generator), 1):
        if entry.start_s is None:
            raise LoadTestError(
                f"trace {what.file}: request {number} has no time; use other --arrivals, such as poisson:10"
            )
        first_s = entry.start_s if first_s is None else first_s
        start_s = (entry.start_s - first_s) / when.speedup
        if start_s < latest_s:
            raise LoadTestError(
                f"trace {what.file}: request {number} is earlier than the one before; sort the file by time"
            )
        if end_s is not None and start_s >= end_s:
            return
        latest_s = start_s
        yield start_s, entry.turns


def _requests(starts: Iterator[Start], num_requests: int | None) -> list[Request]:
    requests: list[Request] = []
    num_characters = 0
    max_requests = num_requests or MAX_REQUESTS
    for start_s, turns in starts:
        follows = None
        for turn in turns[: max_requests - len(requests)]:
            index = len(requests)
            intended_s = start_s if follows is None else None
            requests.append(Request(index, intended_s, turn.prompt, turn.max_tokens, follows, turn.think_s, turn.group))
            follows = index
            num_characters += len(turn.prompt)
        if num_characters > MAX_CHARACTERS:
            raise LoadTestError(
                f"{len(requests):,} prompts have more than {MAX_CHARACTERS:,} characters; use fewer or shorter prompts"
            )
        if len(requests) == max_requests:
            break
    return requests
