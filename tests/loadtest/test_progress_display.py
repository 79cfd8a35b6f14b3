"""Test the progress display."""

from __future__ import annotations

from io import StringIO

from loadtest.progress_display import LOG_EVERY_S, Display
from loadtest.running.runner import Progress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def so_far(elapsed_s: float, num_ok: int, **more: int) -> Progress:
    """A run of 40 requests, of which each has ten tokens; the first bytes of each came after 50 ms."""
    return Progress(elapsed_s, 40, num_ok, 3, num_ok, num_tokens=10 * num_ok, first_s=[0.05] * 5, **more)


def test_a_terminal_has_one_line_that_is_written_over() -> None:
    output = Terminal()
    display = Display(output, "poisson:20")
    display.show(so_far(1.0, 10))
    display.show(so_far(2.0, 20, num_failed=4))
    display.close()
    first, second, last = output.getvalue().split("\r")[1:]
    assert (
        first
        == f"poisson:20    1.0 s  {'█' * 5}{'░' * 15}, 3 in flight, 10 ok, first byte 50 ms / 50 ms (p50 / p99)\x1b[K"
    )
    assert f"{'█' * 12}{'░' * 8}, 3 in flight, 20 ok, 4 failed" in second and second.endswith("100 tokens/s\x1b[K")
    assert last == second + "\n"


def test_a_file_has_a_line_every_few_seconds_and_the_last_one() -> None:
    output = StringIO()
    display = Display(output, "burst")
    for quarter in range(48):
        display.show(so_far(quarter / 4.0, quarter // 2))
    display.close()
    seconds = [float(line.split()[1]) for line in output.getvalue().splitlines()]
    assert seconds == [LOG_EVERY_S, 2 * LOG_EVERY_S, 11.8] and "\r" not in output.getvalue()


def test_tokens_a_second_are_of_the_last_seconds() -> None:
    output = StringIO()
    display = Display(output, "ramp:1-2")
    for second in range(21):
        display.show(so_far(float(second), 2 * max(0, second - 10)))
    display.close()
    assert output.getvalue().splitlines()[-1].endswith(", 20 tokens/s")


def test_a_display_without_reports_prints_nothing() -> None:
    output = StringIO()
    Display(output, "x").close()
    assert not output.getvalue()
    empty = Display(output, "x")
    empty.show(Progress())
    empty.close()
    assert "0 ok" in output.getvalue(), "and a plan without requests is no error"
