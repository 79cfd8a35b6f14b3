"""Claims about what is seen while a benchmark runs."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from benchmarks.progress import LINE_EVERY_S, Progress, _Bar, progress, tell
from tests.support.pseudo_terminal import pseudo_terminal


def test_elsewhere_there_is_a_line_for_a_step_every_five_seconds_at_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr("benchmarks.progress.time", SimpleNamespace(monotonic=lambda: now_s))
    for number in progress(range(12), "rounds", lambda number: f"seed {number}"):
        if number == 2:
            tell("| a row |")
        now_s += 2.0
    output, told = capsys.readouterr()
    assert told.splitlines() == [
        "rounds: 1 of 12, seed 0, after 0 s",
        "rounds: 4 of 12, seed 3, after 6 s",
        "rounds: 7 of 12, seed 6, after 12 s",
        "rounds: 10 of 12, seed 9, after 18 s",
    ]
    assert output == "| a row |\n" and LINE_EVERY_S == 5.0
    assert "\r" not in told and "\x1b" not in told


def test_at_a_terminal_there_is_a_bar_that_names_the_step_and_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pseudo_terminal() as (terminal, seen):
        monkeypatch.setattr(sys, "stderr", terminal)
        assert list(progress([5, 6, 7, 8], "seeds")) == [5, 6, 7, 8]
    lines = seen.text.split("\r")
    assert any(line.startswith("seeds |                    | 0 of 4 ") and ", 5" in line for line in lines)
    assert any(
        line.startswith("seeds |██████████          | 2 of 4 ") and line.rstrip().endswith(", 7") for line in lines
    )
    assert not lines[-1].strip() and not lines[-2].strip() and "\n" not in seen.text


def test_a_row_of_the_table_has_a_line_of_its_own_beside_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with pseudo_terminal() as (terminal, seen):
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(sys, "stdout", terminal)
        with Progress("rounds", 2) as steps:
            steps.begin("first")
            tell("| a row |")
            steps.begin("second")
    (before, after) = seen.text.split("| a row |\r\n")
    *_, last = (line for line in before.split("\r") if line)
    assert not last.strip(), "the bar was wiped away first"
    assert ", first" in after and ", second" in after, "and goes on below"


def test_a_table_in_a_file_has_nothing_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    table = io.StringIO()
    with pseudo_terminal() as (terminal, _):
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(sys, "stdout", table)
        for number in progress(range(3), "rounds"):
            tell(f"| {number} |")
    assert table.getvalue() == "| 0 |\n| 1 |\n| 2 |\n"


def test_no_thread_runs_beside_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pseudo_terminal() as (terminal, seen):
        monkeypatch.setattr(sys, "stderr", terminal)
        assert len(list(progress(range(3), "rounds"))) == 3
    assert seen.text and "monitor" not in vars(_Bar), "tqdm's looks after bars that stand still"


def test_a_loop_that_is_left_early_leaves_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with pseudo_terminal() as (terminal, seen):
        monkeypatch.setattr(sys, "stderr", terminal)
        steps = progress(range(100), "rounds")
        assert next(steps) == 0
        steps.close()  # type: ignore[attr-defined]  # as the end of a loop's life does
    assert not seen.text.split("\r")[-2].strip()
