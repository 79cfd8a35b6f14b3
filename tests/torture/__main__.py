"""Inject faults and overload into a real server, and report what its clients notice: `python -m tests.torture`.

All parts at full scale take about four and a half hours on two cores; the command line can name some of them. Results
go to build/torture, and with `--write` into docs/reliability.md and docs/attacks.md. The exit code is 1 if a demand was
not met.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import inspect
import os
import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import Struct

from scripts.tables import with_table
from tests.torture.report import BUILD, Finding, table

ROOT = Path(__file__).parents[2]
MAKER = "python -m tests.torture"


class Part(Struct, frozen=True):
    """A module of this package with `run(amount)`, the amount at full scale, and the page for its table."""

    module: str
    amount: float
    unit: str
    page: Path = ROOT / "docs" / "reliability.md"


PARTS = {
    "workers": Part("workers", 50, "times each"),
    "parent": Part("parent", 50, "times"),
    "drain": Part("drain", 50, "times"),
    "rolling": Part("rolling", 10, "restarts"),
    "failover": Part("failover", 10, "kills of each kind of worker"),
    "joins": Part("joins", 10, "minutes"),
    "models": Part("models", 10, "minutes"),
    "batches": Part("batches", 10_000, "lines"),
    "clients": Part("clients", 500, "times each"),
    "raw_http": Part("raw_http", 100_000, "cases"),
    "schemas": Part("schemas", 5_000, "cases for each endpoint"),
    "model_files": Part("model_files", 10_000, "tampered headers"),
    "attacks": Part("attacks.catalogue", 10, "s a window", ROOT / "docs" / "attacks.md"),
    "overload": Part("overload", 60, "s"),
    "soak": Part("soak", 30, "minutes"),
}


class Report(Struct, frozen=True):
    """The findings of one part, with date, commit, command and machine."""

    part: str
    findings: list[Finding]
    date: str
    commit: str
    command: str
    machine: str
    wall_time_s: float

    @property
    def is_kept(self) -> bool:
        return all(finding.is_kept is not False for finding in self.findings)

    def lines(self) -> list[str]:
        """Return the lines for the page."""
        took = f"{self.wall_time_s / 60:.0f} minutes" if self.wall_time_s > 120 else f"{self.wall_time_s:.0f} s"
        summary = f"`{self.command}` on {self.date}, at {self.commit}, in {took}. {self.machine}."
        return ["", summary, "", table(self.findings), ""]


def run_part(name: str, scale: float, seed: int, only: str | None = None) -> Report:
    """Run one part and return its report."""
    part = PARTS[name]
    amount = part.amount * scale
    amount = max(1, round(amount)) if part.unit != "minutes" else max(1.0, amount)
    print(f"{name}: {amount:g} {part.unit}", flush=True)
    run = importlib.import_module(f"tests.torture.{part.module}").run
    started_s = time.monotonic()
    options = {"seed": seed, **({} if only is None else {"only": only})}
    findings = run(amount, **{key: options[key] for key in inspect.signature(run).parameters if key in options})
    arguments = [name, *(["--scale", f"{scale:g}"] if scale != 1 else []), *(["--seed", str(seed)] if seed else [])]
    arguments += [] if only is None else ["--only", only]
    return Report(
        part=name,
        findings=findings,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        commit=_commit(),
        command=" ".join([MAKER, *arguments]),
        machine=_machine(),
        wall_time_s=time.monotonic() - started_s,
    )


def _commit() -> str:
    git = ["git", "-C", str(ROOT)]
    asked = [["describe", "--always", "--abbrev=10"], ["status", "--porcelain", "--", "servekit", "workers"]]
    commit, changed = (
        subprocess.run([*git, *each], capture_output=True, text=True, check=False).stdout.strip() for each in asked
    )
    return f"commit {commit or 'unknown'}" + (" with changes" if changed else "")


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    cores = len(os.sched_getaffinity(0))
    python = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"{cores} cores ({model}), Linux {platform.release()}, {python}"


def main() -> int:
    """Run the parts on the command line, or all of them; return the exit code."""
    parser = argparse.ArgumentParser(prog=MAKER, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all by default")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor for the number of repetitions; 0.1 runs a tenth"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument(
        "--only",
        help="run only this fault of the part `workers` (kill -9, SIGSEGV and so on), or these attacks of the part "
        "`attacks`, separated by commas",
    )
    parser.add_argument("--write", action="store_true", help="write the tables into the pages in docs/")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"unknown part: {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that `with` blocks end their servers
    BUILD.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.parts or PARTS:
        report = run_part(name, arguments.scale, arguments.seed, arguments.only)
        (BUILD / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
        print("\n".join(report.lines()), flush=True)
        if arguments.write:
            page = PARTS[name].page
            page.write_text(with_table(page.read_text(), name, iter(report.lines()), MAKER))
        if not report.is_kept:
            failed.append(name)
    print(f"demands not met: {', '.join(failed)}" if failed else "all demands met", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
