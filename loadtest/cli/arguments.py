"""Parse the command line, and turn it into experiments and a folder for results."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from loadtest.analysis import slo
from loadtest.errors import LoadTestError
from loadtest.experiment import Experiment
from loadtest.planning.text import CHARACTERS_PER_TOKEN
from loadtest.target import ApiFormat, Target


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="subcommand")
    load = _load_options()

    one = commands.add_parser("run", parents=[load], help="one run")
    one.add_argument(
        "--arrivals",
        default="poisson:1",
        help="when requests start: closed:N clients, constant:R, poisson:R, gamma:R,SHAPE, ramp:R1-R2, "
        "steps:R@S,..., burst, trace[:SPEEDUP]; R in requests/s (default: poisson:1)",
    )
    one.add_argument("--label", help="the name of the run in tables (default: its arrivals)")

    several = commands.add_parser("sweep", parents=[load], help="one run for each of several rates or client numbers")
    several.add_argument("--rates", help="Poisson rates in requests/s, such as 1,2,4,8")
    several.add_argument("--clients", help="numbers of clients in a closed loop, such as 1,8,32")

    search = commands.add_parser("find-max", parents=[load], help="the highest rate that meets the limits of --slo")
    search.add_argument("--start-rate", type=float, default=1.0, help="first rate, in requests/s (default: 1)")
    search.add_argument("--max-rate", type=float, default=100_000.0, help="highest rate to try (default: 100000)")
    search.add_argument(
        "--tolerance", type=float, default=0.05, help="how exact the result has to be, as a share (default: 0.05)"
    )
    search.add_argument(
        "--probe-duration",
        type=float,
        default=20.0,
        metavar="S",
        help="seconds that a deciding probe counts at least; more if requests take longer than S/20 (default: 20)",
    )
    search.add_argument(
        "--probe-requests",
        type=int,
        default=700,
        metavar="N",
        help="requests that the first deciding probe of a rate counts at least (default: 700)",
    )
    search.add_argument(
        "--max-probe-requests",
        type=int,
        default=11_200,
        metavar="N",
        help="requests after which a rate that is still undecided counts as not met; at least four first probes "
        "(default: 11200)",
    )

    two = commands.add_parser("compare", help="two runs, or two sets of repetitions: folders separated by commas")
    two.add_argument("a", metavar="BEFORE")
    two.add_argument("b", metavar="AFTER")
    two.add_argument("--seed", type=int, default=0, help="seed of the resampling (default: 0)")

    test = commands.add_parser("self-test", help="measure the errors of this client on this machine")
    test.add_argument("--rate", type=float, default=50.0, help="requests/s (default: 50)")
    return parser


def _load_options() -> argparse.ArgumentParser:
    """The options of every command that sends requests."""
    options = argparse.ArgumentParser(add_help=False)
    add = options.add_argument
    names = [api.value for api in ApiFormat]
    add(
        "--url",
        default="http://127.0.0.1:8000",
        help="address of the server; several addresses of one server are separated by commas",
    )
    add("--api", default=None, choices=names, help="format of requests and answers (default: generate_stream)")
    add("--door", default=None, choices=names, help=argparse.SUPPRESS)  # the former name of --api
    add("--model", help="model name in requests (default: the first one that /v1/models lists)")
    add("--api-key", help="API key (default: $LOADTEST_API_KEY)")
    add(
        "--workload",
        default="queries",
        help="what is sent: queries, random, prefix, conversation, documents or trace:FILE, each with parameters, such "
        "as random:input=512,output=uniform:16-256 (default: queries)",
    )
    add("--requests", type=int, metavar="N", help="end after N requests")
    add("--duration", type=float, metavar="S", help="start no request after S seconds")
    add("--seed", type=int, default=0, help="another seed gives other prompts and other start times (default: 0)")
    add(
        "--characters-per-token",
        type=float,
        default=CHARACTERS_PER_TOKEN,
        metavar="C",
        help=f"characters per token of the server's tokenizer (default: {CHARACTERS_PER_TOKEN})",
    )
    add("--fields", metavar="JSON", help="fields to add to the body of every request, as a JSON object")
    add("--batch-size", type=int, default=1, metavar="N", help="prompts per request, with --api generate (default: 1)")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds after which a request fails (default: 600)")
    add("--max-connections", type=int, metavar="N", help="use at most N connections; waiting for one counts as latency")
    add("--no-keep-alive", action="store_true", help="open a connection for each request; opening counts as latency")
    add("--processes", type=int, default=1, metavar="N", help="client processes (default: 1)")
    add("--sources", help="local addresses to connect from, separated by commas; each has ports of its own")
    add("--warm-up", type=int, default=8, metavar="N", help="requests before the run, not counted (default: 8)")
    add("--verify", action="store_true", help="compare every answer with that of servekit's simulated model")
    add("--slo", help="objectives, such as ttft:200ms,tpot:30ms (each request) or ttft_p99:500ms (the whole run)")
    add("--attainment", type=float, default=0.99, help="share of requests that must meet all limits (default: 0.99)")
    add("--out", metavar="DIR", help="folder for the results (default: loadtest-results/DATE)")
    add("--quiet", action="store_true", help="show no progress")
    return options


def make_experiment(arguments: argparse.Namespace, arrivals: str) -> Experiment:
    """Raises LoadTestError for arguments that cannot be meant."""
    _check(arguments)
    try:
        fields: dict[str, Any] = msgspec.json.decode(arguments.fields, type=dict) if arguments.fields else {}
    except msgspec.DecodeError as error:
        raise LoadTestError(f"--fields must be a JSON object, such as '{{\"temperature\": 0}}': {error}") from None
    target = Target(
        urls=[url.rstrip("/") for url in arguments.url.split(",")],
        api=_api_format(arguments),
        model=arguments.model,
        api_key=arguments.api_key or os.environ.get("LOADTEST_API_KEY"),
        fields=fields,
        batch_size=arguments.batch_size,
        timeout_s=arguments.timeout,
        max_connections=arguments.max_connections,
        keep_alive=not arguments.no_keep_alive,
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


def _api_format(arguments: argparse.Namespace) -> ApiFormat:
    if arguments.door is not None:
        if arguments.api not in (None, arguments.door):
            raise LoadTestError(f"--api {arguments.api} and --door {arguments.door} contradict each other; keep --api")
        arguments.api, arguments.door = arguments.door, None  # the note is printed once
        print(f"note: --door is now called --api; using --api {arguments.api}", file=sys.stderr)
    return ApiFormat(arguments.api or ApiFormat.GENERATE_STREAM)


def _check(arguments: argparse.Namespace) -> None:
    if not 0.0 < arguments.attainment <= 1.0:
        raise LoadTestError(f"--attainment {arguments.attainment:g} is not above 0 and at most 1; 99 % is 0.99")
    if arguments.processes < 1:
        raise LoadTestError(f"--processes {arguments.processes} is below 1")
    if arguments.warm_up < 0:
        raise LoadTestError(f"--warm-up {arguments.warm_up} is below 0; use 0 for no warm-up")


def progress_output(arguments: argparse.Namespace) -> TextIO | None:
    """Where progress is shown; None is nowhere."""
    return None if arguments.quiet else sys.stderr


@contextlib.contextmanager
def results_folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """Make the folder for results, and remove it again if it stays empty.

    It is made before the first request is sent, because a run whose results cannot be written is wasted. Raises
    LoadTestError.
    """
    now = datetime.datetime.now(tz=datetime.UTC)
    folder = Path(arguments.out or Path("loadtest-results") / now.strftime("%Y-%m-%d-%H%M%S"))
    made: Sequence[Path] = []
    try:
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
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
            with contextlib.suppress(OSError):  # it holds results
                path.rmdir()
