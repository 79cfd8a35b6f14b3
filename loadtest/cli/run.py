"""`run` and `sweep`: one run, or one for each of several rates."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from loadtest.cli.arguments import make_experiment, progress_output, results_folder
from loadtest.cli.exit_codes import INTERRUPTED, NOT_VALID, OBJECTIVE_MISSED, SUCCESS
from loadtest.errors import LoadTestError
from loadtest.experiment import REQUESTS, TABLE, Experiment, Trial, run, save, save_all
from loadtest.planning.arrivals import parse_arrivals
from loadtest.record import Outcome


def run_once(arguments: argparse.Namespace) -> int:
    experiment = make_experiment(arguments, arguments.arrivals)
    with results_folder(arguments) as folder:
        trial = run(experiment, arguments.label or experiment.arrivals, progress_output(arguments))
        save(trial, folder)
        _print_table(folder)
        return _exit_code([trial], arguments)


def sweep(arguments: argparse.Namespace) -> int:
    experiments = _experiments(arguments)
    trials: list[Trial] = []
    code, failure = SUCCESS, None
    with results_folder(arguments) as folder:
        try:
            for experiment in experiments:
                trials.append(run(experiment, experiment.arrivals, progress_output(arguments)))
                if trials[-1].was_stopped:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:  # it may also come between two runs; those that are complete are written
            if not trials:
                raise
            code = INTERRUPTED
        except LoadTestError as error:  # for example, the previous run was too much for the server
            if not trials:
                raise
            failure = error
        save_all(trials, folder, "Load test: sweep")
        _print_table(folder)
        if failure is not None:
            raise failure
        return code or _exit_code(trials, arguments)


def _experiments(arguments: argparse.Namespace) -> list[Experiment]:
    """All experiments of a sweep, so that a mistake in the last is found before the first runs.

    Raises LoadTestError.
    """
    if arguments.rates and arguments.clients:
        raise LoadTestError("--rates and --clients cannot be combined; run two sweeps")
    form, amounts = ("poisson", arguments.rates) if arguments.rates else ("closed", arguments.clients)
    if not amounts:
        raise LoadTestError("sweep needs --rates 1,2,4 (requests/s) or --clients 1,8,32")
    experiments: list[Experiment] = []
    for number, amount in enumerate(amounts.split(",")):
        experiment = make_experiment(arguments, f"{form}:{amount.strip()}")
        parse_arrivals(experiment.arrivals)
        if experiment.arrivals in {each.arrivals for each in experiments}:
            raise LoadTestError(
                f"{experiment.arrivals} is listed twice, and both runs would be written to one folder; for "
                "repetitions, use `run`"
            )
        # New prompts each time: otherwise the first run would fill the server's prefix cache for the others.
        experiments.append(replace(experiment, seed=experiment.seed + number))
    return experiments


def _print_table(folder: Path) -> None:
    print((folder / TABLE).read_text())
    print(f"results written to {folder}")


def is_verified(trials: Sequence[Trial]) -> bool:
    """Print what verification found. Garbled answers count as failures of it, too."""
    outcomes = sum((Counter(trial.summary.outcomes) for trial in trials), Counter[str]())
    num_right, num_wrong, num_garbled = (outcomes[each] for each in (Outcome.OK, Outcome.WRONG, Outcome.GARBLED))
    if num_wrong or num_garbled:
        print(
            f"verification FAILED: of {num_right + num_wrong + num_garbled} answers, {num_wrong} are wrong and "
            f"{num_garbled} garbled; see {REQUESTS}"
        )
        return False
    print(f"verified: {num_right} answers are correct" if num_right else "no answers to verify")
    return True


def _exit_code(trials: Sequence[Trial], arguments: argparse.Namespace) -> int:
    is_right = not arguments.verify or is_verified(trials)
    if trials[-1].was_stopped:
        return INTERRUPTED
    if not is_right:
        return OBJECTIVE_MISSED  # also if the run is not valid: a late client does not make an answer wrong
    code = SUCCESS
    summaries = [trial.summary for trial in trials]
    for summary in summaries:
        goodput = summary.full.goodput
        if any(not verdict.is_met for verdict in summary.verdicts):
            code = OBJECTIVE_MISSED
        if summary.objectives and goodput is not None and goodput.share < arguments.attainment:
            code = OBJECTIVE_MISSED
    return NOT_VALID if any(not summary.is_valid for summary in summaries) else code
