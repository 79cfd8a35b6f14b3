from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servekit.protocol.prediction import MIN_PADDING, padded_length


@given(st.integers(1, 2**20))
def test_padding_is_at_most_an_eighth_or_seven_tokens(length: int) -> None:
    padding = padded_length(length) - length
    assert 0 <= padding < max(MIN_PADDING, length / 8)


def test_lengths_are_padded_to_few_different_ones() -> None:
    assert [padded_length(length) for length in (1, 8, 9, 64, 65, 128, 129, 512)] == [8, 8, 16, 64, 72, 128, 144, 512]
    assert len({padded_length(length) for length in range(1, 513)}) == 16 + 8 + 8
