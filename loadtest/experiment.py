"""One run from beginning to end: plan it, run it, and make figures of it; and the files in which it is kept."""

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

from loadtest.errors import LoadTestError
from loadtest.fleet import FleetResult, run_fleet
from loadtest.markdown import table
from loadtest.planned import Plan, Request
from loadtest.planning import make_plan, shares
from loadtest.progress import Display
from loadtest.record import Record
from loadtest.report import Run, write
from loadtest.scrape import get
from loadtest.slo import Objectives
from loadtest.summary import Client, Environment, Summary, summarise
from loadtest.target import Target
from loadtest.timeline import Measurements, measure, timeline, write_csv
from loadtest.words import CHARACTERS_PER_TOKEN

SUMMARY, REQUESTS, TIMELINE, PAGE, TABLE = "summary.json", "requests.jsonl", "timeline.csv", "report.html", "report.md"
WARM_UP_SEED = 2**31  # far from those that people choose: nothing of it is to be found in a prefix cache later


class Experiment(Struct, frozen=True, kw_only=True):
    """What is to be run, of whom it is asked, and by how many processes."""

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
    """What came of it."""

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
    """All of it; `output` is shown how it goes. Raises LoadTestError."""
    target = experiment.target
    plan = make_plan(
        experiment.arrivals,
        experiment.workload,
        seed=experiment.seed,
        num_requests=experiment.num_requests,
        duration_s=experiment.duration_s,
        characters_per_token=experiment.characters_per_token,
    )
    version = _version()  # of what runs: in an hour the checkout may be another one
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
    notes = ["it was stopped before its end"] if result.was_stopped else []
    if result.num_missing:
        notes.append(f"{result.num_missing} requests are missing: their process did not live to tell")
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


def keep(trial: Trial, folder: Path) -> None:
    """Write summary, requests, time line, page and table into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    encode = msgspec.json.encode
    (folder / SUMMARY).write_bytes(msgspec.json.format(encode(trial.summary)) + b"\n")
    with (folder / REQUESTS).open("wb") as file:
        file.writelines(encode(record) + b"\n" for record in trial.result.records)
    write_csv(timeline(trial.measured, trial.result.scrapes), folder / TIMELINE)
    write(folder / PAGE, [trial.as_run()], f"Load test: {trial.label}")
    (folder / TABLE).write_text(table([trial.summary], [trial.label]))


def keep_all(trials: Sequence[Trial], folder: Path, title: str, conclusion: str = "") -> None:
    """Several runs in folders of their own, and a table and a page of all of them, which begins with the conclusion."""
    for trial in trials:
        keep(trial, folder / "".join(c if c.isalnum() or c in ".-" else "-" for c in trial.label))
    write(folder / PAGE, [trial.as_run() for trial in trials], title, conclusion)
    (folder / TABLE).write_text(table([trial.summary for trial in trials], [trial.label for trial in trials]))


def recall(folder: Path) -> tuple[Measurements, Summary]:
    """What `keep` wrote. Raises LoadTestError."""
    try:
        summary = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=Summary)
        with (folder / REQUESTS).open("rb") as file:
            decode = msgspec.json.Decoder(Record).decode
            records = [decode(line) for line in file]
    except (OSError, msgspec.DecodeError) as error:
        raise LoadTestError(f"{folder} holds no run that can be read: {error}; name what `run --out` wrote") from None
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
            info = None  # somebody else's page
    return Environment(
        host=_host(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        command=experiment.command,
        started_at=started.isoformat(timespec="seconds"),
        version=version,
        server_info=info,
    )


def _version() -> str:
    """The commit that this tool is checked out from, and whether it was changed since; empty if it is no checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""  # git would find somebody else's further up
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        # Without the lock: somebody may be committing.
        told = subprocess.run(
            command,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=5.0,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""


def _host() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model or platform.machine()}), {memory:.0f} GiB, {platform.system()}"
