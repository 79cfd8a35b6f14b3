"""Test `python -m loadtest`: exit codes, messages, and the files that each subcommand writes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

import loadtest
from loadtest.analysis import search
from loadtest.analysis.statistics import Distribution, distribution
from loadtest.analysis.summary import Summary
from loadtest.analysis.validity import CLIENT_WAS_LATE, client_lag_s
from loadtest.cli import find_max as find_max_module
from loadtest.cli import run as run_module
from loadtest.cli import self_test as self_test_module
from loadtest.cli.arguments import make_experiment, make_parser
from loadtest.cli.exit_codes import INTERRUPTED, NOT_VALID, OBJECTIVE_MISSED, SUCCESS, USAGE_ERROR
from loadtest.cli.main import main
from loadtest.errors import LoadTestError
from loadtest.experiment import PAGE, REQUESTS, SUMMARY, TABLE, TIMELINE, Experiment, Trial, load, run
from loadtest.record import Outcome, Record
from loadtest.running import fleet
from loadtest.running.metrics_scraper import get
from loadtest.self_test import cases as self_test
from loadtest.self_test.cases import Accuracy, Omission, SelfTestReport, Stall
from loadtest.self_test.reference_server import Written
from loadtest.target import ApiFormat, Target

FILES = {SUMMARY, REQUESTS, TIMELINE, PAGE, TABLE}
NO_SERVER = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with self_test._reference_server() as url:
        yield url


@pytest.fixture(autouse=True)
def start_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "HEAD_START_S", 0.05)


def test_exit_codes_do_not_change() -> None:
    assert (SUCCESS, OBJECTIVE_MISSED, USAGE_ERROR, NOT_VALID, INTERRUPTED) == (0, 1, 2, 3, 130)


def command_line(command: str, url: str, out: Path, *more: str) -> list[str]:
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
        command_line("run", url, folder, "--arrivals", "closed:2", "--requests", "20", "--label", "two", *slo)
    )


@pytest.fixture(scope="module")
def trial(url: str) -> Trial:
    """Any trial, for tests that do not need a particular one."""
    words = command_line("run", url, Path(), "--requests", "8", "--slo", "ttft:20s")
    arguments = make_parser("").parse_args(words)
    arguments.command = ""
    return run(make_experiment(arguments, "burst"), "whole", None)


def test_no_keep_alive_is_a_flag_that_the_summary_repeats() -> None:
    for flags, keep_alive in ((), True), (("--no-keep-alive",), False):
        arguments = make_parser("").parse_args(command_line("run", "http://127.0.0.1:1", Path(), *flags))
        arguments.command = ""
        assert make_experiment(arguments, "burst").target.keep_alive is keep_alive


def replace_run(monkeypatch: pytest.MonkeyPatch, replacement: Callable[[Experiment, str, object], Trial]) -> None:
    for module in (run_module, find_max_module):
        monkeypatch.setattr(module, "run", replacement)


def test_a_run_writes_all_its_files_and_can_be_loaded(kept: tuple[Path, int]) -> None:
    folder, code = kept
    summary = summary_in(folder)
    # Whether this client was quick enough is up to whatever else runs here.
    assert code == (SUCCESS if summary.is_valid else NOT_VALID)
    assert {path.name for path in folder.iterdir()} == FILES
    assert [record.index for record in records_in(folder)] == list(range(20))
    assert summary.outcomes == {"ok": 20}
    assert summary.environment.command.startswith("python -m loadtest run --url ")
    measured, recalled = load(folder)
    assert len(measured.records) == 20 and recalled == summary
    assert "two" in (folder / TABLE).read_text()


def test_compare_accepts_a_run_and_its_repetitions(kept: tuple[Path, int], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(kept[0])
    assert main(["compare", folder, f"{folder},{folder}"]) == SUCCESS
    assert "TTFT p50" in capsys.readouterr().out


def test_a_missed_objective_gives_exit_code_1(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _always_valid(monkeypatch)
    few = ("--arrivals", "burst", "--requests", "3", "--quiet")
    for number, missed in enumerate(("ttft:0.001ms", "e2e_p99:0.001ms,ttft:20s")):
        assert main(command_line("run", url, tmp_path / str(number), *few, "--slo", missed)) == OBJECTIVE_MISSED


def _always_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the client was quick enough depends on the load of the machine, and is not tested here."""

    def ran(experiment: Experiment, label: str, output: object) -> Trial:
        trial = run(experiment, label, None)
        trial.summary = msgspec.structs.replace(trial.summary, is_valid=True, invalid_because=[])
        return trial

    replace_run(monkeypatch, ran)


