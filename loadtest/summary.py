"""A run in figures, and whether they can be believed: what summary.json holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace

from loadtest import slo
from loadtest.planned import Plan
from loadtest.record import Outcome
from loadtest.slo import Goodput, Objectives, Verdict
from loadtest.statistics import Distribution, Floats, distribution, open_count
from loadtest.target import Target
from loadtest.timeline import COUNTERS, Booleans, Measurements, Scrape, server_series, steady_window

SCHEMA_VERSION = 1
# What the client may be late by, or the run is not valid: it would be measuring itself.
LAG_SHARE = 0.05  # of the median time to the first token
LEAST_LAG_LIMIT_S = 0.002  # what the self-test holds it to
NOTABLE_SHARE = 0.1  # of a published p99.9 or maximum, that the client's greatest lag may be without a word
RAMP = "ramp:"  # arrivals whose rate never holds still
CLIENT_WAS_LATE = "the client itself was up to"  # how that word begins


class Environment(Struct, frozen=True):
    """What the run was made with, and on; handed in, for nothing here looks at a clock or a machine."""

    host: str  # its processor, cores and memory, in words
    python: str
    command: str
    started_at: str  # ISO 8601
    version: str = ""  # of this tool: a commit
    server_info: dict[str, Any] | None = None  # what the server says about itself


class Client(Struct, frozen=True, kw_only=True):
    """How this tool was set up. None is unknown: the summary is older than the field."""

    characters_per_token: float | None = None  # by which prompts were made to their lengths
    num_warm_up: int | None = None  # requests before the run
    num_processes: int | None = None
    sources: list[str] = []  # local addresses


class Settings(Client, frozen=True, kw_only=True):
    """What was asked, of whom, and how: enough to ask it again. No keys."""

    arrivals: str
    workload: str
    seed: int
    num_requests: int
    num_clients: int | None
    duration_s: float | None
    urls: list[str]
    door: str
    model: str | None
    fields: dict[str, Any]
    batch_size: int
    timeout_s: float
    max_connections: int | None
    verifies: bool


class Failure(Struct, frozen=True):
    """How many requests ended alike, and not well."""

    outcome: str
    status: int
    error: str
    num: int


class Figures(Struct, frozen=True):
    """Of a span of the run. Requests belong to it by their intended start, tokens, pauses and ends by when they came.

    So in a span in which long answers went on and none began, there are times between tokens, and no TTFT.
    Latencies are from the intended start, unless they say otherwise, and of answered requests.
    """

    from_s: float
    to_s: float
    num_requests: int  # begun
    num_answered: int  # of those
    ttft_s: Distribution | None
    ttft_from_start_s: Distribution | None
    second_token_s: Distribution | None  # from the first event to the second one
    itl_s: Distribution | None  # an event of k tokens after a pause g is k times g/k
    pause_s: Distribution | None  # between events, however many tokens they bring
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    e2e_from_start_s: Distribution | None
    queue_s: Distribution | None  # as the server tells
    client_lag_s: Distribution | None  # of requests that nothing but the client held up
    output_tokens: Distribution | None  # of a request
    tokens_per_s_per_user: Distribution | None  # of a request, after its first event
    output_tokens_per_s: float  # of answered requests, as the next ones
    input_tokens_per_s: float | None  # None if the server does not tell
    requests_per_s: float
    in_flight_mean: float
    in_flight_max: int
    goodput: Goodput | None


class ServerFigure(Struct, frozen=True):
    """Of what the server was scraped for: of a counter, by how much it grew."""

    mean: float
    max: float
    increase: float | None = None


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
    num_forestalled: int  # requests that the run's end kept from being begun
    num_lost_turns: int  # that were not begun, because the turn before had failed
    tokens_counted_by: dict[str, int]  # answered requests
    objectives: str | None
    verdicts: list[Verdict]
    event_loop_lag_s: Distribution | None  # of the client
    server: dict[str, ServerFigure]
    full: Figures
    steady: Figures | None


UNKNOWN_CLIENT = Client()


def summarise(
    plan: Plan,
    measured: Measurements,
    target: Target,
    environment: Environment,
    objectives: Objectives | None = None,
    *,
    event_loop_lags_s: Sequence[float] = (),
    scrapes: Sequence[Scrape] = (),
    notes: Sequence[str] = (),
    errors: Sequence[str] = (),
    client: Client = UNKNOWN_CLIENT,
    steady_share: float = 0.9,
) -> Summary:
    """Of all that is known after a run; `event_loop_lags_s` are of all the client's processes.

    `errors` are of the client itself: a run that has any is not valid. Requests that the user cut by ending the run are
    neither good nor failed, in goodput and in demands.
    """
    forestalled, lost_turns = _never_begun(plan, measured)
    is_to_be_served = (measured.is_begun & ~measured.is_stopped) | lost_turns
    lags_s = client_lags_s(measured, target)
    loop_lag_s = distribution(np.asarray(event_loop_lags_s, np.float64))
    full = _figures(measured, measured.span_s(), lags_s, objectives, is_to_be_served, is_whole=True)
    window = None
    if not plan.arrivals.startswith(RAMP):  # whose plateau would be of few requests at rates that few others have
        window = steady_window(measured, is_open=plan.num_clients is None, share=steady_share)
    steady = None if window is None else _figures(measured, window, lags_s, objectives, is_to_be_served, is_whole=False)
    reasons = [*errors, *_missing(plan, measured), *_bottleneck(full, loop_lag_s)]
    num_failed = int((is_to_be_served & ~measured.is_answered).sum())
    verdicts = []
    if objectives:
        values = _by_name(measured, measured.inter_token_s())
        verdicts = slo.judge(objectives, values, int(measured.is_answered.sum()), num_failed)
    return Summary(
        schema_version=SCHEMA_VERSION,
        environment=_publishable(environment, target.api_key),
        settings=_settings(plan, target, client),
        is_valid=not reasons,
        invalid_because=reasons,
        notes=[
            *notes,
            *_notes(measured, full, int(lost_turns.sum()), int(forestalled.sum())),
            *_unmeasured(objectives, measured),
            *_late_tails(full, loop_lag_s),
        ],
        outcomes=dict(Counter(each.outcome.value for each in measured.records)),
        failures=_failures(measured),
        num_forestalled=int(forestalled.sum()),
        num_lost_turns=int(lost_turns.sum()),
        tokens_counted_by=dict(
            Counter(each.counted_by.value for each in measured.records if each.outcome is Outcome.OK)
        ),
        objectives=objectives.text if objectives else None,
        verdicts=verdicts,
        event_loop_lag_s=loop_lag_s,
        server={name: _server_figure(name, values) for name, (_, values) in server_series(scrapes).items()},
        full=full,
        steady=steady,
    )


def _settings(plan: Plan, target: Target, client: Client) -> Settings:
    return Settings(
        **asdict(client),
        arrivals=plan.arrivals,
        workload=plan.workload,
        seed=plan.seed,
        num_requests=len(plan.requests),
        num_clients=plan.num_clients,
        duration_s=plan.duration_s,
        urls=target.urls,
        door=target.door.value,
        model=target.model,
        fields=target.fields,
        batch_size=target.batch_size,
        timeout_s=target.timeout_s,
        max_connections=target.max_connections,
        verifies=target.verifies,
    )


def _publishable(environment: Environment, api_key: str | None) -> Environment:
    """Summaries are pasted into issues, and a command line may hold the key, or bytes that are no text."""
    command = environment.command.replace(api_key, "***") if api_key else environment.command
    return replace(environment, command=_encodable(command))


def _encodable(text: str) -> str:
    """What UTF-8 cannot hold must not be what an hour's run fails of, at its end."""
    return text.encode("utf-8", "replace").decode("utf-8")


