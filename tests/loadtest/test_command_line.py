"""Claims about `python -m loadtest`: what each subcommand says by its exit code, and what it leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest import __main__ as command_line
from loadtest import fleet, search, self_test
from loadtest.__main__ import FINE, INTERRUPTED, MISSED, NOT_VALID, WRONG_USE, main
from loadtest.errors import LoadTestError
from loadtest.experiment import PAGE, REQUESTS, SUMMARY, TABLE, TIMELINE, Experiment, Trial, recall
from loadtest.record import Outcome, Record
from loadtest.scrape import get
from loadtest.self_test import Accuracy, Omission, SelfTestReport, Stall
from loadtest.statistics import Distribution, distribution
from loadtest.summary import CLIENT_WAS_LATE, Summary
from loadtest.target import Door, Target

FILES = {SUMMARY, REQUESTS, TIMELINE, PAGE, TABLE}
NOBODY = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with self_test._known_server() as url:
        yield url


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "HEAD_START_S", 0.05)


def test_exit_codes_are_those_that_scripts_rely_on() -> None:
    assert (FINE, MISSED, WRONG_USE, NOT_VALID, INTERRUPTED) == (0, 1, 2, 3, 130)


def asking(command: str, url: str, out: Path, *more: str) -> list[str]:
    words = ["--url", url, "--workload", "random:input=16,output=4", "--out", str(out), "--warm-up", "1", *more]
    return [command, *words]


def spread(*values: float) -> Distribution | None:
    return distribution(np.array(values))


def summary_in(folder: Path) -> Summary:
    return msgspec.json.decode((folder / SUMMARY).read_bytes(), type=Summary)


def records_in(folder: Path) -> list[Record]:
    return [msgspec.json.decode(line, type=Record) for line in (folder / REQUESTS).read_bytes().splitlines()]


# -- run and compare ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run's folder, and its exit code. Its objectives allow for a machine on which other tests run."""
    folder = tmp_path_factory.mktemp("kept") / "new" / "folder"
    slo = ("--slo", "ttft:20s,itl_p50:20s", "--attainment", "0.5")
    return folder, main(
        asking("run", url, folder, "--arrivals", "closed:2", "--requests", "20", "--label", "two", *slo)
    )


@pytest.fixture(scope="module")
def trial(url: str) -> Trial:
    """For those to whom it is all one what was run."""
    words = asking("run", url, Path(), "--requests", "8", "--slo", "ttft:20s")
    arguments = command_line._parser().parse_args(words)
    arguments.command = ""
    return command_line.run(command_line._experiment(arguments, "burst"), "whole", None)


def test_a_run_leaves_all_its_files_and_can_be_recalled(kept: tuple[Path, int]) -> None:
    folder, code = kept
    summary = summary_in(folder)
    # Whether this client was quick enough is up to whatever else runs here.
    assert code == (FINE if summary.is_valid else NOT_VALID)
    assert {path.name for path in folder.iterdir()} == FILES
    assert [record.index for record in records_in(folder)] == list(range(20))
    assert summary.outcomes == {"ok": 20}
    assert summary.environment.command.startswith("python -m loadtest run --url ")
    measured, recalled = recall(folder)
    assert len(measured.records) == 20 and recalled == summary
    assert "two" in (folder / TABLE).read_text()


