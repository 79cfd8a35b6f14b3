"""Say how many tokens of a step are beyond some numbers, because what a token costs depends on how many there are.

A step of few tokens waits until the weights are read, so one token more costs next to nothing. A step of many waits
for multiplications. The time is the larger of both (the roofline model: Williams, Waterman, Patterson, 2009), which is
flat first and then a line. Where it bends depends on the device: at some ten tokens on a CPU, and at some hundreds on a
GPU. A sum of lines that begin at fixed numbers comes near to it wherever it bends, and stays linear in what is fitted.
"""

from __future__ import annotations

BENDS = (16, 64, 256)


def tokens_beyond_bends(num_tokens: int) -> tuple[int, ...]:
    """Return how many tokens of a step are beyond each of BENDS."""
    return tuple([max(0, num_tokens - bend) for bend in BENDS])
