"""Claims about the tokens of a step beyond some numbers."""

from __future__ import annotations

from servekit.latency.step_size import BREAKPOINTS, tokens_beyond_breakpoints


def test_small_steps_have_none_and_each_token_beyond_a_bend_counts() -> None:
    assert BREAKPOINTS == (16, 64, 256)
    assert [tokens_beyond_breakpoints(number) for number in (1, 16, 17, 100, 256, 1000)] == [
        (0, 0, 0),
        (0, 0, 0),
        (1, 0, 0),
        (84, 36, 0),
        (240, 192, 0),
        (984, 936, 744),
    ]