# -- figures ----------------------------------------------------------------------------------------------------------


def _by_name(measured: Measurements, itl_s: Floats) -> dict[str, Floats]:
    return {"ttft": measured.ttft_s, "tpot": measured.tpot_s, "itl": itl_s, "e2e": measured.e2e_s}


def _unmeasured(objectives: Objectives | None, measured: Measurements) -> list[str]:
    """Limits that nobody keeps, because there is nothing to hold them against."""
    if objectives is None or not measured.is_answered.any():
        return []
    values = _by_name(measured, measured.longest_pause_s)
    return [
        f"{limit.name}: no answer has any, as with whole answers or those of one token, so that all miss this limit"
        for limit in objectives.limits
        if not slo.is_measured(limit, values)
    ]


def _figures(
    measured: Measurements,
    window_s: tuple[float, float],
    lags_s: Floats,
    objectives: Objectives | None,
    is_to_be_served: Booleans,
    *,
    is_whole: bool,
) -> Figures:
    from_s, to_s = window_s
    span_s = to_s - from_s

    def inside(times_s: Floats) -> Booleans:
        # The last end is the end of the run, and belongs to it.
        return np.full(len(times_s), True) if is_whole else (times_s >= from_s) & (times_s < to_s)

    belongs = inside(measured.intended_s)
    ended = measured.is_answered & inside(measured.ended_s)
    is_pause_inside = inside(measured.pause_ended_s)
    came_s, num_came = measured.token_arrivals()
    tokens = float(num_came[inside(came_s)].sum())
    prompt_tokens = measured.num_prompt_tokens[belongs & measured.is_answered]
    in_flight = measured.in_flight()
    goodput = None
    if objectives is not None and objectives.limits:
        values = _by_name(measured, measured.longest_pause_s)
        goodput = slo.good(objectives, values, measured.is_answered, is_to_be_served & belongs, span_s)

    def per_s(amount: float) -> float:
        return amount / span_s if span_s > 0.0 else 0.0

    def of_requests(values: Floats) -> Distribution | None:
        return distribution(values[belongs])

    return Figures(
        from_s=from_s,
        to_s=to_s,
        num_requests=int((measured.is_begun & belongs).sum()),
        num_answered=int((measured.is_answered & belongs).sum()),
        ttft_s=of_requests(measured.ttft_s),
        ttft_from_start_s=of_requests(measured.ttft_from_start_s),
        second_token_s=of_requests(measured.second_token_s),
        itl_s=distribution(measured.inter_token_s(None if is_whole else is_pause_inside)),
        pause_s=distribution(measured.pause_s[is_pause_inside]),
        tpot_s=of_requests(measured.tpot_s),
        e2e_s=of_requests(measured.e2e_s),
        e2e_from_start_s=of_requests(measured.e2e_from_start_s),
        queue_s=of_requests(np.where(measured.is_answered, measured.queue_s, np.nan)),
        client_lag_s=of_requests(lags_s),
        output_tokens=of_requests(np.where(measured.is_answered, measured.num_tokens, np.nan)),
        tokens_per_s_per_user=of_requests(measured.tokens_per_s),
        output_tokens_per_s=per_s(tokens),
        input_tokens_per_s=None if np.isnan(prompt_tokens).all() else per_s(float(np.nansum(prompt_tokens))),
        requests_per_s=per_s(float(ended.sum())),
        in_flight_mean=in_flight.mean(from_s, to_s),
        in_flight_max=in_flight.highest(from_s, to_s),
        goodput=goodput,
    )


