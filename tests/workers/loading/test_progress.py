"""Claims about what is reported while a model loads: bars at terminals, log lines elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from tests.support.pseudo_terminal import pseudo_terminal
from workers.loading.progress import Progress, _Bar


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """Keeps its last line as it is displayed; the cursor is at `column`."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.column, self.lines = "", 0, list[str]()

    def write(self, text: str) -> int:
        for character in text:
            if character == "\r":
                self.column = 0
            elif character == "\n":
                self.lines.append(self.line.rstrip())
                self.line, self.column = "", 0
            else:
                self.line = self.line[: self.column].ljust(self.column) + character + self.line[self.column + 1 :]
                self.column += 1
        return len(text)


def load(progress: Progress, clock: Clock, seconds: float, parts: int = 100) -> None:
    with progress.stage("reading", parts) as advance:
        for _ in range(parts):
            clock.now_s += seconds / parts
            advance(1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars appear at once and with every update: tqdm's clock is the real one, which a test cannot set."""
    monkeypatch.setattr("workers.loading.progress.BAR_AFTER_S", 0.0)
    monkeypatch.setattr("workers.loading.progress.BAR_EVERY_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_bar_grows_at_a_terminal_and_disappears() -> None:
    terminal, seen = Terminal(), list[str]()
    with Progress(terminal=terminal).stage("reading", 40) as advance:
        for _ in range(40):
            advance(1)
            seen.append(terminal.line)
    assert seen[19].startswith(f"reading |{'#' * 10}{' ' * 10}|  50 %, ") and "left" in seen[19]
    assert seen[39].startswith(f"reading |{'#' * 20}| 100 %, ")
    assert terminal.line.strip() == "" and terminal.column == 0 and not terminal.lines


@pytest.mark.usefixtures("impatient")
def test_log_lines_of_other_processes_overwrite_the_bar() -> None:
    terminal = Terminal()
    line = "12:00:00 INFO    servekit  request method=POST path=/generate status=503"
    with Progress(terminal=terminal).stage("reading", 2) as advance:
        advance(1)
        assert terminal.line and terminal.column == 0
        terminal.write(line + "\n")
        advance(1)
    assert terminal.lines == [line]


@pytest.mark.usefixtures("impatient")
def test_log_lines_of_this_process_do_not_mix_with_the_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal, log = Terminal(), logging.getLogger("servekit.worker")
    console = logging.StreamHandler(terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(logging.root, "handlers", [console])
    with caplog.at_level(logging.INFO, log.name), Progress(terminal=terminal).stage("reading", 2) as advance:
        advance(1)
        log.info("short")
        assert terminal.line.startswith("reading |") and terminal.column == 0, "and the bar is below it"
    assert terminal.lines == ["short"] and logging.root.handlers == [console]


def test_short_stage_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.loading.progress.BAR_AFTER_S", 3600.0)
    terminal, clock = Terminal(), Clock()
    load(Progress(terminal=terminal, clock=clock), clock, seconds=0.4)
    assert terminal.line == ""


@pytest.mark.usefixtures("impatient")
def test_bar_replaces_log_lines_where_standard_error_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, reports = Clock(), list[str]()
    with caplog.at_level(logging.INFO, "servekit.worker"), pseudo_terminal() as (terminal, seen):
        monkeypatch.setattr(sys, "stderr", terminal)
        load(Progress(reports.append, clock=clock), clock, seconds=40.0, parts=4)
    assert "\rreading |█████               |  25 %, " in seen.text and "\n" not in seen.text
    assert seen.text.rstrip("\r").endswith("    "), "what is left is blank"
    assert not caplog.records
    assert reports == ["reading", "reading: 25 %", "reading: 50 %", "reading: 75 %", "reading: 100 %"]
    assert "monitor" not in vars(_Bar), "tqdm's thread would wake the worker for its whole life"


@pytest.mark.usefixtures("impatient")
def test_bar_is_not_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pseudo_terminal(num_columns=30) as (terminal, seen):
        monkeypatch.setattr(sys, "stderr", terminal)
        load(Progress(), Clock(), seconds=1.0, parts=4)
    assert "reading |" in seen.text and max(map(len, seen.text.split("\r"))) <= 30


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("logs_json", [False, True], ids=["a file", "a terminal that is to have JSON"])
def test_no_bar_is_drawn_without_a_terminal_or_with_json(
    logs_json: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, output = Clock(), Terminal() if logs_json else io.StringIO()
    monkeypatch.setattr("workers.loading.progress.logs_json", lambda: logs_json)
    monkeypatch.setattr(output, "isatty", lambda: logs_json)
    monkeypatch.setattr(sys, "stderr", output)
    with caplog.at_level(logging.INFO, "servekit.worker"):
        load(Progress(clock=clock), clock, seconds=20.0, parts=4)
    assert output.getvalue() == "" and getattr(output, "line", "") == ""
    assert caplog.messages == ["reading: 25 %", "reading: 50 %", "reading: 75 %", "reading: 100 %"]


def test_log_has_a_line_every_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO, "servekit.worker"):
        load(Progress(clock=clock), clock, seconds=4.0)
        assert not caplog.records
        load(Progress(clock=clock), clock, seconds=20.0, parts=8)
    assert caplog.messages == ["reading: 25 %", "reading: 50 %", "reading: 75 %", "reading: 100 %"]


def test_stage_and_percentage_are_reported_each_second() -> None:
    clock, reports = Clock(), list[str]()
    load(Progress(reports.append, clock=clock), clock, seconds=4.0, parts=8)
    assert reports == ["reading", "reading: 25 %", "reading: 50 %", "reading: 75 %", "reading: 100 %"]


def test_iteration_over_a_counted_list_is_reported() -> None:
    clock, reports = Clock(), list[str]()
    with Progress(reports.append, clock=clock).over("counting", [5, 6, 7, 8]) as items:
        assert len(items) == 4 and items[1] == 6
        for number, item in enumerate(items):
            assert item == number + 5
            clock.now_s += 1.0
    assert reports == ["counting", "counting: 25 %", "counting: 50 %", "counting: 75 %", "counting: 100 %"]


def test_empty_stage_is_allowed() -> None:
    with Progress().over("nothing", list[int]()) as items:
        assert not list(items)
