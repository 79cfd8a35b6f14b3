"""Claims about what is said while a model loads, and what is not."""

from __future__ import annotations

import io
import logging

import pytest

from workers.progress import BAR_WIDTH, Progress


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """Remembers what stands on its last line, as a person sees it; the cursor is `column`."""

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


def test_a_bar_grows_at_a_terminal_and_leaves_nothing_behind() -> None:
    terminal, clock, seen = Terminal(), Clock(), list[str]()
    progress = Progress(terminal=terminal, clock=clock)
    with progress.stage("reading", 40) as advance:
        for _ in range(40):
            clock.now_s += 0.1
            advance(1)
            seen.append(terminal.line)
    assert seen[3] == "" and seen[19] == f"reading [{'#' * 10}{'.' * 10}]  50 %"
    assert seen[-1] == f"reading [{'#' * BAR_WIDTH}] 100 %"
    assert terminal.line.strip() == "" and not terminal.lines


def test_what_somebody_else_logs_is_written_over_the_bar() -> None:
    terminal, clock = Terminal(), Clock()
    line = "12:00:00 INFO    servekit  request method=POST path=/generate status=503"
    with Progress(terminal=terminal, clock=clock).stage("reading", 2) as advance:
        clock.now_s = 1.0
        advance(1)
        assert terminal.line and terminal.column == 0
        terminal.write(line + "\n")
        clock.now_s = 2.0
        advance(1)
    assert terminal.lines == [line]


def test_what_takes_no_time_shows_no_bar() -> None:
    terminal, clock = Terminal(), Clock()
    load(Progress(terminal=terminal, clock=clock), clock, seconds=0.4)
    assert terminal.line == ""


def test_elsewhere_there_is_a_line_every_few_seconds_at_most(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO, "servekit.worker"):
        load(Progress(clock=clock), clock, seconds=4.0)
        assert not caplog.records
        load(Progress(clock=clock), clock, seconds=20.0, parts=8)
    assert caplog.messages == ["reading: 25 %", "reading: 50 %", "reading: 75 %", "reading: 100 %"]


def test_the_server_hears_of_the_stage_and_each_second_how_far_it_has_come() -> None:
    clock, told = Clock(), list[str]()
    load(Progress(told.append, clock=clock), clock, seconds=4.0, parts=8)
    assert told == ["reading", "reading: 25 %", "reading: 50 %", "reading: 75 %", "reading: 100 %"]


def test_a_list_tells_how_far_whoever_goes_through_it_has_come() -> None:
    clock, told = Clock(), list[str]()
    with Progress(told.append, clock=clock).over("counting", [5, 6, 7, 8]) as items:
        assert len(items) == 4 and items[1] == 6
        for number, item in enumerate(items):
            assert item == number + 5
            clock.now_s += 1.0
    assert told == ["counting", "counting: 25 %", "counting: 50 %", "counting: 75 %", "counting: 100 %"]


def test_nothing_to_do_is_no_mistake() -> None:
    with Progress().over("nothing", list[int]()) as items:
        assert not list(items)
