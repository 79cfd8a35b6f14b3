"""`python -m loadtest`: ask a server as people would, and tell the truth about how it answered.

    python -m loadtest run --url http://127.0.0.1:8000 --arrivals poisson:5 --workload queries --requests 200
    python -m loadtest sweep --url http://127.0.0.1:8000 --rates 1,2,4,8 --workload random --duration 30
    python -m loadtest find-max --url http://127.0.0.1:8000 --slo ttft:500ms,tpot:50ms
    python -m loadtest compare RESULTS-BEFORE RESULTS-AFTER
    python -m loadtest self-test

Exit code 0: all is well; 1: an objective was missed, or with --verify an answer is not what it must be; 2: it cannot
be done as asked; 3: the run is not valid, such as when the client was the bottleneck; 130: it was interrupted, and what
there was until then is written.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from loadtest import search, slo
from loadtest.arrivals import parse_arrivals
from loadtest.comparison import Side, compare
from loadtest.errors import LoadTestError
from loadtest.experiment import REQUESTS, TABLE, Experiment, Trial, keep, keep_all, recall, run
from loadtest.markdown import as_share, as_time, comparison_table, table
from loadtest.record import Outcome
from loadtest.self_test import MAX_ERROR_S, self_test
from loadtest.summary import Summary, lag_limit_s
from loadtest.target import Door, Target
from loadtest.words import CHARACTERS_PER_TOKEN

FINE, MISSED, WRONG_USE, NOT_VALID = range(4)
MIN_SELF_TEST_RATE, MAX_SELF_TEST_RATE = 1.0, 10_000.0  # requests/s
INTERRUPTED = 130  # as a shell has it for what Ctrl-C ended: 128 and the signal's number


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is asked; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(words)
    arguments.command = shlex.join(["python", "-m", "loadtest", *words])
    try:
        code: int = arguments.do(arguments)
    except LoadTestError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:  # while nothing ran: a run ends by itself, and its report is written
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


# -- subcommands -------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    experiment = _experiment(arguments, arguments.arrivals)
    with _folder(arguments) as folder:
        trial = run(experiment, arguments.label or experiment.arrivals, _output(arguments))
        keep(trial, folder)
        print((folder / TABLE).read_text())
        print(f"written to {folder}")
        return _verdict([trial], arguments)


def _sweep(arguments: argparse.Namespace) -> int:
    experiments = _experiments(arguments)
    trials: list[Trial] = []
    code, failure = FINE, None
    with _folder(arguments) as folder:
        try:
            for experiment in experiments:
                trials.append(run(experiment, experiment.arrivals, _output(arguments)))
                if trials[-1].was_stopped:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:  # which also comes between two runs, and those that are whole are to be written
            if not trials:
                raise
            code = INTERRUPTED
        except LoadTestError as error:  # such as of a server that the run before was too much for
            if not trials:
                raise
            failure = error
        keep_all(trials, folder, "Load test: sweep")
        print((folder / TABLE).read_text())
        print(f"written to {folder}")
        if failure is not None:
            raise failure
        return code or _verdict(trials, arguments)


def _experiments(arguments: argparse.Namespace) -> list[Experiment]:
    """All of a sweep, so that a slip in the last one is told before the first one runs. Raises LoadTestError."""
    if arguments.rates and arguments.clients:
        raise LoadTestError("a sweep is over --rates or over --clients, not both; do one after the other")
    form, amounts = ("poisson", arguments.rates) if arguments.rates else ("closed", arguments.clients)
    if not amounts:
        raise LoadTestError("a sweep needs --rates 1,2,4 (requests/s) or --clients 1,8,32")
    experiments: list[Experiment] = []
    for number, amount in enumerate(amounts.split(",")):
        experiment = _experiment(arguments, f"{form}:{amount.strip()}")
        parse_arrivals(experiment.arrivals)
        if experiment.arrivals in {each.arrivals for each in experiments}:
            raise LoadTestError(f"{experiment.arrivals} is there twice, and would be written to one folder; use `run`")
        # New prompts each time: else the first run would have filled the server's prefix cache for the others.
        experiments.append(replace(experiment, seed=experiment.seed + number))
    return experiments


def _find_max(arguments: argparse.Namespace) -> int:
    _check_search(arguments)
    searched = search.Search(
        arguments.attainment,
        arguments.start_rate,
        max_rate=arguments.max_rate,
        tolerance=arguments.tolerance,
        num_requests=arguments.probe_requests,
        max_requests=arguments.max_probe_requests,
    )
    trials: list[Trial] = []
    trouble, code = "", NOT_VALID
    with _folder(arguments) as folder:
        try:
            while not trouble and searched.next_probe() is not None:
                trouble = _look(arguments, searched, trials)
        except KeyboardInterrupt:
            if not trials:
                raise
            trouble, code = "it was interrupted", INTERRUPTED
        except LoadTestError as error:
            if not trials:
                raise
            trouble, code = str(error), WRONG_USE
        conclusion = f"there is no result: {trouble}" if trouble else _conclusion(arguments, searched.result)
        keep_all(trials, folder, "Load test: find-max", conclusion)
        print(conclusion)
        print(f"written to {folder}")
        if trouble:
            return code
        (folder / "find-max.json").write_bytes(msgspec.json.format(msgspec.json.encode(searched.result)))
        return _judge_most(arguments, searched.result, trials)


def _conclusion(arguments: argparse.Namespace, result: search.Result) -> str:
    found = "no rate was shown to meet" if result.rate is None else f"{result.rate:.4g} requests/s meet"
    return f"{found} {arguments.slo} for {as_share(arguments.attainment)}; stopped by {result.stopped_by}"


def _judge_most(arguments: argparse.Namespace, result: search.Result, trials: list[Trial]) -> int:
    if arguments.verify and not _is_verified(trials):
        return MISSED
    if result.is_limited_by_client:
        print(
            f"not valid: {result.missed_rate:.4g} requests/s were asked for twice, and twice this client was late, so "
            "that the server's maximum is not known; use more --processes, or a machine with nothing else to do"
        )
        return NOT_VALID
    return FINE if result.rate is not None else MISSED


def _look(arguments: argparse.Namespace, searched: search.Search, trials: list[Trial]) -> str:
    """One more of the trials; returns why it says nothing, if it does."""
    probe = searched.next_probe()
    assert probe is not None
    experiment = _experiment(arguments, f"poisson:{probe.rate:g}")
    experiment = replace(experiment, seed=experiment.seed + len(trials), num_requests=probe.num_requests)
    trial = run(experiment, f"poisson:{probe.rate:.4g}, {len(trials) + 1}", _output(arguments))
    trials.append(trial)
    if trial.was_stopped:
        raise KeyboardInterrupt
    if trial.result.errors:
        return "; ".join(trial.result.errors)
    goodput = trial.summary.full.goodput
    assert goodput is not None, "there are limits"
    decision = searched.record(
        probe,
        goodput.num_good,
        goodput.num,
        is_saturated=search.is_saturated(trial.measured),
        is_client_limited=_is_client_limited(trial.summary),
        num_in_flight=search.num_in_flight(trial.measured),
        is_unanswered=trial.summary.full.num_answered == 0 and Outcome.TIMEOUT not in trial.summary.outcomes,
    )
    share = goodput.num_good / goodput.num
    following = searched.next_probe()
    is_again = decision is search.Decision.CLIENT and following is not None and following.rate == probe.rate
    print(
        f"{probe.rate:.4g} requests/s: {as_share(share)} of {goodput.num} met the limits: {decision}"
        f"{', so it is asked once more' if is_again else ''}"
    )
    return ""


def _check_search(arguments: argparse.Namespace) -> None:
    """Raises LoadTestError for what a search would not heed."""
    if arguments.slo is None:
        raise LoadTestError("find-max needs --slo, such as ttft:500ms,tpot:50ms: the highest rate at which it is kept")
    if demands := slo.parse(arguments.slo).demands:
        wrong = ", ".join(f"{demand.name}_{demand.statistic}" for demand in demands)
        raise LoadTestError(
            f"--slo: find-max searches by the share of requests that keep their limits, and {wrong} is asked of a run "
            "as a whole; give a limit for each request, such as ttft:500ms, and the share as --attainment"
        )
    for option, value in (("--requests", arguments.requests), ("--duration", arguments.duration)):
        if value is not None:
            raise LoadTestError(
                f"{option} {value:g}: how many requests find-max asks for at a rate follows from what it has to show; "
                "choose --probe-requests for the first look, and --max-probe-requests for all of them"
            )


def _is_client_limited(summary: Summary) -> bool:
    """Of the reasons for which a run is not valid only this one is about the client.

    Where nothing was answered there is no latency to hold the client's lag against, and the server has failed for sure.
    """
    lags_s = [lag_s.p99 for lag_s in (summary.full.client_lag_s, summary.event_loop_lag_s) if lag_s is not None]
    return summary.full.num_answered > 0 and max(lags_s, default=0.0) > lag_limit_s(summary.full)


def _compare(arguments: argparse.Namespace) -> int:
    before, after = _side(arguments.a), _side(arguments.b)
    labels = [side.name for side in (before, after) for _ in side.runs]
    print(table([*before.summaries, *after.summaries], labels))
    print(comparison_table(compare(before, after, np.random.default_rng(arguments.seed))))
    return FINE


def _side(folders: str) -> Side:
    paths = [Path(folder) for folder in folders.split(",")]
    runs = [recall(path) for path in paths]
    return Side(paths[0].name, [measured for measured, _ in runs], [summary for _, summary in runs])


def _self_test(arguments: argparse.Namespace) -> int:
    if not MIN_SELF_TEST_RATE <= arguments.rate <= MAX_SELF_TEST_RATE:
        raise LoadTestError(
            f"--rate {arguments.rate:g}: a self-test is at {MIN_SELF_TEST_RATE:g} to {MAX_SELF_TEST_RATE:g} requests/s"
        )
    report = self_test(rate=arguments.rate)
    for each in report.accuracy:
        ttft, itl = each.ttft_error_s, each.itl_error_s
        told = ", ".join(
            f"{name} off by {as_time(error.p50)} (p50), {as_time(error.p99)} (p99)"
            for name, error in (("TTFT", ttft), ("ITL", itl))
            if error is not None
        )
        print(f"{each.door}: {each.num_answered} of {each.num_requests} answered; {told}; {_good(each.is_good)}")
    stall, omission = report.stall, report.omission
    lag = "nothing" if stall.loop_lag_s is None else as_time(stall.loop_lag_s.max)
    print(
        f"a client that stood still for {as_time(stall.stall_s)}: its event loop's lag is reported as {lag}, and "
        f"{stall.num_late_starts} requests as begun too late; {_good(stall.is_good)}"
    )
    if omission.open_latency_s and omission.closed_latency_s:
        print(
            f"a server that stood still for {as_time(omission.freeze_s)}: p99 {as_time(omission.open_latency_s.p99)} "
            f"from intended starts; clients that wait for their answers would have seen "
            f"{as_time(omission.closed_latency_s.p99)}; {_good(omission.is_good)}"
        )
    for trouble in report.troubles:
        print(trouble)
    print(f"at most {as_time(MAX_ERROR_S)} at p99 are allowed: {_good(report.is_good)}")
    return FINE if report.is_good else MISSED


def _good(is_good: bool) -> str:
    return "good" if is_good else "NOT GOOD"


def _is_verified(trials: Sequence[Trial]) -> bool:
    """Tells what verification came to. Garbled answers count, too, for they are not what they must be either."""
    outcomes = sum((Counter(trial.summary.outcomes) for trial in trials), Counter[str]())
    num_right, num_wrong, num_garbled = (outcomes[each] for each in (Outcome.OK, Outcome.WRONG, Outcome.GARBLED))
    if num_wrong or num_garbled:
        print(
            f"verification FAILED: of {num_right + num_wrong + num_garbled} answers {num_wrong} are wrong and "
            f"{num_garbled} garbled; {REQUESTS} tells which, and how"
        )
        return False
    print(f"verified: {num_right} answers, each as it must be" if num_right else "nothing was answered to be verified")
    return True


def _verdict(trials: Sequence[Trial], arguments: argparse.Namespace) -> int:
    is_verified = not arguments.verify or _is_verified(trials)
    if trials[-1].was_stopped:
        return INTERRUPTED
    if not is_verified:
        return MISSED  # however late the client was: that does not make an answer wrong
    code = FINE
    summaries = [trial.summary for trial in trials]
    for summary in summaries:
        goodput = summary.full.goodput
        is_missed = any(not verdict.is_met for verdict in summary.verdicts)
        if summary.objectives and goodput is not None and goodput.share < arguments.attainment:
            is_missed = True
        if is_missed:
            code = MISSED
    return NOT_VALID if any(not summary.is_valid for summary in summaries) else code


# -- arguments ---------------------------------------------------------------------------------------------------------


def _experiment(arguments: argparse.Namespace, arrivals: str) -> Experiment:
    _check(arguments)
    try:
        fields: dict[str, Any] = msgspec.json.decode(arguments.fields, type=dict) if arguments.fields else {}
    except msgspec.DecodeError as error:
        raise LoadTestError(f"--fields must be a JSON object, such as '{{\"temperature\": 0}}': {error}") from None
    target = Target(
        urls=[url.rstrip("/") for url in arguments.url.split(",")],
        door=Door(arguments.door),
        model=arguments.model,
        api_key=arguments.api_key or os.environ.get("LOADTEST_API_KEY"),
        fields=fields,
        batch_size=arguments.batch_size,
        timeout_s=arguments.timeout,
        max_connections=arguments.max_connections,
        verifies=arguments.verify,
    )
    return Experiment(
        target=target,
        arrivals=arrivals,
        workload=arguments.workload,
        seed=arguments.seed,
        num_requests=arguments.requests,
        duration_s=arguments.duration,
        characters_per_token=arguments.characters_per_token,
        num_processes=arguments.processes,
        sources=tuple(arguments.sources.split(",")) if arguments.sources else (),
        num_warm_up=arguments.warm_up,
        objectives=None if arguments.slo is None else slo.parse(arguments.slo),
        command=arguments.command,
    )


def _check(arguments: argparse.Namespace) -> None:
    """Raises LoadTestError for numbers that nobody can mean."""
    if not 0.0 < arguments.attainment <= 1.0:
        raise LoadTestError(f"--attainment {arguments.attainment:g} is not above 0 and at most 1; 99 % is 0.99")
    if arguments.processes < 1:
        raise LoadTestError(f"--processes {arguments.processes}: it takes at least 1 to ask anything")
    if arguments.warm_up < 0:
        raise LoadTestError(f"--warm-up {arguments.warm_up} is below 0; 0 is none")


def _output(arguments: argparse.Namespace) -> Any:
    return None if arguments.quiet else sys.stderr


@contextlib.contextmanager
def _folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """Where results go. It is made before anything is asked, for a run whose results cannot be written is in vain; and
    it is taken away if there are none. Raises LoadTestError."""
    now = datetime.datetime.now(tz=datetime.UTC)
    folder = Path(arguments.out or Path("loadtest-results") / now.strftime("%Y-%m-%d-%H%M%S"))
    made: list[Path] = []
    try:
        try:
            made += [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise LoadTestError(
                f"--out {folder}: results cannot be written there ({error.strerror}); choose another folder"
            ) from None
        yield folder
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # it has results
                path.rmdir()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    asking = _asking()

    one = commands.add_parser("run", parents=[asking], help="one run")
    one.add_argument(
        "--arrivals",
        default="poisson:1",
        help="closed:N, constant:R, poisson:R, gamma:R,SHAPE, ramp:R-R, "
        "steps:R@S,..., burst, trace[:SPEEDUP]; rates in requests/s",
    )
    one.add_argument("--label", help="what the run is called in tables")
    one.set_defaults(do=_run)

    several = commands.add_parser("sweep", parents=[asking], help="several rates, or numbers of clients, one by one")
    several.add_argument("--rates", help="requests/s, such as 1,2,4,8")
    several.add_argument("--clients", help="clients of a closed loop, such as 1,8,32")
    several.set_defaults(do=_sweep)

    most = commands.add_parser("find-max", parents=[asking], help="the highest rate at which the objectives are kept")
    most.add_argument("--start-rate", type=float, default=1.0, help="requests/s to begin with")
    most.add_argument("--max-rate", type=float, default=100_000.0, help="requests/s that are not exceeded")
    most.add_argument("--tolerance", type=float, default=0.05, help="how close the result has to be")
    most.add_argument("--probe-requests", type=int, default=700, help="of the first look at a rate")
    most.add_argument("--max-probe-requests", type=int, default=11_200, help="of all looks at a rate")
    most.set_defaults(do=_find_max)

    two = commands.add_parser("compare", help="two runs, or two sets of repetitions (folders with commas between)")
    two.add_argument("a", metavar="BEFORE")
    two.add_argument("b", metavar="AFTER")
    two.add_argument("--seed", type=int, default=0, help="of the resampling")
    two.set_defaults(do=_compare)

    test = commands.add_parser("self-test", help="how wrong is this client itself?")
    test.add_argument("--rate", type=float, default=50.0, help="requests/s")
    test.set_defaults(do=_self_test)
    return parser


def _asking() -> argparse.ArgumentParser:
    asking = argparse.ArgumentParser(add_help=False)
    add = asking.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server; several addresses of it with commas between")
    add("--door", default=Door.GENERATE_STREAM.value, choices=[door.value for door in Door], help="wire format")
    add("--model", help="name that requests give; what /v1/models tells by default")
    add("--api-key", help="or LOADTEST_API_KEY in the environment")
    add(
        "--workload",
        default="queries",
        help="queries, random, prefix, conversation, documents, or trace:FILE; each "
        "with parameters, such as random:input=512,output=uniform:16-256",
    )
    add("--requests", type=int, help="at most so many")
    add("--duration", type=float, metavar="S", help="nothing is begun after so many seconds")
    add("--seed", type=int, default=0, help="another one for other prompts and times")
    add(
        "--characters-per-token",
        type=float,
        default=CHARACTERS_PER_TOKEN,
        metavar="C",
        help="of the server's tokenizer",
    )
    add("--fields", metavar="JSON", help="more of every request's body")
    add("--batch-size", type=int, default=1, help="prompts in a request, at the door generate")
    add("--timeout", type=float, default=600.0, metavar="S", help="for one request")
    add("--max-connections", type=int, metavar="N", help="of this client; waiting for one counts as latency")
    add("--processes", type=int, default=1, help="of this client")
    add("--sources", help="local addresses to come from, with commas between: each has ports of its own")
    add("--warm-up", type=int, default=8, metavar="N", help="requests before the run, which are not counted")
    add("--verify", action="store_true", help="compare every answer with what servekit's simulated model must say")
    add("--slo", help="limits and demands, such as ttft:200ms,tpot:30ms,ttft_p99:500ms")
    add("--attainment", type=float, default=0.99, help="share of the requests that has to meet all limits")
    add("--out", metavar="DIR", help="where results go; loadtest-results/DATE by default")
    add("--quiet", action="store_true", help="show nothing while it runs")
    return asking


if __name__ == "__main__":
    sys.exit(main())
