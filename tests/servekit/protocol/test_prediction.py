from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from servekit.protocol.prediction import (
    MIN_PADDING,
    MIN_PART_BYTES,
    ImageItem,
    PredictBatch,
    TextItem,
    encode_batch,
    padded_length,
)


@given(st.integers(1, 2**20))
def test_padding_is_at_most_an_eighth_or_seven_tokens(length: int) -> None:
    padding = padded_length(length) - length
    assert 0 <= padding < max(MIN_PADDING, length / 8)


def test_lengths_are_padded_to_few_different_ones() -> None:
    assert [padded_length(length) for length in (1, 8, 9, 64, 65, 128, 129, 512)] == [8, 8, 16, 64, 72, 128, 144, 512]
    assert len({padded_length(length) for length in range(1, 513)}) == 16 + 8 + 8


sizes = st.one_of(st.integers(0, 300), st.integers(MIN_PART_BYTES - 2, MIN_PART_BYTES + 2))
items = st.lists(st.one_of(st.tuples(st.booleans(), sizes), st.just(None)), max_size=40)


@given(st.integers(0, 2**60), items)
def test_a_batch_in_parts_is_the_same_message_and_its_large_images_are_not_copied(
    number: int, sizes: list[tuple[bool, int] | None]
) -> None:
    batch = PredictBatch(
        number,
        number + 1,
        tuple(
            TextItem((1, 2, 3)) if each is None else ImageItem(each[0], memoryview(bytes(each[1])), number % 2**30)
            for each in sizes
        ),
    )
    parts = encode_batch(batch)
    assert msgspec.msgpack.decode(b"".join(parts), type=PredictBatch) == batch
    large = [item.data for item in batch.items if isinstance(item, ImageItem) and len(item.data) >= MIN_PART_BYTES]
    assert all(any(part is data for part in parts) for data in large)