def client_lags_s(measured: Measurements, target: Target) -> Floats:
    """By request, the actual start less the intended one; NaN where it was not the client that held it up.

    With `max_connections`, a request that finds them all taken waits for the server, and rightly so. Each of the
    client's processes is taken to have an equal share of them.
    """
    lags_s = np.where(measured.is_begun, measured.started_s - measured.intended_s, np.nan)
    if target.max_connections is None:
        return lags_s
    processes = np.unique(measured.process)
    limit = target.max_connections // max(1, len(processes)) * target.batch_size
    for process in processes:
        own = measured.is_begun & (measured.process == process)
        busy = open_count(measured.started_s[own], measured.ended_s[own]).before(measured.intended_s[own])
        lags_s[own] = np.where(busy >= limit, np.nan, lags_s[own])
    return lags_s


def _never_begun(plan: Plan, measured: Measurements) -> tuple[Booleans, Booleans]:
    """By record: those that the run's end forestalled, and turns whose conversation had failed before."""
    places = {int(index): place for place, index in enumerate(measured.index)}
    is_lost = np.zeros(len(measured.index), bool)
    is_failed = measured.is_failed
    for request in sorted((each for each in plan.requests if each.follows is not None), key=lambda each: each.index):
        place, before = places.get(request.index), places.get(request.follows if request.follows is not None else -1)
        if place is not None and before is not None and not measured.is_begun[place]:
            is_lost[place] = is_failed[before] or is_lost[before]
    return ~measured.is_begun & ~is_lost, is_lost


def _failures(measured: Measurements) -> list[Failure]:
    kinds = Counter(
        (each.outcome.value, each.status, _encodable(each.error))
        for each, is_failed in zip(measured.records, measured.is_failed, strict=True)
        if is_failed
    )
    return [Failure(*kind, num) for kind, num in kinds.most_common()]


def prefix_cache_hit_rate(summaries: Sequence[Summary]) -> float | None:
    """Of the prompts' tokens that were looked up during these runs, the share that was found; None if not told."""
    num_queries = num_hits = 0.0
    for each in summaries:
        queries, hits = each.server.get("num_prefix_cache_queries"), each.server.get("num_prefix_cache_hits")
        if queries is not None and hits is not None:
            num_queries += queries.increase or 0.0
            num_hits += hits.increase or 0.0
    return num_hits / num_queries if num_queries else None


