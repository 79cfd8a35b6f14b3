"""Claims about the memory in which blocks are handed over: they come back as they were, or are found to be wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from servekit.errors import ConfigError
from servekit.protocol.block_ring import BlockRing, block_sums

BLOCK_BYTES, LAYOUT = 100, b"a layout, 16 byt"
KEYS = [bytes([number]) * 16 for number in range(1, 100)]


@pytest.fixture
def fd() -> Iterator[int]:
    """Memory for 55 blocks."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 64 + 4096 + 55 * 128)
    yield fd
    os.close(fd)


def append(ring: BlockRing, *numbers: int) -> None:
    for row, number in zip(ring.next_rows(len(numbers)), numbers, strict=True):
        ring.rows[row] = number
    ring.append([KEYS[number] for number in numbers])
    ring.refresh()


def test_what_one_process_appends_another_one_reads(fd: int) -> None:
    writer, reader = BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True), BlockRing(os.dup(fd), BLOCK_BYTES, LAYOUT)
    append(writer, 1, 2, 3)
    assert KEYS[2] not in reader, "it has not looked yet"
    assert reader.refresh() == [] and reader.list_keys() == KEYS[1:4]
    blocks, is_right = reader.read([KEYS[3], KEYS[1]])
    assert is_right.all() and (blocks[0] == 3).all() and (blocks[1] == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        reader.rows[0] = 7


def test_the_oldest_blocks_are_overwritten_and_known_to_be_lost_before_that(fd: int) -> None:
    writer, reader = BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True), BlockRing(fd, BLOCK_BYTES, LAYOUT)
    dropped = []
    for number in range(90):
        append(writer, number)
        dropped += reader.refresh()
        assert len(reader) <= reader.num_blocks - reader.max_append
        blocks, is_right = reader.read(reader.list_keys())
        assert is_right.all() and [block[0] for block in blocks] == list(range(number + 1))[-len(blocks) :]
    assert dropped == KEYS[: len(dropped)] and len(dropped) + len(reader) == 90


def test_a_reader_that_copies_the_memory_itself_learns_where_blocks_are_and_what_their_sums_are(fd: int) -> None:
    writer, reader = BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True), BlockRing(fd, BLOCK_BYTES, LAYOUT)
    append(writer, 1, 2, 3)
    reader.refresh()
    offsets, sums, is_there = reader.locate([KEYS[3], KEYS[1]])
    assert is_there.all()
    num_bytes = reader.rows.shape[1]
    memory = reader.rows.reshape(-1)
    copies = np.stack([memory[int(offset) : int(offset) + num_bytes] for offset in offsets])
    assert (copies[0] == 3).all() and (copies[1] == 1).all() and (block_sums(copies) == sums).all()
    writer.rows[2, 5] = 4  # of KEYS[3]
    assert (block_sums(reader.rows[[2, 0]]) == sums).tolist() == [False, True]
    for number in range(4, 57):
        append(writer, number)
    assert reader.locate([KEYS[1], KEYS[3]])[2].tolist() == [False, True], "the first one was overwritten"


def test_a_block_that_is_appended_once_more_is_not_lost(fd: int) -> None:
    writer = BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True)
    append(writer, 0)
    for number in range(1, 30):
        append(writer, number)
    append(writer, 0)
    for number in range(30, 55):
        append(writer, number)
    assert KEYS[0] in writer and KEYS[1] not in writer


def test_a_block_that_changes_while_it_is_read_is_found_to_be_wrong(fd: int) -> None:
    writer, reader = BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True), BlockRing(fd, BLOCK_BYTES, LAYOUT)
    append(writer, 1, 2, 3)
    reader.refresh()
    writer.rows[1, 60] += 1  # half of another block
    assert reader.read(KEYS[1:4])[1].tolist() == [True, False, True]
    writer._keys[2] = 9  # the next one has been written, and its number has not
    assert reader.read(KEYS[1:4])[1].tolist() == [True, False, False]


def test_a_reader_that_did_not_look_for_a_whole_turn_finds_what_is_there(fd: int) -> None:
    writer, reader = BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True), BlockRing(fd, BLOCK_BYTES, LAYOUT)
    append(writer, 0, 1)
    reader.refresh()
    for number in range(2, 99):
        append(writer, number)
    assert set(reader.refresh()) >= {KEYS[0], KEYS[1]}
    assert reader.list_keys() == writer.list_keys() and reader.read(reader.list_keys())[1].all()


def test_a_worker_that_is_started_again_goes_on_where_the_lost_one_was(fd: int) -> None:
    append(BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True), 1, 2)
    again = BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True)
    append(again, 3)
    assert again.list_keys() == KEYS[1:4] and again.read(KEYS[1:4])[1].all()


def test_a_process_that_knows_no_model_attaches_to_what_another_one_has_laid_out(fd: int) -> None:
    with pytest.raises(ValueError, match="no process has laid out"):
        BlockRing.attach(fd)
    reader = BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True)
    writer = BlockRing.attach(fd, is_writer=True)
    assert (writer.layout, writer.block_bytes, writer.num_blocks) == (LAYOUT, BLOCK_BYTES, reader.num_blocks)
    append(writer, 1, 2)
    reader.refresh()
    assert reader.list_keys() == KEYS[1:3] and BlockRing.attach(fd).list_keys() == KEYS[1:3]


def test_blocks_of_another_layout_are_not_read(fd: int) -> None:
    append(BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True), 1, 2)
    other = BlockRing(fd, BLOCK_BYTES, LAYOUT[::-1])
    assert other.refresh() == [] and not len(other)
    assert not len(BlockRing(fd, BLOCK_BYTES, LAYOUT[::-1], is_writer=True)), "it begins anew"


def test_memory_for_too_few_blocks_is_refused() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 10_000)
    with pytest.raises(ConfigError, match=r"10,000 bytes in this process, holds less than 8: one has 4,096 bytes"):
        BlockRing(fd, 4096, LAYOUT)
    os.close(fd)


def test_a_sum_differs_where_two_halves_of_blocks_are_together(fd: int) -> None:
    """As after a copy of a row that is overwritten meanwhile."""
    rng = np.random.default_rng(0)
    writer = BlockRing(fd, BLOCK_BYTES, LAYOUT, is_writer=True)
    (row,) = writer.next_rows(1)
    writer.rows[row] = rng.integers(0, 256, writer.rows.shape[1])
    writer.append([KEYS[0]])
    writer.refresh()
    for cut in range(1, BLOCK_BYTES):
        before = writer.rows[row].copy()
        writer.rows[row, :cut] = rng.integers(0, 256, cut)
        assert not writer.read([KEYS[0]])[1].any()
        writer.rows[row] = before
    assert writer.read([KEYS[0]])[1].all()
