"""The figures of a run and whether they can be trusted: the content of summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from loadtest.analysis.slo import Goodput, Verdict
from loadtest.analysis.statistics import Distribution

SCHEMA_VERSION = 1


class Environment(Struct, frozen=True):
    """The machine, the command and the server of a run. Passed in, because analysis reads neither clock nor machine."""

    host: str  # processor, cores and memory
    python: str
    command: str
    started_at: str  # ISO 8601
    version: str = ""  # of this tool: a commit
    server_info: dict[str, Any] | None = None  # what the server reports about itself


class Client(Struct, frozen=True, kw_only=True):
    """How this client was set up. None is unknown: the summary is older than the field."""

    characters_per_token: float | None = None  # the ratio by which prompts were made
    num_warm_up: int | None = None  # requests before the run, not counted
    num_processes: int | None = None
    sources: list[str] = []  # local addresses


class Settings(Client, frozen=True, kw_only=True):
    """All that is needed to repeat the run. No API keys."""

    arrivals: str
    workload: str
    seed: int
    num_requests: int
    num_clients: int | None
    duration_s: float | None
    urls: list[str]
    api: str = field(name="door")  # the name of the field in summary.json
    model: str | None
    fields: dict[str, Any]
    batch_size: int
    timeout_s: float
    max_connections: int | None
    keep_alive: bool = True  # the default is for files of runs before there was a choice
    verifies: bool


class Failure(Struct, frozen=True):
    """How many requests failed in the same way."""

    outcome: str
    status: int
    error: str
    num: int


class Figures(Struct, frozen=True):
    """Figures of a span of the run.

    Requests belong to the span by their intended start; tokens, pauses and ends belong to it by the time they came. A
    span in which long answers continue and no request starts therefore has times between tokens and no TTFT. Latencies
    are of answered requests and counted from the intended start, unless the name says otherwise.
    """

    from_s: float
    to_s: float
    num_requests: int  # started
    num_answered: int  # of the started ones
    ttft_s: Distribution | None
    ttft_from_start_s: Distribution | None
    second_token_s: Distribution | None  # from the first event to the second one
    itl_s: Distribution | None  # an event of k tokens after a pause g counts as k times g/k
    pause_s: Distribution | None  # between events, whatever number of tokens they carry
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    e2e_from_start_s: Distribution | None
    queue_s: Distribution | None  # as the server reports it
    client_lag_s: Distribution | None  # of requests that only the client delayed
    output_tokens: Distribution | None  # of a request
    tokens_per_s_per_user: Distribution | None  # of one request, after its first event
    output_tokens_per_s: float  # of answered requests, like the next two
    input_tokens_per_s: float | None  # None if the server does not report prompt tokens
    requests_per_s: float
    in_flight_mean: float
    in_flight_max: int
    goodput: Goodput | None


class ServerFigure(Struct, frozen=True):
    """One metric that the server reported, over the run."""

    mean: float
    max: float
    increase: float | None = None  # of a counter


class Summary(Struct, frozen=True):
    """All times are in seconds."""

    schema_version: int
    environment: Environment
    settings: Settings
    is_valid: bool
    invalid_because: list[str]
    notes: list[str]
    outcomes: dict[str, int]
    failures: list[Failure]  # the most frequent first
    num_forestalled: int  # requests that were not started because the run ended
    num_lost_turns: int  # turns that were not sent because the turn before them had failed
    tokens_counted_by: dict[str, int]  # of answered requests, by where the count comes from
    objectives: str | None
    verdicts: list[Verdict]
    event_loop_lag_s: Distribution | None  # of the client
    server: dict[str, ServerFigure]
    full: Figures
    steady: Figures | None


def prefix_cache_hit_rate(summaries: Sequence[Summary]) -> float | None:
    """Return the share of looked-up prompt tokens that the prefix cache held; None if the server does not report it."""
    num_queries = num_hits = 0.0
    for each in summaries:
        queries, hits = each.server.get("num_prefix_cache_queries"), each.server.get("num_prefix_cache_hits")
        if queries is not None and hits is not None:
            num_queries += queries.increase or 0.0
            num_hits += hits.increase or 0.0
    return num_hits / num_queries if num_queries else None