def test_a_run_without_an_answer_is_not_valid(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    few = ("--arrivals", "burst", "--requests", "3", "--warm-up", "0")
    assert main(command_line("run", NO_SERVER, tmp_path, *few)) == NOT_VALID
    assert {record.outcome for record in records_in(tmp_path)} == {Outcome.UNREACHED}
    shown = capfd.readouterr()
    assert "not valid" in shown.out and "3 failed" in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--url", NO_SERVER, "--requests", "2"], "check that the server runs at http://127.0.0.1:1"),
        (["run", "--requests", "2", "--fields", "x"], "must be a JSON object"),
        (["run", "--requests", "2", "--slo", "quick"], "'quick' is not an objective"),
        (["run"], "would never end"),
        (["run", "--api", "generate", "--fields", '{"max_tokens": 3}', "--requests", "2"], "output=N instead"),
        (["sweep", "--requests", "2"], "needs --rates 1,2,4"),
        (["sweep", "--rates", "5,x", "--requests", "2"], "--arrivals poisson:x"),
        (["sweep", "--rates", "2,3", "--clients", "1,8"], "cannot be combined"),
        (["sweep", "--rates", "2,2"], "is listed twice"),
        (["run", "--requests", "2", "--out", "/proc/nope"], "--out /proc/nope: results cannot be written there"),
        (["run", "--requests", "2", "--processes", "0"], "--processes 0"),
        (["run", "--requests", "2", "--warm-up", "-1"], "--warm-up -1"),
        (["run", "--requests", "2", "--attainment", "99"], "99 % is 0.99"),
        (["run", "--url", NO_SERVER, "--requests", "2", "--timeout", "0"], "--timeout 0"),
        (
            ["run", "--url", NO_SERVER, "--requests", "2", "--sources", "abc"],
            "--sources abc: cannot connect from this address",
        ),
        (["run", "--url", NO_SERVER, "--requests", "2", "--sources", "10.99.99.99"], "it is not of this machine"),
        (["self-test", "--rate", "0"], "--rate 0 is not within 1 to"),
        (["find-max"], "needs --slo"),
        (["find-max", "--slo", "ttft_p99:500ms"], "ttft_p99 is an objective of a whole run"),
        (["find-max", "--slo", "ttft:5s,itl_mean:1ms"], "itl_mean is an objective of a whole run"),
        (["find-max", "--slo", "ttft:5s", "--duration", "9.5"], "--duration 9.5 does not apply"),
        (["find-max", "--slo", "ttft:5s", "--requests", "50"], "--requests 50 does not apply"),
        (["compare", "nowhere", "nowhere"], "holds no readable run"),
    ],
)
def test_wrong_use_gives_exit_code_2_and_a_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == USAGE_ERROR
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "Traceback" not in error
    assert not list(tmp_path.iterdir()), "and leaves nothing behind"


