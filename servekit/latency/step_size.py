"""Say how many tokens of a step are beyond some numbers, because what a token costs depends on how many there are.

A step of few tokens waits until the weights are read, so one token more costs next to nothing. A step of many waits
for multiplications. The time is the larger of both (the roofline model: Williams, Waterman, Patterson, 2009), which is
piecewise linear: flat first, and then a line. Its breakpoint depends on the device: some ten tokens on a CPU, and some
hundreds on a GPU. A sum of lines that begin at fixed numbers comes near to it for any breakpoint, and stays linear in
what is fitted.
"""

from __future__ import annotations

BREAKPOINTS = (16, 64, 256)


def tokens_beyond_breakpoints(num_tokens: int) -> tuple[int, ...]:
    """Return how many tokens of a step are beyond each of BREAKPOINTS."""
    return tuple([max(0, num_tokens - point) for point in BREAKPOINTS])
