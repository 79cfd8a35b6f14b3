"""The entry point of a stage's process, which `python -m benchmarks.gpu` starts."""

from __future__ import annotations

import argparse
import datetime
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.records import Recorder
from benchmarks.gpu.session import Session, SkippedError
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.stages import FAILED, FINE, SKIPPED


def run_stage(run: Callable[[Session], None]) -> NoReturn:
    """Run a stage, record how it ended, and exit with its exit code."""
    parser = argparse.ArgumentParser(description="One stage; start it with `python -m benchmarks.gpu --stages NAME`.")
    parser.add_argument("stage")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--shapes", nargs="+", required=True)
    for flag in ("--run", "--command", "--device"):
        parser.add_argument(flag, required=True)
    arguments = parser.parse_args()
    print(f"\n== {arguments.stage}, {datetime.datetime.now(tz=datetime.UTC):%H:%M:%S} UTC", flush=True)
    recorder = Recorder(arguments.out, arguments.run, arguments.stage)
    try:
        shapes = [SHAPES[name] for name in arguments.shapes]
        session = Session(recorder, arguments.device, shapes, arguments.limit_s, arguments.command)
        run(session)
    except SkippedError as error:
        recorder.write("stage", {"skipped": str(error)})
        print(f"skipped: {error}")
        sys.exit(SKIPPED)
    except Exception as error:
        traceback.print_exc()
        recorder.write("stage", {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        sys.exit(FAILED)
    sys.exit(FAILED if session.num_failed else FINE)