def test_the_former_name_of_an_option_still_works_and_prints_a_note(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[ApiFormat] = []

    def ran(experiment: Experiment, label: str, output: object) -> Trial:
        seen.append(experiment.target.api)
        return trial

    replace_run(monkeypatch, ran)
    for options in (["--door", "chat"], ["--api", "chat"], []):
        main(command_line("run", NO_SERVER, tmp_path, "--requests", "1", *options))
        assert ("--door is now called --api" in capsys.readouterr().err) is ("--door" in options)
    assert seen == [ApiFormat.CHAT, ApiFormat.CHAT, ApiFormat.GENERATE_STREAM]
    assert main(command_line("run", NO_SERVER, tmp_path, "--door", "chat", "--api", "tgi")) == USAGE_ERROR
    assert "contradict each other" in capsys.readouterr().err


# -- several runs ------------------------------------------------------------------------------------------------------


def test_a_sweep_writes_a_folder_for_each_run_and_one_page(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _always_valid(monkeypatch)
    assert main(command_line("sweep", url, tmp_path, "--clients", "1, 2", "--requests", "6")) == SUCCESS
    assert {path.name for path in tmp_path.iterdir()} == {"closed-1", "closed-2", PAGE, TABLE}
    for number, name in enumerate(("closed-1", "closed-2")):
        assert {path.name for path in (tmp_path / name).iterdir()} == FILES
        assert summary_in(tmp_path / name).settings.seed == number, "new prompts, or they would be in a prefix cache"
    assert (
        main(command_line("sweep", url, tmp_path, "--rates", "200", "--requests", "3", "--slo", "e2e:0.001ms"))
        == OBJECTIVE_MISSED
    )
    assert (tmp_path / "poisson-200").exists()


# Attainments are low, for a few requests have to show them.
PROBES = ("--probe-requests", "8", "--max-probe-requests", "8", "--probe-duration", "0.05")
LOOKS = ("--start-rate", "100", "--max-rate", "200", *PROBES)


def test_find_max_writes_the_highest_rate(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(find_max_module, "client_lag_s", lambda summary: 0.0)
    words = command_line("find-max", url, tmp_path, *LOOKS, "--slo", "ttft:20s", "--attainment", "0.5")
    assert main(words) == SUCCESS
    assert "200 requests/s meet ttft:20s for 50" in capsys.readouterr().out
    found = msgspec.json.decode((tmp_path / "find-max.json").read_bytes(), type=search.Result)
    assert found.rate == 200.0 and [each.rate for each in found.probed] == [100.0, 200.0, 200.0]
    # On a busy machine a probe may decide nothing, and is repeated in a folder of its own.
    assert sum((path / SUMMARY).exists() for path in tmp_path.iterdir()) >= 3


def test_find_max_does_not_blame_the_client_if_the_server_refuses_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "Search", partial(search.Search, min_rate=50.0))
    words = command_line(
        "find-max", NO_SERVER, tmp_path, *LOOKS, "--slo", "ttft:20s", "--attainment", "0.5", "--warm-up", "0"
    )
    assert main(words) == OBJECTIVE_MISSED
    found = msgspec.json.decode((tmp_path / "find-max.json").read_bytes(), type=search.Result)
    assert found.rate is None and "at which nothing was answered" in found.stopped_by
    assert [each.decision for each in found.probed] == [search.Decision.MISSED]


def test_limits_that_no_request_can_meet_end_a_search(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_max_module, "client_lag_s", lambda summary: 0.0)
    looks = ("--start-rate", "50", *PROBES, "--slo", "ttft:0.001ms", "--attainment", "0.5")
    assert main(command_line("find-max", url, tmp_path, *looks)) == OBJECTIVE_MISSED
    found = msgspec.json.decode((tmp_path / "find-max.json").read_bytes(), type=search.Result)
    assert found.rate is None and len(found.probed) <= 6 and "would not help" in found.stopped_by


def test_a_search_that_the_client_limits_is_not_valid(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_run(monkeypatch, lambda _, label, __: msgspec.structs.replace(trial, label=label))
    monkeypatch.setattr(find_max_module, "client_lag_s", lambda summary: 1e6)
    monkeypatch.setattr(search, "Search", partial(search.Search, min_rate=100.0))
    assert (
        main(command_line("find-max", NO_SERVER, tmp_path, *LOOKS, "--slo", "ttft:20s", "--attainment", "0.5"))
        == NOT_VALID
    )
    shown = capsys.readouterr().out
    assert (
        shown.count("client") >= 3
        and shown.count("probing this rate again") == 1
        and "late twice at 100 requests/s" in shown
    )
    assert sum((path / SUMMARY).exists() for path in tmp_path.iterdir()) == 2


# -- verification ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_right", "message"), [(True, "verified: 3 answers are correct"), (False, "of 3 answers, 3 are wrong")]
)
def test_wrong_answers_give_exit_code_1(
    is_right: bool,
    message: str,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ran(experiment: Experiment, label: str, output: object) -> Trial:
        trial = run(msgspec.structs.replace(experiment, target=_unverified(experiment)), label, None)
        outcomes = trial.summary.outcomes if is_right else {"wrong": 3}
        trial.summary = msgspec.structs.replace(trial.summary, outcomes=outcomes, is_valid=is_right, invalid_because=[])
        return trial

    replace_run(monkeypatch, ran)
    few = ("--arrivals", "burst", "--requests", "3", "--verify")
    assert main(command_line("run", url, tmp_path, *few)) == (SUCCESS if is_right else OBJECTIVE_MISSED)
    assert message in capsys.readouterr().out


def _unverified(experiment: Experiment) -> Target:
    """The known server is not the simulated model."""
    return msgspec.structs.replace(experiment.target, verifies=False)


def test_the_lag_of_the_client_is_the_greater_of_its_starts_and_its_event_loop(kept: tuple[Path, int]) -> None:
    summary = summary_in(kept[0])
    for starts_s, loop_s in ((0.0, 5.0), (5.0, 0.0)):
        full = msgspec.structs.replace(summary.full, client_lag_s=spread(starts_s))
        late = msgspec.structs.replace(summary, full=full, event_loop_lag_s=spread(loop_s))
        assert client_lag_s(late) == 5.0
    silent = msgspec.structs.replace(summary.full, client_lag_s=None)
    assert client_lag_s(msgspec.structs.replace(summary, full=silent, event_loop_lag_s=None)) == 0.0


def test_a_search_whose_client_died_has_no_result(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(experiment: Experiment, label: str, output: object) -> Trial:
        trial = run(experiment, label, None)
        trial.result.errors.append("process 0 of the client ended with -9")
        return trial

    replace_run(monkeypatch, ran)
    assert (
        main(command_line("find-max", url, tmp_path, *LOOKS, "--slo", "ttft:20s", "--attainment", "0.5")) == NOT_VALID
    )
    assert "no result: process 0 of the client ended with -9" in capsys.readouterr().out
    assert not (tmp_path / "find-max.json").exists() and (tmp_path / PAGE).exists()


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "sweep", "find-max"])
def test_an_interrupted_run_writes_its_report_and_a_note(command: str, url: str, tmp_path: Path) -> None:
    how = {
        "run": ["--arrivals", "constant:50", "--requests", "5000"],
        "sweep": ["--rates", "50,60", "--requests", "5000"],
        "find-max": ["--start-rate", "50", "--probe-duration", "100"],
    }
    words = command_line(command, url, tmp_path / "out", *how[command], "--slo", "ttft:0.001ms", "--api", "tgi")
    latest_s = _received_s(url)
    num_seen = 0
    with subprocess.Popen(
        [sys.executable, "-m", "loadtest", *words],
        cwd=Path(loadtest.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        end_s = time.monotonic() + 60.0
        while num_seen < 4 and time.monotonic() < end_s:  # the first one is to warm up
            before_s, latest_s = latest_s, _received_s(url)
            num_seen += latest_s > before_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, error
    assert "Traceback" not in error and "written to" in out
    folder = tmp_path / "out" if command == "run" else next((tmp_path / "out").glob("poisson-50*"))
    assert {path.name for path in folder.iterdir()} == FILES
    outcomes = {record.outcome for record in records_in(folder)}
    assert outcomes <= {Outcome.OK, Outcome.CUT, Outcome.SKIPPED} and {Outcome.OK, Outcome.SKIPPED} <= outcomes
    assert len(records_in(folder)) == 5000 or command == "find-max"
    assert any("stopped" in note for note in summary_in(folder).notes)


def _received_s(url: str) -> float:
    """When the latest request came; the prompts have no numbers, so that they share a place."""
    answer = get(url, "/written")
    assert answer is not None
    written = msgspec.json.decode(answer[1], type=dict[int, Written])
    return max((each.received_s for each in written.values()), default=0.0)


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt, INTERRUPTED), (LoadTestError("gone"), USAGE_ERROR)])
@pytest.mark.parametrize(
    "words",
    [
        ["sweep", "--clients", "1,2", "--requests", "3"],
        ["find-max", *LOOKS, "--slo", "ttft:20s", "--attainment", "0.5"],
    ],
)
def test_runs_completed_before_an_interruption_or_an_error_are_written(
    words: list[str], end: BaseException, code: int, trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[Trial] = []

    def ran(experiment: Experiment, label: str, output: object) -> Trial:
        if trials:
            raise end
        trials.append(trial)
        return trial

    replace_run(monkeypatch, ran)
    assert main(command_line(words[0], NO_SERVER, tmp_path, *words[1:])) == code
    assert len(list(tmp_path.glob(f"*/{SUMMARY}"))) == 1 and (tmp_path / PAGE).exists()


def test_an_interruption_before_the_first_run_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> Trial:
        raise KeyboardInterrupt

    replace_run(monkeypatch, interrupted)
    for words in (["run"], ["sweep", "--rates", "1"], ["find-max", "--slo", "ttft:1s"]):
        assert main(words) == INTERRUPTED
        assert capsys.readouterr().err == "interrupted\n"


# -- the self-test -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error_s", "code"), [(0.0005, SUCCESS), (0.005, OBJECTIVE_MISSED)])
def test_a_failed_self_test_prints_failed_and_gives_exit_code_1(
    error_s: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = spread(*[error_s] * 10)
    lags_s = spread(0.0, 0.3)
    report = SelfTestReport(
        [Accuracy(ApiFormat.TGI, 10, 10, errors, errors, None, None)],
        Stall(0.3, lags_s, 5, [CLIENT_WAS_LATE]),
        Omission(2.0, spread(1.9), spread(0.1)),
        [],
    )
    rates: list[float] = []

    def reported(rate: float) -> SelfTestReport:
        rates.append(rate)
        return report

    monkeypatch.setattr(self_test_module, "self_test", reported)
    assert main(["self-test", "--rate", "20"]) == code and rates == [20.0]
    shown = capsys.readouterr().out
    assert "tgi: 10 of 10 answered" in shown and ("FAILED" in shown) is (code == OBJECTIVE_MISSED)
    assert "client stalled for 300 ms" in shown and "server stalled for 2 s" in shown


def test_an_error_in_the_self_test_gives_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(rate: float) -> SelfTestReport:
        raise LoadTestError("the reference server has ended")

    monkeypatch.setattr(self_test_module, "self_test", gone)
    assert main(["self-test"]) == USAGE_ERROR
