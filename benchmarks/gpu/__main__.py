"""Run all GPU benchmarks in one command, without a network; or in several commands, if each may take only minutes.

    python -m benchmarks.gpu --out FOLDER [--stages kernels steps ...] [--minutes 25]
    python -m benchmarks.gpu --list [--minutes 9]           list the stages, and which fit into one command
    python -m benchmarks.gpu --out FOLDER --device cpu --shapes tiny      a rehearsal: its figures mean nothing
    python -m benchmarks.gpu --out FOLDER --stages                        only the tables, from the records in FOLDER

Each stage is a process of its own and may fail without ending the others. Every row is written immediately to
FOLDER/records-TIME.jsonl. The tables are FOLDER/tables.md, and the output of the stages is FOLDER/log.txt. A stage is
not started if too little time is left. To combine the results of several commands, put their records into one folder.

Exit code 0: all stages that were started finished and were correct. 1: a stage failed. 2: wrong usage, or a package is
missing that every stage needs. A missed goal is reported and is not a failure; nor is a stage that is skipped because
only it needs a missing package.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import requirements
from benchmarks.gpu.processes import run_to_end
from benchmarks.gpu.records import Recorder, read_all
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.stages import BY_NAME, FAILED, FINE, SKIPPED, STAGES, Stage, overview
from benchmarks.gpu.tables import NOT_STARTED, page

STAGE_FAILED, WRONG_USAGE = 1, 2  # exit codes of this process, beside FINE
GOOD_OUTCOMES = ("done", "skipped")
COMMAND = "command"  # the `stage` of records that concern all stages


def main(argv: Sequence[str] | None = None) -> int:
    argument_list = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argument_list)
    stages = [BY_NAME[name] for name in arguments.stages]
    if arguments.list:
        print(overview(stages, arguments.minutes))
        return FINE
    if arguments.out is None:
        _parser().error("--out FOLDER is required")
    missing = requirements.installation_hint(requirements.REQUIRED_BY_ALL_STAGES) if stages else ""
    if missing:
        print(missing, file=sys.stderr)
        return WRONG_USAGE
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.command = shlex.join(["python", "-m", "benchmarks.gpu", *argument_list])
    arguments.run = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%dT%H%M%S")
    outcomes = _run_all(stages, arguments)
    print(_write_tables(arguments.out))
    return FINE if all(outcome in GOOD_OUTCOMES for outcome in outcomes) else STAGE_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Benchmark servekit on a GPU.")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for records, tables and log")
    parser.add_argument(
        "--stages",
        nargs="*",
        choices=names,
        default=names,
        help="in this order; none: only write the tables",
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="a stage that would not fit is not started")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--list", action="store_true", help="list the stages, grouped by --minutes")
    return parser


def _run_all(stages: Sequence[Stage], arguments: argparse.Namespace) -> list[str]:
    """Run the stages; return the outcomes of those that were started.

    A record is written before each stage, so that one that is cut off is seen in the tables.
    """
    from benchmarks.progress import progress, tell  # not at the top: it needs tqdm, and `main` checks for that

    recorder = Recorder(arguments.out, arguments.run, COMMAND)
    deadline = time.monotonic() + 60 * arguments.minutes
    outcomes = []
    for stage in progress(stages, "stages", lambda stage: f"{stage.name}, some {stage.minutes:g} min"):
        left_s = deadline - time.monotonic()
        fields = {"name": stage.name, "question": stage.question}
        if left_s < 60 * stage.minutes and stage is not stages[0]:
            outcome = f"{NOT_STARTED}: {left_s / 60:.1f} of {arguments.minutes:g} minutes were left"
            recorder.write("stages", {**fields, "outcome": outcome})
            tell(f"{stage.name}: {outcome}")
            continue
        recorder.write("stages", {**fields, "outcome": "**cut off**"})
        started = time.monotonic()
        outcome = _run_stage(stage, min(stage.limit_s, max(left_s, 30.0)), arguments)
        seconds = time.monotonic() - started
        recorder.write("stages", {**fields, "outcome": outcome, "seconds": seconds})
        tell(f"{stage.name}: {outcome} after {seconds:.0f} s")
        outcomes.append(outcome)
        _write_tables(arguments.out)
    return outcomes


def _run_stage(stage: Stage, limit_s: float, arguments: argparse.Namespace) -> str:
    """Run a stage in a process of its own, and return the outcome. All that it started has ended then."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{stage.module}", stage.name, "--out", str(arguments.out)]
    command += ["--run", arguments.run, "--command", arguments.command, "--limit-s", str(limit_s)]
    command += ["--device", arguments.device, "--shapes", *arguments.shapes]
    with (arguments.out / "log.txt").open("ab") as log:
        code = run_to_end(command, log, limit_s)
    if code is None:
        return f"**stopped** at its limit of {limit_s:.0f} s"
    outcomes = {FINE: "done", SKIPPED: "skipped", FAILED: "**failed**, see the rows"}
    return outcomes.get(code, f"**died** with code {code}, see log.txt")


def _write_tables(folder: Path) -> str:
    tables = page(read_all(folder))
    (folder / "tables.md").write_text(tables)
    return tables


if __name__ == "__main__":
    # SIGTERM becomes an exception, so that the running stage and its server are stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
