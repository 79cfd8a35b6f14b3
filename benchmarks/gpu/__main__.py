"""Everything about a GPU in one command, on a machine without a network; or in several, where commands are short.

    python -m benchmarks.gpu --out FOLDER [--stages kernels steps ...] [--minutes 25]
    python -m benchmarks.gpu --list [--minutes 9]           which stages there are, and what fits into one command
    python -m benchmarks.gpu --out FOLDER --device cpu --shapes tiny      a rehearsal: every figure is meaningless
    python -m benchmarks.gpu --out FOLDER --stages                        only the tables, of what lies there

Each stage is a process of its own and may fail without ending the others. Every row is written at once, to
FOLDER/records-TIME.jsonl; the tables are FOLDER/tables.md, and what the stages said is FOLDER/log.txt. A stage for
which no time is left is not begun. Results of several commands are put together by putting their records into one
folder.

Exit code 0: everything that was begun came to its end and was right; 1: something failed; 2: wrong use, or something is
not installed that every stage needs. A goal that is missed, and what is skipped because something is not installed that
only one stage needs, is told and no failure.
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

from benchmarks.gpu import needed
from benchmarks.gpu.processes import run_apart
from benchmarks.gpu.records import Recorder, read_all
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.stages import BY_NAME, FAILED, FINE, SKIPPED, STAGES, Stage, overview
from benchmarks.gpu.tables import NOT_BEGUN, page

SOMETHING_FAILED, WRONG_USE = 1, 2  # exit codes of this process, beside FINE
WELL = ("done", "skipped")  # how a stage may end
COMMAND = "command"  # the stage of records that are about all


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(words)
    stages = [BY_NAME[name] for name in arguments.stages]
    if arguments.list:
        print(overview(stages, arguments.minutes))
        return FINE
    if arguments.out is None:
        _parser().error("where to? give --out FOLDER")
    missing = needed.what_to_install(needed.BY_ALL) if stages else ""
    if missing:
        print(missing, file=sys.stderr)
        return WRONG_USE
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.command = shlex.join(["python", "-m", "benchmarks.gpu", *words])
    arguments.run = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%dT%H%M%S")
    outcomes = _run_all(stages, arguments)
    print(_write_tables(arguments.out))
    return FINE if all(outcome in WELL for outcome in outcomes) else SOMETHING_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What a GPU does with servekit.")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for records, tables and log")
    parser.add_argument(
        "--stages", nargs="*", choices=names, default=names, help="in this order; none: only the tables"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="no stage is begun that would not fit into these")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--list", action="store_true", help="tell the stages, and the commands of --minutes they make")
    return parser


def _run_all(stages: Sequence[Stage], arguments: argparse.Namespace) -> list[str]:
    """How those ended that were begun. Each is told of before, so that what was cut off is seen to have begun."""
    from benchmarks.progress import progress, tell  # not at the top: it needs tqdm, which `main` looks for

    recorder = Recorder(arguments.out, arguments.run, COMMAND)
    deadline = time.monotonic() + 60 * arguments.minutes
    outcomes = []
    for stage in progress(stages, "stages", lambda stage: f"{stage.name}, some {stage.minutes:g} min"):
        left_s = deadline - time.monotonic()
        told = {"name": stage.name, "question": stage.question}
        if left_s < 60 * stage.minutes and stage is not stages[0]:
            outcome = f"{NOT_BEGUN}: {left_s / 60:.1f} minutes were left of {arguments.minutes:g}"
            recorder.write("stages", {**told, "outcome": outcome})
            tell(f"{stage.name}: {outcome}")
            continue
        recorder.write("stages", {**told, "outcome": "**cut off**"})
        started = time.monotonic()
        outcome = _run_apart(stage, min(stage.limit_s, max(left_s, 30.0)), arguments)
        seconds = time.monotonic() - started
        recorder.write("stages", {**told, "outcome": outcome, "seconds": seconds})
        tell(f"{stage.name}: {outcome} after {seconds:.0f} s")
        outcomes.append(outcome)
        _write_tables(arguments.out)
    return outcomes


def _run_apart(stage: Stage, limit_s: float, arguments: argparse.Namespace) -> str:
    """In a process of its own, which is gone when this returns, and all that it started."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{stage.module}", stage.name, "--out", str(arguments.out)]
    command += ["--run", arguments.run, "--command", arguments.command, "--limit-s", str(limit_s)]
    command += ["--device", arguments.device, "--shapes", *arguments.shapes]
    with (arguments.out / "log.txt").open("ab") as log:
        code = run_apart(command, log, limit_s)
    if code is None:
        return f"**ended** after its {limit_s:.0f} s"
    ends = {FINE: "done", SKIPPED: "skipped", FAILED: "**failed**, see the rows"}
    return ends.get(code, f"**died** with code {code}, see log.txt")


def _write_tables(folder: Path) -> str:
    told = page(read_all(folder))
    (folder / "tables.md").write_text(told)
    return told


if __name__ == "__main__":
    # As an exception, so that whoever is ended ends what it started: the stage at work, and its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
