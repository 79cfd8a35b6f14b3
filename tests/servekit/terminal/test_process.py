"""Claims about the end of terminal commands: exit codes when the terminal or the reader of the output is gone."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from servekit.cli import main
from servekit.terminal.process import StandardStreamFailed, run, with_standard_streams

HANGUP = 129


class Closed(io.StringIO):
    """An output whose other end is gone."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def fileno(self) -> int:
        return 1

    def flush(self) -> None:
        raise OSError(self.number, "gone")


@pytest.fixture
def kept_stdout(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("os.dup2", lambda *fds: None)  # the test run keeps its own output
    return monkeypatch


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE])
def test_a_terminal_that_closes_during_a_frame_ends_the_command_as_sighup_does(number: int) -> None:
    async def draw() -> int:
        raise OSError(number, "gone")

    if number == errno.EIO:
        assert run(draw()) == HANGUP
    else:
        with pytest.raises(BrokenPipeError):
            run(draw())


def test_a_frame_that_is_lost_with_its_terminal_is_no_error(kept_stdout: pytest.MonkeyPatch) -> None:
    kept_stdout.setattr(sys, "stdout", Closed(errno.EIO))
    assert with_standard_streams(lambda: HANGUP) == HANGUP
    with pytest.raises(StandardStreamFailed, match="cannot write to standard output"):
        with_standard_streams(lambda: 0)
    kept_stdout.setattr(sys, "stdout", Closed(errno.EPIPE))
    assert with_standard_streams(lambda: 0) == 1


def test_a_message_that_cannot_be_printed_keeps_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Closed(errno.EIO))
    assert main(["serve", "--no-such-flag"]) == 2
