"""Compute a run's summary from its measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec.structs import asdict, replace

from loadtest.analysis import slo
from loadtest.analysis.measurements import Measurements
from loadtest.analysis.server_metrics import COUNTERS, Scrape, server_series
from loadtest.analysis.slo import Objectives
from loadtest.analysis.statistics import Booleans, Distribution, Floats, distribution
from loadtest.analysis.steady_state import steady_window
from loadtest.analysis.summary import (
    SCHEMA_VERSION,
    Client,
    Environment,
    Failure,
    Figures,
    ServerFigure,
    Settings,
    Summary,
)
from loadtest.analysis.validity import bottlenecks, client_lags_s, late_tails, missing_records, notes_on
from loadtest.planning.plan import Plan
from loadtest.record import Outcome
from loadtest.target import Target

RAMP = "ramp:"  # arrivals whose rate changes all the time


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
    """Summarise a run. `event_loop_lags_s` are those of all client processes.

    `errors` are those of the client itself; a run that has any is not valid. Requests that were cut because the user
    stopped the run count neither as good nor as failed, in goodput and in objectives of the whole run.
    """
    forestalled, lost_turns = _never_begun(plan, measured)
    is_to_be_served = requests_to_be_served(plan, measured)
    lags_s = client_lags_s(measured, target)
    loop_lag_s = distribution(np.asarray(event_loop_lags_s, np.float64))
    full = _figures(measured, measured.span_s(), lags_s, objectives, is_to_be_served, is_whole=True)
    window = None
    if not plan.arrivals.startswith(RAMP):  # a ramp has no steady state
        window = steady_window(measured, is_open=plan.num_clients is None, share=steady_share)
    steady = None if window is None else _figures(measured, window, lags_s, objectives, is_to_be_served, is_whole=False)
    reasons = [*errors, *missing_records(plan, measured), *bottlenecks(full, loop_lag_s)]
    num_failed = int((is_to_be_served & ~measured.is_answered).sum())
    verdicts = []
    if objectives:
        values = measured.limited_s() | {"itl": measured.inter_token_s()}
        verdicts = slo.check_demands(objectives, values, int(measured.is_answered.sum()), num_failed)
    return Summary(
        schema_version=SCHEMA_VERSION,
        environment=_publishable(environment, target.api_key),
        settings=_settings(plan, target, client),
        is_valid=not reasons,
        invalid_because=reasons,
        notes=[
            *notes,
            *notes_on(measured, full, int(lost_turns.sum()), int(forestalled.sum())),
            *_unmeasured(objectives, measured),
            *late_tails(full, loop_lag_s),
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
        api=target.api.value,
        model=target.model,
        fields=target.fields,
        batch_size=target.batch_size,
        timeout_s=target.timeout_s,
        max_connections=target.max_connections,
        keep_alive=target.keep_alive,
        verifies=target.verifies,
    )


def _publishable(environment: Environment, api_key: str | None) -> Environment:
    """Remove the API key from the command line, because summaries are pasted into issues."""
    command = environment.command.replace(api_key, "***") if api_key else environment.command
    return replace(environment, command=_encodable(command))


def _encodable(text: str) -> str:
    """Replace what UTF-8 cannot encode, which must not make a long run fail when it is saved."""
    return text.encode("utf-8", "replace").decode("utf-8")


# -- figures ----------------------------------------------------------------------------------------------------------


def _unmeasured(objectives: Objectives | None, measured: Measurements) -> list[str]:
    """Return a note for each limit that no answer has a measured value for."""
    if objectives is None or not measured.is_answered.any():
        return []
    values = measured.limited_s()
    return [
        f"no answer has a measured {limit.name} (answers came whole or had one token), so all requests miss this limit"
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
        # The last end is the end of the run and belongs to it.
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
        values = measured.limited_s()
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


def requests_to_be_served(plan: Plan, measured: Measurements) -> Booleans:
    """Return the requests that goodput is a share of.

    These are all that were started and not stopped by the user, and turns that were lost to an earlier failure.
    """
    _, lost_turns = _never_begun(plan, measured)
    return (measured.is_begun & ~measured.is_stopped) | lost_turns


def _never_begun(plan: Plan, measured: Measurements) -> tuple[Booleans, Booleans]:
    """Return masks of requests that were not started: because the run ended, and because an earlier turn failed."""
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


def _server_figure(name: str, values: Floats) -> ServerFigure:
    increase = None
    if name in COUNTERS:
        # A counter that decreased belongs to a server that was restarted.
        steps = np.diff(values)
        increase = float(np.where(steps >= 0.0, steps, values[1:]).sum())
    return ServerFigure(float(values.mean()), float(values.max()), increase)
