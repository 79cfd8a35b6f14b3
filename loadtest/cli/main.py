"""Send a planned load to an LLM server and report latency and throughput.

    python -m loadtest run --url http://127.0.0.1:8000 --arrivals poisson:5 --workload queries --requests 200
    python -m loadtest sweep --url http://127.0.0.1:8000 --rates 1,2,4,8 --workload random --duration 30
    python -m loadtest find-max --url http://127.0.0.1:8000 --slo ttft:500ms,tpot:50ms
    python -m loadtest compare RESULTS-BEFORE RESULTS-AFTER
    python -m loadtest self-test

Exit codes: 0 success; 1 an objective was missed, or with --verify an answer was wrong; 2 the command cannot be carried
out; 3 the run is not valid, for example because the client was the bottleneck; 130 interrupted, with the results so far
written.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence

from loadtest.cli.arguments import make_parser
from loadtest.cli.compare import compare_runs
from loadtest.cli.exit_codes import INTERRUPTED, USAGE_ERROR
from loadtest.cli.find_max import find_max
from loadtest.cli.run import run_once, sweep
from loadtest.cli.self_test import run_self_test
from loadtest.errors import LoadTestError

COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run_once,
    "sweep": sweep,
    "find-max": find_max,
    "compare": compare_runs,
    "self-test": run_self_test,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command line; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    arguments = make_parser(__doc__ or "").parse_args(words)
    arguments.command = shlex.join(["python", "-m", "loadtest", *words])
    try:
        return COMMANDS[arguments.subcommand](arguments)
    except LoadTestError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:  # between runs; a run that is interrupted ends by itself and writes its report
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
