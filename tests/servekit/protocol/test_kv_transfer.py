"""Claims about what agents exchange: keys of transfers differ, and the sizes of frames are bounded."""

from __future__ import annotations

import pytest

from servekit.protocol.kv_transfer import (
    BATCH_BYTES,
    MAX_BATCH_KEYS,
    BlockLayout,
    bytes_of_block,
    max_frame_bytes,
    num_keys_at_once,
    transfer_key,
)

KEY = b"0123456789abcdef" * 2


def layouts(*sizes: int) -> list[BlockLayout]:
    return [BlockLayout(b"a" * 16, size) for size in sizes]


def test_each_server_has_another_key_for_transfers_and_none_is_the_one_of_its_workers() -> None:
    keys = {KEY, transfer_key(KEY, b"one"), transfer_key(KEY, b"other"), transfer_key(KEY[::-1], b"one")}
    assert len(keys) == 4 and {len(key) for key in keys} == {32}


@pytest.mark.parametrize(
    ("sizes", "num_keys"),
    [
        ((1,), MAX_BATCH_KEYS),
        ((BATCH_BYTES // 8,), 8),
        ((BATCH_BYTES // 8, BATCH_BYTES // 8), 4),
        ((3 * BATCH_BYTES,), 1),
    ],
)
def test_a_frame_has_as_many_blocks_as_fit_and_at_least_one(sizes: tuple[int, ...], num_keys: int) -> None:
    found = layouts(*sizes)
    assert num_keys_at_once(found) == num_keys
    assert num_keys * bytes_of_block(found) <= max_frame_bytes(found) == max(BATCH_BYTES, sum(sizes))
