"""`find-max`: run the probes of a search for the highest rate that meets the limits."""

from __future__ import annotations

import argparse

import msgspec
from msgspec.structs import replace

from loadtest.analysis import search, slo
from loadtest.analysis.summarise import requests_to_be_served
from loadtest.analysis.validity import client_lag_s, lag_limit_for_s
from loadtest.cli.arguments import make_experiment, progress_output, results_folder
from loadtest.cli.exit_codes import INTERRUPTED, NOT_VALID, OBJECTIVE_MISSED, SUCCESS, USAGE_ERROR
from loadtest.cli.run import is_verified
from loadtest.errors import LoadTestError
from loadtest.experiment import Trial, run, save_all
from loadtest.record import Outcome
from loadtest.reporting.formatting import as_share, as_time

RESULT = "find-max.json"


def find_max(arguments: argparse.Namespace) -> int:
    _check(arguments)
    searching = search.Search(
        arguments.attainment,
        arguments.start_rate,
        max_rate=arguments.max_rate,
        tolerance=arguments.tolerance,
        num_requests=arguments.probe_requests,
        max_requests=arguments.max_probe_requests,
        min_duration_s=arguments.probe_duration,
    )
    trials: list[Trial] = []
    problem, code = "", NOT_VALID
    with results_folder(arguments) as folder:
        try:
            while not problem and (probe := searching.next_probe()) is not None:
                problem = _run_probe(arguments, searching, probe, trials)
        except KeyboardInterrupt:
            if not trials:
                raise
            problem, code = "the search was interrupted", INTERRUPTED
        except LoadTestError as error:
            if not trials:
                raise
            problem, code = str(error), USAGE_ERROR
        conclusion = f"no result: {problem}" if problem else _conclusion(arguments, searching.result)
        save_all(trials, folder, "Load test: find-max", conclusion)
        print(conclusion)
        print(f"results written to {folder}")
        if problem:
            return code
        (folder / RESULT).write_bytes(msgspec.json.format(msgspec.json.encode(searching.result)))
        return _exit_code(arguments, searching.result, trials)


def _run_probe(
    arguments: argparse.Namespace, searching: search.Search, probe: search.Probe, trials: list[Trial]
) -> str:
    """Run one probe and record it; return why it says nothing, or an empty string."""
    experiment = make_experiment(arguments, f"poisson:{probe.rate:g}")
    experiment = replace(experiment, seed=experiment.seed + len(trials), duration_s=probe.duration_s)
    trial = run(experiment, f"poisson:{probe.rate:.4g}, {len(trials) + 1}", progress_output(arguments))
    trials.append(trial)
    if trial.was_stopped:
        raise KeyboardInterrupt
    if trial.result.errors:
        return "; ".join(trial.result.errors)
    assert experiment.objectives is not None, "see _check"
    observed = search.observe(
        probe,
        trial.measured,
        experiment.objectives,
        requests_to_be_served(trial.plan, trial.measured),
        has_timeouts=Outcome.TIMEOUT in trial.summary.outcomes,
    )
    lag_s, allowed_s = client_lag_s(trial.summary), lag_limit_for_s(experiment.objectives, trial.summary.full)
    # Without any answer the server has failed, whatever the client did, and there is no latency to be wrong.
    is_client_limited = trial.summary.full.num_answered > 0 and lag_s > allowed_s
    decision = searching.record(probe, replace(observed, is_client_limited=is_client_limited))
    following = searching.next_probe()
    is_repeated = following is not None and following.rate == probe.rate and following.look > probe.look
    print(
        f"{probe.rate:.4g} requests/s for {as_time(probe.duration_s)}: "
        f"{as_share(observed.num_good / observed.num_requests)} of {observed.num_requests} met the limits: {decision}"
        f"{f', client lag {as_time(lag_s)}, allowed {as_time(allowed_s)}' if is_client_limited else ''}"
        f"{'; probing this rate again' if is_repeated else ''}",
        flush=True,
    )
    return ""


def _conclusion(arguments: argparse.Namespace, result: search.Result) -> str:
    found = "no rate was shown to meet" if result.rate is None else f"{result.rate:.4g} requests/s meet"
    share = as_share(arguments.attainment)
    return f"{found} {arguments.slo} for {share} of requests; the search stopped at {result.stopped_by}"


def _exit_code(arguments: argparse.Namespace, result: search.Result, trials: list[Trial]) -> int:
    if arguments.verify and not is_verified(trials):
        return OBJECTIVE_MISSED
    if result.is_limited_by_client:
        print(
            f"not valid: this client was late twice at {result.missed_rate:.4g} requests/s, so the server's maximum is "
            "unknown; use more --processes, or a machine with no other load"
        )
        return NOT_VALID
    return SUCCESS if result.rate is not None else OBJECTIVE_MISSED


def _check(arguments: argparse.Namespace) -> None:
    """Raises LoadTestError for options that a search would ignore."""
    if arguments.slo is None:
        raise LoadTestError("find-max needs --slo with limits for each request, such as ttft:500ms,tpot:50ms")
    if demands := slo.parse(arguments.slo).demands:
        names = ", ".join(f"{demand.name}_{demand.statistic}" for demand in demands)
        raise LoadTestError(
            f"--slo {names} is an objective of a whole run, but find-max needs limits for each request; use a limit "
            "such as ttft:500ms, and --attainment for the share of requests that must meet it"
        )
    for option, value in (("--requests", arguments.requests), ("--duration", arguments.duration)):
        if value is not None:
            raise LoadTestError(
                f"{option} {value:g} does not apply: find-max chooses the length of each probe; use --probe-duration, "
                "--probe-requests and --max-probe-requests"
            )