def _server_figure(name: str, values: Floats) -> ServerFigure:
    increase = None
    if name in COUNTERS:
        # A counter that went back was that of a server that has been started again.
        steps = np.diff(values)
        increase = float(np.where(steps >= 0.0, steps, values[1:]).sum())
    return ServerFigure(float(values.mean()), float(values.max()), increase)


# -- validity ---------------------------------------------------------------------------------------------------------


def _missing(plan: Plan, measured: Measurements) -> list[str]:
    planned = {each.index for each in plan.requests}
    recorded = [int(index) for index in measured.index]
    reasons = []
    if missing := len(planned - set(recorded)):
        reasons.append(f"{missing} of {len(planned)} planned requests have no record")
    if twice := len(recorded) - len(set(recorded)):
        reasons.append(f"{twice} records are of requests that have another record")
    if unknown := len(set(recorded) - planned):
        reasons.append(f"{unknown} records are of requests that were not planned")
    return reasons


def lag_limit_s(figures: Figures) -> float:
    """What the client may be late by at the 99th percentile: LAG_SHARE of the median TTFT, or LEAST_LAG_LIMIT_S.

    Whole answers have no TTFT: of the time to their end.
    """
    answer = figures.ttft_from_start_s or figures.e2e_from_start_s
    return max(LEAST_LAG_LIMIT_S, LAG_SHARE * answer.p50 if answer else 0.0)


def _bottleneck(full: Figures, loop_lag_s: Distribution | None) -> list[str]:
    if full.num_answered == 0:
        return ["no request was answered, so there is nothing to measure"]
    limit_s = lag_limit_s(full)
    median = "TTFT" if full.ttft_from_start_s else "E2E"
    reasons = []
    for what, lag_s in (("requests started", full.client_lag_s), ("the client's event loop was", loop_lag_s)):
        if lag_s is not None and lag_s.p99 > limit_s:
            reasons.append(
                f"the client was the bottleneck: {what} {lag_s.p99 * 1e3:.3g} ms late at the 99th percentile, where "
                f"{limit_s * 1e3:.3g} ms are allowed ({LAG_SHARE * 100:g} % of the median {median}, or "
                f"{LEAST_LAG_LIMIT_S * 1e3:g} ms); use more processes or a lower rate"
            )
    return reasons


def _late_tails(full: Figures, loop_lag_s: Distribution | None) -> list[str]:
    """What the 99th percentile of the lags cannot show: a client that stood still once, for less than 1 % of the run.

    Each figure that such a lag would be a notable part of is named, p99.9 as well as the maximum: who stands still for
    a thousandth of the run is late for more than a thousandth of the requests, whose starts and whose answers wait.
    """
    late_s = max((each.max for each in (full.client_lag_s, loop_lag_s) if each is not None), default=0.0)
    if late_s <= LEAST_LAG_LIMIT_S:
        return []
    doubtful = [
        f"{name} {percentile} ({value_s * 1e3:.3g} ms)"
        for name, told in (("TTFT", full.ttft_s), ("pause", full.pause_s), ("E2E", full.e2e_s))
        if told is not None
        for percentile, value_s in (("p99.9", told.p999), ("max", told.max))
        if late_s > NOTABLE_SHARE * value_s
    ]
    if not doubtful:
        return []
    return [f"{CLIENT_WAS_LATE} {late_s * 1e3:.3g} ms late, which may be in {', '.join(doubtful)}"]


def _notes(measured: Measurements, full: Figures, num_lost_turns: int, num_forestalled: int) -> list[str]:
    notes = []
    if num_forestalled:
        notes.append(
            f"{num_forestalled} of {len(measured.records)} planned requests were not begun before the run ended, and "
            "are in no figure"
        )
    if num_failed := int(measured.is_failed.sum()):
        notes.append(f"{num_failed} of {full.num_requests} requests failed, and are in no latency")
    if num_stopped := int(measured.is_stopped.sum()):
        notes.append(
            f"{num_stopped} requests were under way when the user ended the run, and are in no latency, goodput or "
            "demand: those that take long are fewer than they should be"
        )
    if num_lost_turns:
        notes.append(f"{num_lost_turns} turns were not asked, because the one before had failed; they count as failed")
    is_told = measured.num_tokens_told > 0
    num_silent = int((is_told & (measured.num_tokens > measured.num_tokens_told)).sum())
    if num_silent:
        notes.append(
            f"{num_silent} answers have more tokens than events, and the server does not tell which event had how "
            "many: their ITL is of events, so too long"
        )
    return notes
