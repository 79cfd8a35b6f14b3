"""One run from beginning to end: plan it, run it, compute its figures; and the files in which it is kept."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec
from msgspec import Struct

from loadtest.analysis.measurements import Measurements, measure
from loadtest.analysis.slo import Objectives
from loadtest.analysis.summarise import summarise
from loadtest.analysis.summary import Client, Environment, Summary
from loadtest.analysis.timeline import timeline, write_csv
from loadtest.errors import LoadTestError
from loadtest.planning.plan import Plan, Request
from loadtest.planning.planner import make_plan, shares
from loadtest.planning.text import CHARACTERS_PER_TOKEN
from loadtest.progress_display import Display
from loadtest.record import Record
from loadtest.reporting.html_report import Run, write
from loadtest.reporting.markdown import table
from loadtest.running.fleet import FleetResult, run_fleet
from loadtest.running.metrics_scraper import get
from loadtest.target import Target

SUMMARY, REQUESTS, TIMELINE, PAGE, TABLE = "summary.json", "requests.jsonl", "timeline.csv", "report.html", "report.md"
# Far from the seeds that users choose, so that warming up does not put prompts of the run into the prefix cache.
WARM_UP_SEED = 2**31


class Experiment(Struct, frozen=True, kw_only=True):
    """What to run, against which server, and with how many processes."""

    target: Target
    arrivals: str
    workload: str
    seed: int = 0
    num_requests: int | None = None
    duration_s: float | None = None
    characters_per_token: float = CHARACTERS_PER_TOKEN
    num_processes: int = 1
    sources: tuple[str, ...] = ()
    num_warm_up: int = 8
    objectives: Objectives | None = None
    command: str = ""


class Trial(Struct):
    """A run that has ended."""

    label: str
    plan: Plan
    result: FleetResult
    measured: Measurements
    summary: Summary

    @property
    def was_stopped(self) -> bool:
        return self.result.was_stopped

    def as_run(self) -> Run:
        return Run(self.label, self.measured, self.summary, self.result.scrapes)


def run(experiment: Experiment, label: str, output: TextIO | None) -> Trial:
    """Run an experiment; `output` shows the progress. Raises LoadTestError."""
    target = experiment.target
    plan = make_plan(
        experiment.arrivals,
        experiment.workload,
        seed=experiment.seed,
        num_requests=experiment.num_requests,
        duration_s=experiment.duration_s,
        characters_per_token=experiment.characters_per_token,
    )
    version = _version()  # read before the run: an hour later the checkout may have changed
    started = datetime.datetime.now(tz=datetime.UTC)
    display = None if output is None else Display(output, label)
    result = run_fleet(
        target,
        shares(plan, min(experiment.num_processes, plan.num_clients or experiment.num_processes)),
        sources=experiment.sources,
        warm_up=_warm_up(experiment),
        on_progress=None if display is None else display.show,
    )
    if display is not None:
        display.close()
    measured = measure(result.records)
    notes = ["the user stopped the run before its end"] if result.was_stopped else []
    if result.num_missing:
        notes.append(f"{result.num_missing} requests have no record because their client process died")
    summary = summarise(
        plan,
        measured,
        target,
        _environment(experiment, started, version),
        experiment.objectives,
        event_loop_lags_s=[lag for of_process in result.lags_s for lag in of_process],
        scrapes=result.scrapes,
        notes=notes,
        errors=result.errors,
        client=Client(
            characters_per_token=experiment.characters_per_token,
            num_warm_up=experiment.num_warm_up,
            num_processes=experiment.num_processes,
            sources=list(experiment.sources),
        ),
    )
    return Trial(label, plan, result, measured, summary)


def save(trial: Trial, folder: Path) -> None:
    """Write summary, requests, timeline, page and table into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    encode = msgspec.json.encode
    (folder / SUMMARY).write_bytes(msgspec.json.format(encode(trial.summary)) + b"\n")
    with (folder / REQUESTS).open("wb") as file:
        file.writelines(encode(record) + b"\n" for record in trial.result.records)
    write_csv(timeline(trial.measured, trial.result.scrapes), folder / TIMELINE)
    write(folder / PAGE, [trial.as_run()], f"Load test: {trial.label}")
    (folder / TABLE).write_text(table([trial.summary], [trial.label]))


def save_all(trials: Sequence[Trial], folder: Path, title: str, conclusion: str = "") -> None:
    """Write each run into a folder of its own, and a table and a page of all, which begins with the conclusion."""
    for trial in trials:
        save(trial, folder / "".join(c if c.isalnum() or c in ".-" else "-" for c in trial.label))
    write(folder / PAGE, [trial.as_run() for trial in trials], title, conclusion)
    (folder / TABLE).write_text(table([trial.summary for trial in trials], [trial.label for trial in trials]))


def load(folder: Path) -> tuple[Measurements, Summary]:
    """Read what `save` wrote. Raises LoadTestError."""
    try:
        summary = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=Summary)
        with (folder / REQUESTS).open("rb") as file:
            decode = msgspec.json.Decoder(Record).decode
            records = [decode(line) for line in file]
    except (OSError, msgspec.DecodeError) as error:
        raise LoadTestError(f"{folder} holds no readable run: {error}; name a folder that `run --out` wrote") from None
    return measure(records), summary


def _warm_up(experiment: Experiment) -> list[Request]:
    if not experiment.num_warm_up:
        return []
    plan = make_plan(
        f"closed:{experiment.num_warm_up}",
        experiment.workload,
        seed=experiment.seed + WARM_UP_SEED,
        num_requests=experiment.num_warm_up,
        characters_per_token=experiment.characters_per_token,
    )
    return [request for request in plan.requests if request.follows is None]


def _environment(experiment: Experiment, started: datetime.datetime, version: str) -> Environment:
    answer = get(experiment.target.urls[0], "/info", experiment.target.api_key)
    info = None
    if answer is not None and answer[0] == 200:
        try:
            info = msgspec.json.decode(answer[1], type=dict)
        except msgspec.DecodeError:
            info = None  # not JSON: another server
    return Environment(
        host=_host(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        command=experiment.command,
        started_at=started.isoformat(timespec="seconds"),
        version=version,
        server_info=info,
    )


def _version() -> str:
    """Return the commit of this checkout, and whether it was modified; empty if this is not a checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""  # git would find another repository further up
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        # Without the lock, as another git command may be running.
        described = subprocess.run(
            command,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=5.0,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return described.stdout.strip() if described.returncode == 0 else ""


def _host() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model or platform.machine()}), {memory:.0f} GiB, {platform.system()}"