def test_a_run_is_compared_with_itself(kept: tuple[Path, int], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(kept[0])
    assert main(["compare", folder, f"{folder},{folder}"]) == FINE
    assert "TTFT p50" in capsys.readouterr().out


def test_a_missed_objective_is_one_for_ci(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _always_valid(monkeypatch)
    few = ("--arrivals", "burst", "--requests", "3", "--quiet")
    for number, missed in enumerate(("ttft:0.001ms", "e2e_p99:0.001ms,ttft:20s")):
        assert main(asking("run", url, tmp_path / str(number), *few, "--slo", missed)) == MISSED


def _always_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be using the machine, which is not the claim."""
    run = command_line.run

    def ran(experiment: Experiment, label: str, output: object) -> Trial:
        trial = run(experiment, label, None)
        trial.summary = msgspec.structs.replace(trial.summary, is_valid=True, invalid_because=[])
        return trial

    monkeypatch.setattr(command_line, "run", ran)


def test_a_run_without_an_answer_is_not_valid(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    few = ("--arrivals", "burst", "--requests", "3", "--warm-up", "0")
    assert main(asking("run", NOBODY, tmp_path, *few)) == NOT_VALID
    assert {record.outcome for record in records_in(tmp_path)} == {Outcome.UNREACHED}
    shown = capfd.readouterr()
    assert "not valid" in shown.out and "3 failed" in shown.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "--url", NOBODY, "--requests", "2"], "is the server up"),
        (["run", "--requests", "2", "--fields", "x"], "must be a JSON object"),
        (["run", "--requests", "2", "--slo", "quick"], "cannot read 'quick'"),
        (["run"], "would never end"),
        (["run", "--door", "generate", "--fields", '{"max_tokens": 3}', "--requests", "2"], "output=N instead"),
        (["sweep", "--requests", "2"], "needs --rates 1,2,4"),
        (["sweep", "--rates", "5,x", "--requests", "2"], "arrivals poisson:x"),
        (["sweep", "--rates", "2,3", "--clients", "1,8"], "not both"),
        (["sweep", "--rates", "2,2"], "is there twice"),
        (["run", "--requests", "2", "--out", "/proc/nope"], "--out /proc/nope: results cannot be written there"),
        (["run", "--requests", "2", "--processes", "0"], "--processes 0"),
        (["run", "--requests", "2", "--warm-up", "-1"], "--warm-up -1"),
        (["run", "--requests", "2", "--attainment", "99"], "99 % is 0.99"),
        (["run", "--url", NOBODY, "--requests", "2", "--timeout", "0"], "the timeout is 0 s"),
        (["run", "--url", NOBODY, "--requests", "2", "--sources", "abc"], "--sources abc: this is no address"),
        (["run", "--url", NOBODY, "--requests", "2", "--sources", "10.99.99.99"], "it is not of this machine"),
        (["self-test", "--rate", "0"], "--rate 0: a self-test is at 1 to"),
        (["find-max"], "needs --slo"),
        (["find-max", "--slo", "ttft_p99:500ms"], "ttft_p99 is asked of a run as a whole"),
        (["find-max", "--slo", "ttft:5s,itl_mean:1ms"], "itl_mean is asked of a run as a whole"),
        (["find-max", "--slo", "ttft:5s", "--duration", "9.5"], "--duration 9.5: how many"),
        (["find-max", "--slo", "ttft:5s", "--requests", "50"], "--requests 50: how many"),
        (["compare", "nowhere", "nowhere"], "holds no run that can be read"),
    ],
)
def test_what_cannot_be_done_is_told_in_words(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == WRONG_USE
    error = capsys.readouterr().err
    assert told in error and error.startswith("error: ") and "Traceback" not in error
    assert not list(tmp_path.iterdir()), "and leaves nothing behind"


# -- several runs ------------------------------------------------------------------------------------------------------


def test_a_sweep_is_a_folder_for_each_and_one_page(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _always_valid(monkeypatch)
    assert main(asking("sweep", url, tmp_path, "--clients", "1, 2", "--requests", "6")) == FINE
    assert {path.name for path in tmp_path.iterdir()} == {"closed-1", "closed-2", PAGE, TABLE}
    for number, name in enumerate(("closed-1", "closed-2")):
        assert {path.name for path in (tmp_path / name).iterdir()} == FILES
        assert summary_in(tmp_path / name).settings.seed == number, "new prompts, or they would be in a prefix cache"
    assert main(asking("sweep", url, tmp_path, "--rates", "200", "--requests", "3", "--slo", "e2e:0.001ms")) == MISSED
    assert (tmp_path / "poisson-200").exists()


LOOKS = ("--start-rate", "100", "--max-rate", "200", "--probe-requests", "8", "--max-probe-requests", "8")


def test_the_highest_rate_is_found_and_kept(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "_is_client_limited", lambda summary: False)
    words = asking("find-max", url, tmp_path, *LOOKS, "--slo", "ttft:20s", "--attainment", "0.5")
    assert main(words) == FINE
    assert "200 requests/s meet ttft:20s for 50" in capsys.readouterr().out
    found = msgspec.json.decode((tmp_path / "find-max.json").read_bytes(), type=search.Result)
    assert found.rate == 200.0 and [each.rate for each in found.probed] == [100.0, 200.0]
    assert sum((path / SUMMARY).exists() for path in tmp_path.iterdir()) == 2


def test_a_server_that_refuses_all_is_not_the_clients_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "Search", partial(search.Search, min_rate=50.0))
    words = asking("find-max", NOBODY, tmp_path, *LOOKS, "--slo", "ttft:20s", "--attainment", "0.5", "--warm-up", "0")
    assert main(words) == MISSED
    found = msgspec.json.decode((tmp_path / "find-max.json").read_bytes(), type=search.Result)
    assert found.rate is None and "at which nothing was answered" in found.stopped_by
    assert [each.decision for each in found.probed] == [search.Decision.MISSED]


def test_limits_that_nobody_can_keep_end_a_search(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_is_client_limited", lambda summary: False)
    looks = ("--start-rate", "50", "--probe-requests", "20", "--max-probe-requests", "20")
    assert main(asking("find-max", url, tmp_path, *looks, "--slo", "ttft:0.001ms", "--attainment", "0.8")) == MISSED
    found = msgspec.json.decode((tmp_path / "find-max.json").read_bytes(), type=search.Result)
    assert found.rate is None and len(found.probed) <= 3 and "no remedy" in found.stopped_by


def test_a_result_that_is_the_clients_is_not_valid(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "run", lambda _, label, __: msgspec.structs.replace(trial, label=label))
    monkeypatch.setattr(command_line, "_is_client_limited", lambda summary: True)
    monkeypatch.setattr(search, "Search", partial(search.Search, min_rate=100.0))
    assert main(asking("find-max", NOBODY, tmp_path, *LOOKS, "--slo", "ttft:20s", "--attainment", "0.5")) == NOT_VALID
    shown = capsys.readouterr().out
    assert shown.count("client") >= 3 and shown.count("asked once more") == 1 and "not valid: 100 requests/s" in shown
    assert sum((path / SUMMARY).exists() for path in tmp_path.iterdir()) == 2


# -- verification ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_right", "told"), [(True, "verified: 3 answers"), (False, "of 3 answers 3 are wrong")])
def test_wrong_answers_are_one_for_ci(
    is_right: bool,
    told: str,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _always_valid(monkeypatch)
    right = command_line.run

    def ran(experiment: Experiment, label: str, output: object) -> Trial:
        trial = right(msgspec.structs.replace(experiment, target=_unverified(experiment)), label, output)
        if not is_right:
            trial.summary = msgspec.structs.replace(trial.summary, outcomes={"wrong": 3}, is_valid=False)
        return trial

    monkeypatch.setattr(command_line, "run", ran)
    few = ("--arrivals", "burst", "--requests", "3", "--verify")
    assert main(asking("run", url, tmp_path, *few)) == (FINE if is_right else MISSED)
    assert told in capsys.readouterr().out


def _unverified(experiment: Experiment) -> Target:
    """The known server is not the simulated model."""
    return msgspec.structs.replace(experiment.target, verifies=False)


def test_a_client_that_lags_is_the_bottleneck(kept: tuple[Path, int]) -> None:
    summary = summary_in(kept[0])
    for lag_s, is_limited in ((0.0, False), (5.0, True)):
        lags_s = spread(*[lag_s] * 10)
        quick = msgspec.structs.replace(summary.full, client_lag_s=spread(0.0))
        late = msgspec.structs.replace(summary.full, client_lag_s=lags_s)
        of_loop = msgspec.structs.replace(summary, full=quick, event_loop_lag_s=lags_s)
        of_starts = msgspec.structs.replace(summary, full=late, event_loop_lag_s=None)
        assert command_line._is_client_limited(of_loop) is command_line._is_client_limited(of_starts) is is_limited


def test_a_search_whose_client_died_has_no_result(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = command_line.run

    def ran(experiment: Experiment, label: str, output: object) -> Trial:
        trial = run(experiment, label, None)
        trial.result.errors.append("process 0 of the client ended with -9")
        return trial

    monkeypatch.setattr(command_line, "run", ran)
    assert main(asking("find-max", url, tmp_path, *LOOKS, "--slo", "ttft:20s", "--attainment", "0.5")) == NOT_VALID
    assert "there is no result: process 0 of the client ended with -9" in capsys.readouterr().out
    assert not (tmp_path / "find-max.json").exists() and (tmp_path / PAGE).exists()


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "sweep", "find-max"])
def test_an_interrupted_run_writes_its_report_and_says_so(command: str, url: str, tmp_path: Path) -> None:
    how = {
        "run": ["--arrivals", "constant:50", "--requests", "5000"],
        "sweep": ["--rates", "50,60", "--requests", "5000"],
        "find-max": ["--start-rate", "50", "--probe-requests", "5000"],
    }
    words = asking(command, url, tmp_path / "out", *how[command], "--slo", "ttft:0.001ms", "--door", "tgi")
    latest_s = _received_s(url)
    num_seen = 0
    with subprocess.Popen(
        [sys.executable, "-m", "loadtest", *words],
        cwd=Path(command_line.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        end_s = time.monotonic() + 10.0
        while num_seen < 4 and time.monotonic() < end_s:  # the first one is to warm up
            before_s, latest_s = latest_s, _received_s(url)
            num_seen += latest_s > before_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
    assert process.returncode == INTERRUPTED, error
    assert "Traceback" not in error and "written to" in out
    folder = tmp_path / "out" if command == "run" else next((tmp_path / "out").glob("poisson-50*"))
    assert {path.name for path in folder.iterdir()} == FILES
    outcomes = {record.outcome for record in records_in(folder)}
    assert outcomes <= {Outcome.OK, Outcome.CUT, Outcome.SKIPPED} and {Outcome.OK, Outcome.SKIPPED} <= outcomes
    assert len(records_in(folder)) == 5000 and any("stopped" in note for note in summary_in(folder).notes)


def _received_s(url: str) -> float:
    """When the latest request came; the prompts have no numbers, so that they share a place."""
    answer = get(url, "/written")
    assert answer is not None
    written = msgspec.json.decode(answer[1], type=dict[int, self_test.Written])
    return max((each.received_s for each in written.values()), default=0.0)


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt, INTERRUPTED), (LoadTestError("gone"), WRONG_USE)])
@pytest.mark.parametrize(
    "words",
    [
        ["sweep", "--clients", "1,2", "--requests", "3"],
        ["find-max", *LOOKS, "--slo", "ttft:20s", "--attainment", "0.5"],
    ],
)
def test_what_was_whole_before_an_interruption_or_an_error_is_kept(
    words: list[str], end: BaseException, code: int, trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[Trial] = []

    def ran(experiment: Experiment, label: str, output: object) -> Trial:
        if trials:
            raise end
        trials.append(trial)
        return trial

    monkeypatch.setattr(command_line, "run", ran)
    assert main(asking(words[0], NOBODY, tmp_path, *words[1:])) == code
    assert len(list(tmp_path.glob(f"*/{SUMMARY}"))) == 1 and (tmp_path / PAGE).exists()


def test_who_interrupts_before_anything_was_asked_gets_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run", interrupted)
    for words in (["run"], ["sweep", "--rates", "1"], ["find-max", "--slo", "ttft:1s"]):
        assert main(words) == INTERRUPTED
        assert capsys.readouterr().err == "interrupted\n"


# -- the self-test -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error_s", "code"), [(0.0005, FINE), (0.005, MISSED)])
def test_a_self_test_that_fails_says_so(
    error_s: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = spread(*[error_s] * 10)
    lags_s = spread(0.0, 0.3)
    report = SelfTestReport(
        [Accuracy(Door.TGI, 10, 10, errors, errors, None, None)],
        Stall(0.3, lags_s, 5, [CLIENT_WAS_LATE]),
        Omission(2.0, spread(1.9), spread(0.1)),
        [],
    )
    rates: list[float] = []

    def told(rate: float) -> SelfTestReport:
        rates.append(rate)
        return report

    monkeypatch.setattr(command_line, "self_test", told)
    assert main(["self-test", "--rate", "20"]) == code and rates == [20.0]
    shown = capsys.readouterr().out
    assert "tgi: 10 of 10 answered" in shown and ("NOT GOOD" in shown) is (code == MISSED)
    assert "a client that stood still for 300 ms" in shown and "a server that stood still for 2 s" in shown


def test_an_error_in_the_self_test_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(rate: float) -> SelfTestReport:
        raise LoadTestError("the built-in server is gone")

    monkeypatch.setattr(command_line, "self_test", gone)
    assert main(["self-test"]) == WRONG_USE
